//! Table tests of conversion, field by field; and that no bytes make it panic or lose anything.

mod policies;

use culvert_mesh::policy::Policy;
use culvert_mesh::service::{IpFamilies, Mode, Visibility};
use culvert_mesh::workload::{
    Destination, HBONE_PORT, Health, NetworkMode, Protocol, TunnelProtocol, WorkloadType,
};
use culvert_mesh::{Service, Workload};
use culvert_proto::istio::security::{self, Match};
use culvert_proto::istio::workload as raw;
use culvert_proto::istio::workload::gateway_address;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::policies::{matching, text};
use super::*;

fn raw_workload() -> raw::Workload {
    raw::Workload { uid: "u".into(), namespace: "ns".into(), ..raw::Workload::default() }
}

fn raw_service() -> raw::Service {
    raw::Service { namespace: "ns".into(), hostname: "h".into(), ..raw::Service::default() }
}

fn raw_policy() -> Authorization {
    Authorization { name: "p".into(), namespace: "ns".into(), ..Authorization::default() }
}

fn workload_of(raw: raw::Workload) -> Result<Workload, ConvertError> {
    let name = raw.uid.clone();
    let body = Address { r#type: Some(address::Type::Workload(raw)) }.encode_to_vec();
    match address(&name, &body)? {
        Update::Workload(workload) => Ok(workload),
        other => unreachable!("{other:?}"),
    }
}

fn service_of(raw: raw::Service) -> Result<Service, ConvertError> {
    let name = format!("{}/{}", raw.namespace, raw.hostname);
    let body = Address { r#type: Some(address::Type::Service(raw)) }.encode_to_vec();
    match address(&name, &body)? {
        Update::Service(service) => Ok(service),
        other => unreachable!("{other:?}"),
    }
}

fn policy_of(raw: Authorization) -> Result<Policy, ConvertError> {
    match authorization("ns/p", &raw.encode_to_vec())? {
        Update::Policy(policy) => Ok(policy),
        other => unreachable!("{other:?}"),
    }
}

fn to_host(namespace: &str, hostname: &str) -> raw::GatewayAddress {
    let name = raw::NamespacedHostname { namespace: namespace.into(), hostname: hostname.into() };
    raw::GatewayAddress {
        destination: Some(gateway_address::Destination::Hostname(name)),
        hbone_mtls_port: 0,
    }
}

fn port(service_port: u32, target_port: u32) -> raw::Port {
    raw::Port { service_port, target_port, app_protocol: 99 }
}

#[test]
fn what_a_workload_leaves_out_has_its_default() {
    let workload = workload_of(raw_workload()).unwrap();
    assert_eq!(workload.identity.to_string(), "spiffe://cluster.local/ns/ns/sa/default");
    assert_eq!(&*workload.cluster_id, "Kubernetes");
    assert_eq!(workload.capacity, 1);
    assert_eq!(workload.protocol, Protocol::Tcp);
    assert_eq!(workload.network_mode, NetworkMode::Standard);
    assert_eq!(workload.health, Health::Healthy);
    assert_eq!(workload.workload_type, WorkloadType::Deployment);
}

#[test]
fn every_field_of_a_workload_is_kept() {
    let address =
        raw::NetworkAddress { network: "n".into(), address: vec![10, 0, 0, 9], length: None };
    let workload = workload_of(raw::Workload {
        name: "pod".into(),
        addresses: vec![
            vec![10, 0, 0, 1],
            "::ffff:10.0.0.2".parse::<std::net::Ipv6Addr>().unwrap().octets().into(),
        ],
        hostname: "Web.Example".into(),
        network: "net".into(),
        tunnel_protocol: 1,
        trust_domain: "td".into(),
        service_account: "sa".into(),
        waypoint: Some(to_host("w", "Way")),
        network_gateway: Some(raw::GatewayAddress {
            destination: Some(gateway_address::Destination::Address(address)),
            hbone_mtls_port: 15443,
        }),
        node: "node".into(),
        canonical_name: "cn".into(),
        canonical_revision: "v1".into(),
        workload_type: 3,
        workload_name: "job".into(),
        native_tunnel: true,
        authorization_policies: vec!["ns/a".into(), "ns/b".into()],
        status: 1,
        cluster_id: "c".into(),
        services: [
            ("ns/Host".to_owned(), raw::PortList { ports: vec![port(80, 8080), port(81, 0)] }),
            ("ns/other".to_owned(), raw::PortList::default()),
        ]
        .into(),
        application_tunnel: Some(raw::ApplicationTunnel { protocol: 1, port: 15009 }),
        locality: Some(raw::Locality { region: "r".into(), zone: "z".into(), subzone: "s".into() }),
        network_mode: 1,
        capacity: Some(0),
        ..raw_workload()
    })
    .unwrap();
    let texts = [&workload.name, &workload.hostname, &workload.network, &workload.node];
    assert_eq!(texts.map(|text| &**text), ["pod", "web.example", "net", "node"]);
    assert_eq!(
        workload.addresses,
        ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse::<std::net::IpAddr>().unwrap())
    );
    assert_eq!(workload.protocol, Protocol::Hbone);
    assert_eq!(workload.identity.to_string(), "spiffe://td/ns/ns/sa/sa");
    let waypoint = workload.waypoint.clone().unwrap();
    assert_eq!((waypoint.destination.to_string(), waypoint.port), ("w/way".into(), HBONE_PORT));
    let gateway = workload.network_gateway.clone().unwrap();
    assert!(matches!(gateway.destination, Destination::Address(_)));
    assert_eq!((gateway.destination.to_string(), gateway.port), ("n/10.0.0.9".into(), 15443));
    let telemetry =
        [&workload.canonical_name, &workload.canonical_revision, &workload.workload_name];
    assert_eq!(telemetry.map(|text| &**text), ["cn", "v1", "job"]);
    assert_eq!(workload.workload_type, WorkloadType::Job);
    assert!(workload.native_tunnel);
    assert_eq!(workload.policies.iter().map(|key| &**key).collect::<Vec<_>>(), ["ns/a", "ns/b"]);
    assert_eq!(workload.health, Health::Unhealthy);
    assert_eq!(&*workload.cluster_id, "c");
    let services: Vec<_> =
        workload.services.iter().map(|member| member.service.to_string()).collect();
    assert_eq!(services, ["ns/host", "ns/other"]);
    assert!(workload.services[0].ports.iter().eq([(80, 8080), (81, 0)]));
    let tunnel = workload.application_tunnel.unwrap();
    assert_eq!((tunnel.protocol, tunnel.port), (TunnelProtocol::Proxy, Some(15009)));
    assert_eq!(&*workload.locality.subzone, "s");
    assert_eq!(workload.network_mode, NetworkMode::HostNetwork);
    assert_eq!(workload.capacity, 0);
}

#[test]
fn workloads_that_cannot_be_are_refused_with_the_field() {
    let nowhere = raw::GatewayAddress { destination: None, hbone_mtls_port: 15008 };
    let service = |name: &str, ports: Vec<raw::Port>| raw::Workload {
        services: [(name.to_owned(), raw::PortList { ports })].into(),
        ..raw_workload()
    };
    let tunnel = |protocol, port| raw::Workload {
        application_tunnel: Some(raw::ApplicationTunnel { protocol, port }),
        ..raw_workload()
    };
    for (raw, want) in [
        (raw::Workload { uid: String::new(), ..raw_workload() }, "uid is empty"),
        (raw::Workload { namespace: String::new(), ..raw_workload() }, "identity is impossible"),
        (
            raw::Workload { service_account: "a/b".into(), ..raw_workload() },
            "identity is impossible",
        ),
        (
            raw::Workload { addresses: vec![vec![]], ..raw_workload() },
            "addresses has an address of 0 bytes",
        ),
        (
            raw::Workload { addresses: vec![vec![1; 4], vec![1; 5]], ..raw_workload() },
            "addresses has an address of 5 bytes",
        ),
        (
            raw::Workload { tunnel_protocol: 2, ..raw_workload() },
            "tunnel_protocol has the unknown value 2",
        ),
        (
            raw::Workload { tunnel_protocol: 9, ..raw_workload() },
            "tunnel_protocol has the unknown value 9",
        ),
        (
            raw::Workload { network_mode: -1, ..raw_workload() },
            "network_mode has the unknown value -1",
        ),
        (
            raw::Workload { workload_type: 4, ..raw_workload() },
            "workload_type has the unknown value 4",
        ),
        (raw::Workload { status: 2, ..raw_workload() }, "status has the unknown value 2"),
        (
            raw::Workload { waypoint: Some(nowhere.clone()), ..raw_workload() },
            "waypoint has no destination",
        ),
        (
            raw::Workload { network_gateway: Some(nowhere), ..raw_workload() },
            "network_gateway has no destination",
        ),
        (
            raw::Workload { waypoint: Some(to_host("", "h")), ..raw_workload() },
            "waypoint names \"/h\"",
        ),
        (service("host", vec![]), "services names \"/host\""),
        (service("a/b/c", vec![]), "services names \"a/b/c\""),
        (service("a/b", vec![port(0, 1)]), "services has the port 0"),
        (service("a/b", vec![port(65_536 + 80, 80)]), "services has the port 65616"),
        (service("a/b", vec![port(80, 65_536)]), "services has the port 65536"),
        (tunnel(2, 1), "application_tunnel has the unknown value 2"),
        (tunnel(1, 15008), "application_tunnel has the port 15008"),
    ] {
        let error = workload_of(raw).unwrap_err().to_string();
        assert!(error.contains(want), "{error}, not {want}");
    }
}

#[test]
fn every_field_of_a_service_is_kept() {
    let vip = |address: &[u8], length| raw::NetworkAddress {
        network: "n".into(),
        address: address.into(),
        length,
    };
    let service = service_of(raw::Service {
        name: "svc".into(),
        hostname: "Web.Example".into(),
        addresses: vec![
            vip(&[10, 0, 0, 1], None),
            vip(&[10, 0, 0, 2], Some(32)),
            vip(&[10, 1, 2, 3], Some(16)),
            vip(&[10, 0, 0, 4], Some(0)),
            vip(&"::ffff:10.9.9.9".parse::<std::net::Ipv6Addr>().unwrap().octets(), Some(104)),
        ],
        ports: vec![port(80, 0), port(443, 8443)],
        subject_alt_names: vec!["spiffe://td/ns/a/sa/b".into(), "dns.example".into()],
        waypoint: Some(to_host("w", "way")),
        load_balancing: Some(raw::LoadBalancing {
            routing_preference: vec![6, 1, 4],
            mode: 2,
            health_policy: 1,
        }),
        ip_families: 3,
        canonical: true,
        ingress_use_waypoint: true,
        weighted_waypoints: vec![raw::WeightedWaypoint {
            destination: Some(to_host("w", "two")),
            weight: 7,
        }],
        visibility: 1,
        ..raw_service()
    })
    .unwrap();
    assert_eq!(service.key.to_string(), "ns/web.example");
    let vips: Vec<_> = service.vips.iter().map(ToString::to_string).collect();
    assert_eq!(vips, ["n/10.0.0.1", "n/10.0.0.2"]);
    let ranges: Vec<_> = service.cidr_vips.iter().map(|vip| vip.cidr.to_string()).collect();
    assert_eq!(ranges, ["10.1.0.0/16", "0.0.0.0/0", "10.0.0.0/8"]);
    assert!(service.ports.iter().eq([(80, 0), (443, 8443)]));
    assert_eq!(service.subject_alt_names.len(), 1);
    assert!(service.waypoint.is_some() && service.canonical);
    assert_eq!(service.load_balancer.preferences.len(), 3);
    assert_eq!(service.load_balancer.mode, Mode::Failover);
    assert_eq!(service.ip_families, Some(IpFamilies::Dual));
    assert_eq!(service.weighted_waypoints[0].weight, 7);
    assert_eq!(service.visibility, Visibility::Namespace);
    let odd = service_of(raw::Service { visibility: 9, ..raw_service() }).unwrap();
    assert_eq!(odd.visibility, Visibility::Public, "what only hides a name costs no record");
}

#[test]
fn services_that_cannot_be_are_refused_with_the_field() {
    let vip = |address: Vec<u8>, length| raw::Service {
        addresses: vec![raw::NetworkAddress { network: String::new(), address, length }],
        ..raw_service()
    };
    let balanced = |balancing| raw::Service { load_balancing: Some(balancing), ..raw_service() };
    for (raw, want) in [
        (raw::Service { hostname: String::new(), ..raw_service() }, "hostname names \"ns/\""),
        (raw::Service { namespace: String::new(), ..raw_service() }, "hostname names \"/h\""),
        (vip(vec![1, 2, 3], None), "addresses has an address of 3 bytes"),
        (vip(vec![1, 2, 3], Some(24)), "addresses has an address of 3 bytes"),
        (vip(vec![10, 0, 0, 0], Some(33)), "addresses has a prefix of 33 bits"),
        (vip(vec![0; 16], Some(129)), "addresses has a prefix of 129 bits"),
        (
            vip("::ffff:10.0.0.0".parse::<std::net::Ipv6Addr>().unwrap().octets().into(), Some(64)),
            "addresses has a prefix of 64 bits",
        ),
        (
            raw::Service { ports: vec![port(70_000, 1)], ..raw_service() },
            "ports has the port 70000",
        ),
        (raw::Service { ip_families: 4, ..raw_service() }, "ip_families has the unknown value 4"),
        (
            raw::Service {
                weighted_waypoints: vec![raw::WeightedWaypoint::default()],
                ..raw_service()
            },
            "weighted_waypoints has no destination",
        ),
        (
            balanced(raw::LoadBalancing { mode: 4, ..Default::default() }),
            "load_balancing.mode has the unknown value 4",
        ),
        (
            balanced(raw::LoadBalancing { health_policy: 2, ..Default::default() }),
            "load_balancing.health_policy has",
        ),
        (
            balanced(raw::LoadBalancing { routing_preference: vec![1, 7], ..Default::default() }),
            "load_balancing.routing_preference has the unknown value 7",
        ),
        (
            balanced(raw::LoadBalancing { routing_preference: vec![0], ..Default::default() }),
            "load_balancing.routing_preference has the unknown value 0",
        ),
    ] {
        let error = service_of(raw).unwrap_err().to_string();
        assert!(error.contains(want), "{error}, not {want}");
    }
}

#[test]
fn a_resource_is_found_again_by_its_name() {
    let body = Address { r#type: Some(address::Type::Workload(raw_workload())) }.encode_to_vec();
    assert!(matches!(address("U", &body), Err(ConvertError::Misnamed(_))));
    let removed = |name: &str| -> Vec<_> { address_removal(name).collect() };
    let remove = |name: &str| Update::RemoveAddress(name.into());
    assert_eq!(removed("c//Pod/ns/a"), [remove("c//Pod/ns/a")]);
    assert_eq!(removed("ns/host"), [remove("ns/host")]);
    assert_eq!(removed("ns/Host"), [remove("ns/Host"), remove("ns/host")]);
    assert_eq!(address("u", &[]), Err(ConvertError::NoAddress));
}

/// What was damaged is refused or is some record; nothing panics, and what is refused says why.
#[test]
fn damaged_resources_do_no_harm() {
    let mut random = StdRng::seed_from_u64(1);
    let tunnel = raw::ApplicationTunnel { protocol: 1, port: 1 };
    let workload = raw::Workload {
        addresses: vec![vec![10, 0, 0, 1], vec![0; 16]],
        waypoint: Some(to_host("w", "way")),
        services: [("ns/h".to_owned(), raw::PortList { ports: vec![port(80, 8080)] })].into(),
        application_tunnel: Some(tunnel),
        ..raw_workload()
    };
    let vip =
        raw::NetworkAddress { network: "n".into(), address: vec![10, 0, 0, 0], length: Some(8) };
    let service =
        raw::Service { addresses: vec![vip], waypoint: Some(to_host("w", "way")), ..raw_service() };
    let ip = security::Address { address: vec![10, 0, 0, 0], length: 8 };
    let one = Match { source_ips: vec![ip], namespaces: vec![text(None)], ..Match::default() };
    let seeds = [
        Address { r#type: Some(address::Type::Workload(workload)) }.encode_to_vec(),
        Address { r#type: Some(address::Type::Service(service)) }.encode_to_vec(),
        matching(one).encode_to_vec(),
    ];
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..30_000 {
        let mut bytes = seeds[round % seeds.len()].clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..bytes.len());
            match random.random_range(0..4) {
                0 => bytes[at] = random.random(),
                1 => bytes.truncate(at.max(1)),
                2 => bytes.insert(at, random.random()),
                _ => bytes[at] ^= 1 << random.random_range(0..8),
            }
        }
        for result in [address("u", &bytes), address("ns/h", &bytes), authorization("ns/p", &bytes)]
        {
            match result {
                Ok(_) => accepted += 1,
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }
    assert!(accepted > 100 && refused > 10_000, "{accepted} and {refused}");
}
