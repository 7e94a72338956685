//! Services and service entries.

use std::net::IpAddr;

use culvert_proto::istio::workload::{
    IpFamilies, LoadBalancing, NetworkAddress, Port, Service as Wire,
    load_balancing::{HealthPolicy, Mode, Scope},
};

use super::{
    Output, fault,
    view::{ServicePorts, Source, TargetPort, View},
    waypoint::{self, Traffic},
};
use crate::{
    objects::{IntOrName, Kind, Labels, Meta, Service, ServiceEntry, parse_net},
    resource::Resource,
    world::{MeshConfig, Space},
};

/// Names the service that a slice is of.
pub(super) const SLICE_OF: &str = "kubernetes.io/service-name";
const DISTRIBUTION: &str = "networking.istio.io/traffic-distribution";

/// The resource name of a Kubernetes service.
pub(super) fn name(namespace: &str, service: &str, config: &MeshConfig) -> String {
    format!("{namespace}/{}", hostname(namespace, service, config))
}

pub(super) fn hostname(namespace: &str, service: &str, config: &MeshConfig) -> String {
    format!("{service}.{namespace}.svc.{}", config.domain)
}

/// All services of a namespace as endpoints see them.
pub(super) fn ports(namespace: &str, space: &Space, config: &MeshConfig) -> Vec<ServicePorts> {
    let services = space.services.iter().filter(|(_, service)| is_inside(service));
    let services = services.map(|(service, object)| ServicePorts {
        name: name(namespace, service, config),
        selector: object.spec.selector.clone(),
        source: Source::Service,
        ports: tcp(object)
            .map(|(name, port, target)| TargetPort {
                name: name.to_owned(),
                port,
                target: target.cloned().unwrap_or(IntOrName::Number(port)),
            })
            .collect(),
    });
    let entries = space.service_entries.values().flat_map(|object| {
        let selector = object.spec.workload_selector.as_ref();
        object.spec.hosts.iter().map(move |host| ServicePorts {
            name: format!("{namespace}/{host}"),
            selector: selector.map(|selector| selector.labels.clone()).unwrap_or_default(),
            source: Source::ServiceEntry,
            ports: entry_targets(object)
                .map(|(name, port, target)| TargetPort {
                    name: name.to_owned(),
                    port,
                    target: IntOrName::Number(target),
                })
                .collect(),
        })
    });
    services.chain(entries).collect()
}

/// A name for something outside is resolved by DNS alone.
fn is_inside(service: &Service) -> bool {
    service.spec.kind != "ExternalName"
}

fn tcp(service: &Service) -> impl Iterator<Item = (&str, u16, Option<&IntOrName>)> {
    let tcp = |protocol: &str| matches!(protocol, "" | "TCP");
    let ports = service.spec.ports.iter().filter(move |port| tcp(&port.protocol));
    ports.map(|port| (port.name.as_str(), port.port, port.target_port.as_ref()))
}

fn entry_targets(entry: &ServiceEntry) -> impl Iterator<Item = (&str, u16, u16)> {
    entry.spec.ports.iter().map(|port| {
        let target = if port.target_port == 0 { port.number } else { port.target_port };
        (port.name.as_str(), port.number, target)
    })
}

pub(super) fn all(
    namespace: &str,
    space: &Space,
    view: &View,
    config: &MeshConfig,
    output: &mut Output,
) {
    for (name, object) in space.services.iter().filter(|(_, service)| is_inside(service)) {
        let waypoint = view.waypoint(namespace, &object.metadata.labels, Traffic::Service);
        if let Err(what) = &waypoint {
            output.faults.push(fault(Kind::Service, namespace, name, waypoint::FIELD, what));
        }
        let waypoint = waypoint.ok().flatten().map(|waypoint| waypoint.address.clone());
        let addresses = object.spec.virtual_addresses();
        output.add(Resource::service(Wire {
            name: name.clone(),
            namespace: namespace.to_owned(),
            hostname: hostname(namespace, name, config),
            addresses: addresses.into_iter().map(|ip| host(config, ip)).collect(),
            ports: tcp(object)
                .map(|(_, port, target)| Port {
                    service_port: port.into(),
                    target_port: match target {
                        None => port.into(),
                        Some(IntOrName::Number(number)) => (*number).into(),
                        Some(IntOrName::Name(_)) => 0,
                    },
                    app_protocol: 0,
                })
                .collect(),
            waypoint,
            load_balancing: balancing(object),
            ip_families: families(&object.spec.ip_families).into(),
            canonical: true,
            ..Wire::default()
        }));
    }
    let mut entries: Vec<_> = space.service_entries.iter().collect();
    entries.sort_by_key(|(name, entry)| (&entry.metadata.creation_timestamp, *name));
    for (name, object) in entries {
        entry(namespace, name, object, view, config, output);
    }
}

