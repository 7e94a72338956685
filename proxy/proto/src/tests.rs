//! The field numbers, against bytes put together by hand.

use prost::Message as _;

use crate::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use crate::istio::security::Authorization;
use crate::istio::v1::auth::IstioCertificateResponse;
use crate::istio::workload::zds::{WorkloadRequest, workload_request};
use crate::istio::workload::{Address, TunnelProtocol, address};

/// A length-delimited field of a number below 16, or of 16 to 2047.
fn field(number: usize, content: &[u8]) -> Vec<u8> {
    let mut bytes = key(number, 2);
    bytes.push(u8::try_from(content.len()).expect("shorter than 128"));
    bytes.extend_from_slice(content);
    bytes
}

fn varint(number: usize, value: u8) -> Vec<u8> {
    let mut bytes = key(number, 0);
    bytes.push(value);
    bytes
}

fn key(number: usize, wire_type: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::encode_varint((number << 3 | wire_type) as u64, &mut bytes);
    bytes
}

#[test]
fn the_fields_of_a_workload_have_the_numbers_of_the_wire() {
    let ports = field(1, &[varint(1, 80), varint(2, 90)].concat());
    let workload = [
        field(20, b"uid"),
        field(1, b"name"),
        field(2, b"ns"),
        field(3, &[10, 0, 0, 1]),
        varint(5, 1),
        field(8, &[field(2, &field(2, &[10, 0, 0, 9])), varint(3, 100)].concat()),
        field(16, b"ns/policy"),
        field(22, &[field(1, b"ns/host"), field(2, &ports)].concat()),
        field(23, &[varint(1, 1), varint(2, 15)].concat()),
        varint(25, 1),
        field(27, &varint(1, 7)),
        field(99, b"from the future"),
    ]
    .concat();
    let Some(address::Type::Workload(read)) =
        Address::decode(field(1, &workload).as_slice()).expect("decodes").r#type
    else {
        unreachable!("the first variant is the workload");
    };
    assert_eq!((&*read.uid, &*read.name, &*read.namespace), ("uid", "name", "ns"));
    assert_eq!(read.addresses, [[10, 0, 0, 1]]);
    assert_eq!(read.tunnel_protocol(), TunnelProtocol::Hbone);
    assert_eq!(read.waypoint.as_ref().map(|waypoint| waypoint.hbone_mtls_port), Some(100));
    assert_eq!(read.authorization_policies, ["ns/policy"]);
    let port = &read.services["ns/host"].ports[0];
    assert_eq!((port.service_port, port.target_port), (80, 90));
    assert_eq!(read.application_tunnel.as_ref().map(|tunnel| tunnel.port), Some(15));
    assert_eq!((read.network_mode, read.capacity), (1, Some(7)));
}

#[test]
fn the_fields_of_a_policy_have_the_numbers_of_the_wire() {
    let matched = field(3, &field(2, b"cluster.local/ns/a"));
    let policy = [
        field(1, b"name"),
        field(2, b"ns"),
        varint(3, 2),
        varint(4, 1),
        field(5, &field(1, &field(2, &matched))),
        varint(6, 1),
    ]
    .concat();
    let read = Authorization::decode(policy.as_slice()).expect("decodes");
    assert_eq!((read.scope, read.action, read.dry_run), (2, 1, true));
    assert_eq!(read.groups[0].rules[0].matches[0].principals.len(), 1);
}

#[test]
fn the_fields_of_the_protocols_have_the_numbers_of_the_wire() {
    let refusal = [field(2, b"url"), field(6, b"nonce"), field(7, &field(2, b"why"))].concat();
    let read = DeltaDiscoveryRequest::decode(refusal.as_slice()).expect("decodes");
    assert_eq!((&*read.type_url, &*read.response_nonce), ("url", "nonce"));
    assert_eq!(read.error_detail.expect("present").message, "why");

    let resource = [field(1, b"v1"), field(2, &field(2, b"bytes")), field(3, b"name")].concat();
    let news = [field(2, &resource), field(4, b"url"), field(5, b"n"), field(6, b"gone")].concat();
    let read = DeltaDiscoveryResponse::decode(news.as_slice()).expect("decodes");
    assert_eq!((&*read.resources[0].name, &*read.resources[0].version), ("name", "v1"));
    assert_eq!(read.removed_resources, ["gone"]);

    let read = IstioCertificateResponse::decode(field(1, b"pem").as_slice()).expect("decodes");
    assert_eq!(read.cert_chain, ["pem"]);

    for (bytes, is_delete) in [(field(2, &field(2, b"uid")), true), (field(5, b""), false)] {
        let read = WorkloadRequest::decode(bytes.as_slice()).expect("decodes").payload;
        match read.expect("present") {
            workload_request::Payload::Del(del) => assert!(is_delete && del.uid == "uid"),
            workload_request::Payload::Keep(_) => assert!(!is_delete),
            other => unreachable!("{other:?}"),
        }
    }
}
