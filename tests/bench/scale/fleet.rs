//! Workloads, services and policies in any number, with names as long as clusters give them: as a control plane's files
//! and as what it tells nodes.

use std::{collections::HashMap, fmt::Write as _, net::Ipv4Addr};

use culvert_proto::istio::{
    security::{Action, Authorization, Group, Match, Rules, Scope, StringMatch, string_match},
    workload::{
        Address, Locality, NetworkAddress, Port, PortList, Service, TunnelProtocol, Workload,
        address,
    },
};
use prost::Message as _;

const NAMESPACES: usize = 500;
const NODES: usize = 2000;
pub(super) const NETWORK: &str = "network-1";
const REGION: &str = "eu-west-1";
pub(super) const PORT: u16 = 80;
const TARGET_PORT: u16 = 8080;

/// So many workloads, a tenth as many services.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fleet {
    pub(super) workloads: usize,
}

impl Fleet {
    pub(super) fn services(self) -> usize {
        (self.workloads / 10).max(1)
    }

    /// The service that a workload is an endpoint of.
    fn service_of(self, workload: usize) -> usize {
        workload % self.services()
    }

    /// The name of one resource and its content.
    pub(super) fn workload(self, index: usize) -> (String, Vec<u8>) {
        let service = self.service_of(index);
        let app = app(service);
        let ports = PortList {
            ports: vec![Port {
                service_port: PORT.into(),
                target_port: TARGET_PORT.into(),
                app_protocol: 0,
            }],
        };
        let workload = Workload {
            uid: uid(service, index),
            name: pod(service, index),
            namespace: namespace(service),
            addresses: vec![octets(ip(index))],
            network: NETWORK.to_owned(),
            tunnel_protocol: TunnelProtocol::Hbone.into(),
            service_account: app.clone(),
            node: node(index),
            canonical_name: app.clone(),
            canonical_revision: "latest".to_owned(),
            workload_name: app,
            cluster_id: "Kubernetes".to_owned(),
            services: HashMap::from([(
                format!("{}/{}", namespace(service), hostname(service)),
                ports,
            )]),
            locality: Some(Locality {
                region: REGION.to_owned(),
                zone: zone(index),
                subzone: String::new(),
            }),
            ..Workload::default()
        };
        (workload.uid.clone(), encoded(address::Type::Workload(workload)))
    }

    /// The name of one resource and its content.
    pub(super) fn service(index: usize) -> (String, Vec<u8>) {
        let service = Service {
            name: app(index),
            namespace: namespace(index),
            hostname: hostname(index),
            addresses: vec![NetworkAddress {
                network: NETWORK.to_owned(),
                address: octets(vip(index)),
                length: None,
            }],
            ports: vec![Port {
                service_port: PORT.into(),
                target_port: TARGET_PORT.into(),
                app_protocol: 0,
            }],
            ..Service::default()
        };
        let name = format!("{}/{}", service.namespace, service.hostname);
        (name, encoded(address::Type::Service(service)))
    }

    /// All of it, as a file of the control plane.
    pub(super) fn file(self) -> String {
        let mut text = String::from("workloads:\n");
        for index in 0..self.workloads {
            self.write_workload(&mut text, index);
        }
        text.push_str("services:\n");
        for index in 0..self.services() {
            line(
                &mut text,
                format_args!(
                    "- {{name: {}, namespace: {}, hostname: {}, vips: [{NETWORK}/{}], ports: {{{PORT}: {TARGET_PORT}}}}}",
                    app(index),
                    namespace(index),
                    hostname(index),
                    vip(index),
                ),
            );
        }
        text
    }

    /// One workload that the rest does not have, as a file of its own.
    pub(super) fn file_of_one_more(self) -> String {
        let mut text = String::from("workloads:\n");
        let index = self.workloads;
        line(
            &mut text,
            format_args!(
                "- {{uid: {}, name: {}, namespace: {}, workloadIps: [{}], protocol: HBONE, network: {NETWORK}, node: {}}}",
                uid(0, index),
                pod(0, index),
                namespace(0),
                ip(index),
                node(index),
            ),
        );
        text
    }

    fn write_workload(self, text: &mut String, index: usize) {
        let service = self.service_of(index);
        let (app, namespace, hostname) = (app(service), namespace(service), hostname(service));
        line(
            text,
            format_args!(
                "- {{uid: {}, name: {}, namespace: {namespace}, serviceAccount: {app}, workloadIps: [{}], protocol: HBONE, \
             network: {NETWORK}, node: {}, workloadName: {app}, canonicalName: {app}, canonicalRevision: latest, \
             locality: {{region: {REGION}, zone: {}}}, services: {{{namespace}/{hostname}: {{{PORT}: {TARGET_PORT}}}}}}}",
                uid(service, index),
                pod(service, index),
                ip(index),
                node(index),
                zone(index),
            ),
        );
    }
}

/// The name of one resource and its content: a policy of the whole mesh about one principal.
pub(super) fn policy(index: usize) -> (String, Vec<u8>) {
    let exact = string_match::MatchType::Exact(principal(index));
    let about =
        Match { principals: vec![StringMatch { match_type: Some(exact) }], ..Match::default() };
    let policy = Authorization {
        name: format!("about-{index}"),
        namespace: "istio-system".to_owned(),
        scope: Scope::Global.into(),
        action: if index.is_multiple_of(2) { Action::Allow } else { Action::Deny }.into(),
        groups: vec![Group { rules: vec![Rules { matches: vec![about] }] }],
        ..Authorization::default()
    };
    (format!("{}/{}", policy.namespace, policy.name), policy.encode_to_vec())
}

/// Whom a policy is about.
fn principal(index: usize) -> String {
    format!("cluster.local/ns/{}/sa/{}", namespace(index), app(index))
}

pub(super) fn account(index: usize) -> (String, String) {
    (namespace(index), app(index))
}

fn uid(service: usize, index: usize) -> String {
    format!("Kubernetes//Pod/{}/{}", namespace(service), pod(service, index))
}

fn pod(service: usize, index: usize) -> String {
    format!("{}-7d4b9c6f5-{index:05x}", app(service))
}

fn app(service: usize) -> String {
    format!("checkout-{service}")
}

fn namespace(service: usize) -> String {
    format!("team-{}-production", service % NAMESPACES)
}

fn hostname(service: usize) -> String {
    format!("{}.{}.svc.cluster.local", app(service), namespace(service))
}

fn node(index: usize) -> String {
    format!("ip-10-0-{}-{}.{REGION}.compute.internal", index % NODES / 250, index % 250)
}

fn zone(index: usize) -> String {
    format!("{REGION}{}", index % 3)
}

/// Addresses come in no order, as a cluster gives them out.
pub(super) fn ip(index: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0b00_0000 + u32::try_from(index * 40_503 % (1 << 20)).unwrap_or_default())
}

pub(super) fn vip(service: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x6440_0000 + u32::try_from(service).unwrap_or_default())
}

fn octets(ip: Ipv4Addr) -> Vec<u8> {
    ip.octets().to_vec()
}

fn encoded(address: address::Type) -> Vec<u8> {
    Address { r#type: Some(address) }.encode_to_vec()
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    writeln!(text, "{line}").unwrap_or_default();
}