fn entry(
    namespace: &str,
    name: &str,
    object: &ServiceEntry,
    view: &View,
    config: &MeshConfig,
    output: &mut Output,
) {
    let waypoint = view.waypoint(namespace, &object.metadata.labels, Traffic::Service);
    if let Err(what) = &waypoint {
        output.faults.push(fault(Kind::ServiceEntry, namespace, name, waypoint::FIELD, what));
    }
    let waypoint = waypoint.ok().flatten().map(|waypoint| waypoint.address.clone());
    let mut addresses = Vec::new();
    for text in &object.spec.addresses {
        match parse_net(text) {
            Ok(net) if net.prefix_len() == net.max_prefix_len() => {
                addresses.push(host(config, net.addr()));
            }
            Ok(net) => addresses.push(NetworkAddress {
                length: Some(net.prefix_len().into()),
                ..host(config, net.trunc().addr())
            }),
            Err(what) => {
                let field = "spec.addresses";
                output.faults.push(fault(Kind::ServiceEntry, namespace, name, field, what));
            }
        }
    }
    for hostname in &object.spec.hosts {
        let service = Wire {
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            hostname: hostname.clone(),
            addresses: addresses.clone(),
            ports: entry_targets(object)
                .map(|(_, port, target)| Port {
                    service_port: port.into(),
                    target_port: target.into(),
                    app_protocol: 0,
                })
                .collect(),
            subject_alt_names: object.spec.subject_alt_names.clone(),
            waypoint: waypoint.clone(),
            load_balancing: distribution(None, &object.metadata),
            ..Wire::default()
        };
        if !output.add(Resource::service(service)) {
            let what = format!("host {hostname} is defined twice in the namespace; remove one");
            output.faults.push(fault(Kind::ServiceEntry, namespace, name, "spec.hosts", what));
        }
    }
}

pub(super) fn host(config: &MeshConfig, ip: IpAddr) -> NetworkAddress {
    NetworkAddress { network: config.network.clone(), address: octets(ip), length: None }
}

pub(super) fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn balancing(service: &Service) -> Option<LoadBalancing> {
    let spec = &service.spec;
    let chosen = if spec.internal_traffic_policy == "Local" {
        Some(preference(Mode::Strict, &[Scope::Node]))
    } else {
        distribution(Some(&spec.traffic_distribution), &service.metadata)
    };
    if !spec.publish_not_ready_addresses {
        return chosen;
    }
    let health_policy = HealthPolicy::AllowAll.into();
    Some(LoadBalancing { health_policy, ..chosen.unwrap_or_default() })
}

/// By the field, or else by the annotation, which is older.
fn distribution(field: Option<&str>, meta: &Meta) -> Option<LoadBalancing> {
    let written = field.filter(|field| !field.is_empty());
    let written = written.or_else(|| meta.annotation(DISTRIBUTION))?;
    match written.to_ascii_lowercase().as_str() {
        "preferclose" | "prefersamezone" => {
            Some(preference(Mode::Failover, &[Scope::Network, Scope::Region, Scope::Zone]))
        }
        "prefersamenode" => Some(preference(
            Mode::Failover,
            &[Scope::Network, Scope::Region, Scope::Zone, Scope::Subzone, Scope::Node],
        )),
        _ => None,
    }
}

fn preference(mode: Mode, scopes: &[Scope]) -> LoadBalancing {
    LoadBalancing {
        routing_preference: scopes.iter().map(|&scope| scope.into()).collect(),
        mode: mode.into(),
        health_policy: HealthPolicy::OnlyHealthy.into(),
    }
}

fn families(families: &[String]) -> IpFamilies {
    match families {
        [] => IpFamilies::Automatic,
        [one] if one == "IPv4" => IpFamilies::Ipv4Only,
        [_] => IpFamilies::Ipv6Only,
        _ => IpFamilies::Dual,
    }
}

/// Whether the labels are those of something that a waypoint's controller made.
pub(super) fn is_of_waypoint(labels: &Labels) -> bool {
    labels.get("gateway.istio.io/managed").is_some_and(|by| by == "istio.io-mesh-controller")
}
