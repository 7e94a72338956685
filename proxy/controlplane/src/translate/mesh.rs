//! Mesh documents: records that are written as a node reads them, told in the protocol's messages.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use culvert_mesh::{
    Ports, Service, Snapshot, Workload,
    policy::{self, Condition, Enforcement, Policy, TextMatch},
    service::{HealthPolicy, IpFamilies, LoadBalancer, Mode, Scope, Visibility, WeightedGateway},
    workload::{
        Destination, Gateway, Health, NetworkAddress, NetworkMode, Protocol, ServiceName,
        TunnelProtocol, WorkloadType,
    },
};
use culvert_proto::istio::{security, workload as wire};
use ipnet::IpNet;

use super::service::octets;
use crate::resource::Resource;

/// Everything that `mesh` holds.
pub(super) fn resources(mesh: &Snapshot) -> impl Iterator<Item = Resource> + '_ {
    let workloads = mesh.workloads().map(|w| Resource::workload(workload(w)));
    let services = mesh.services().map(|s| Resource::service(service(s)));
    let policies = mesh.policies().map(|p| Resource::authorization(&authorization(p)));
    workloads.chain(services).chain(policies)
}

fn workload(workload: &Arc<Workload>) -> wire::Workload {
    let tunnel = workload.application_tunnel.map(|tunnel| wire::ApplicationTunnel {
        protocol: match tunnel.protocol {
            TunnelProtocol::None => wire::application_tunnel::Protocol::None.into(),
            TunnelProtocol::Proxy => wire::application_tunnel::Protocol::Proxy.into(),
        },
        port: tunnel.port.unwrap_or_default().into(),
    });
    wire::Workload {
        uid: workload.uid.to_string(),
        name: workload.name.to_string(),
        namespace: workload.namespace().to_owned(),
        addresses: workload.addresses.iter().map(|&ip| octets(ip)).collect(),
        hostname: workload.hostname.to_string(),
        network: workload.network.to_string(),
        tunnel_protocol: match workload.protocol {
            Protocol::Tcp => wire::TunnelProtocol::None.into(),
            Protocol::Hbone => wire::TunnelProtocol::Hbone.into(),
        },
        trust_domain: workload.identity.trust_domain().to_owned(),
        service_account: workload.identity.service_account().to_owned(),
        waypoint: workload.waypoint.as_deref().map(gateway),
        network_gateway: workload.network_gateway.as_deref().map(gateway),
        node: workload.node.to_string(),
        canonical_name: workload.canonical_name.to_string(),
        canonical_revision: workload.canonical_revision.to_string(),
        workload_type: match workload.workload_type {
            WorkloadType::Deployment => wire::WorkloadType::Deployment.into(),
            WorkloadType::CronJob => wire::WorkloadType::Cronjob.into(),
            WorkloadType::Pod => wire::WorkloadType::Pod.into(),
            WorkloadType::Job => wire::WorkloadType::Job.into(),
        },
        workload_name: workload.workload_name.to_string(),
        native_tunnel: workload.native_tunnel,
        authorization_policies: workload.policies.iter().map(ToString::to_string).collect(),
        status: match workload.health {
            Health::Healthy => wire::WorkloadStatus::Healthy.into(),
            Health::Unhealthy => wire::WorkloadStatus::Unhealthy.into(),
        },
        cluster_id: workload.cluster_id.to_string(),
        services: memberships(workload),
        application_tunnel: tunnel,
        locality: {
            let at = &workload.locality;
            Some(wire::Locality {
                region: at.region.to_string(),
                zone: at.zone.to_string(),
                subzone: at.subzone.to_string(),
            })
        },
        network_mode: match workload.network_mode {
            NetworkMode::Standard => wire::NetworkMode::Standard.into(),
            NetworkMode::HostNetwork => wire::NetworkMode::HostNetwork.into(),
        },
        extensions: Vec::new(),
        capacity: Some(workload.capacity),
    }
}

/// The protocol knows a workload's own health only: one that is less ready for a service is no endpoint of it.
fn memberships(workload: &Workload) -> HashMap<String, wire::PortList> {
    let ready = workload
        .services
        .iter()
        .filter(|membership| membership.health.is_none_or(|health| health == workload.health));
    let ports = |ports: &Ports| wire::PortList {
        ports: ports.iter().map(|(port, target)| wire_port(port, target)).collect(),
    };
    ready.map(|membership| (membership.service.to_string(), ports(&membership.ports))).collect()
}

fn wire_port(service: u16, target: u16) -> wire::Port {
    wire::Port { service_port: service.into(), target_port: target.into(), app_protocol: 0 }
}

fn service(service: &Arc<Service>) -> wire::Service {
    let vips = service.vips.iter().map(address);
    let ranges = service.cidr_vips.iter().map(|vip| wire::NetworkAddress {
        network: vip.network.to_string(),
        address: octets(vip.cidr.addr()),
        length: Some(vip.cidr.prefix_len().into()),
    });
    wire::Service {
        name: service.name.to_string(),
        namespace: service.key.namespace.to_string(),
        hostname: service.key.hostname.to_string(),
        addresses: vips.chain(ranges).collect(),
        ports: service.ports.iter().map(|(port, target)| wire_port(port, target)).collect(),
        subject_alt_names: service.subject_alt_names.iter().map(ToString::to_string).collect(),
        waypoint: service.waypoint.as_ref().map(gateway),
        load_balancing: balancing(&service.load_balancer),
        ip_families: match service.ip_families {
            None => wire::IpFamilies::Automatic.into(),
            Some(IpFamilies::Ipv4) => wire::IpFamilies::Ipv4Only.into(),
            Some(IpFamilies::Ipv6) => wire::IpFamilies::Ipv6Only.into(),
            Some(IpFamilies::Dual) => wire::IpFamilies::Dual.into(),
        },
        canonical: service.canonical,
        weighted_waypoints: service
            .weighted_waypoints
            .iter()
            .map(|WeightedGateway { gateway: to, weight }| wire::WeightedWaypoint {
                destination: Some(gateway(to)),
                weight: *weight,
            })
            .collect(),
        visibility: match service.visibility {
            Visibility::Public => wire::service::Visibility::Public.into(),
            Visibility::Namespace => wire::service::Visibility::Namespace.into(),
        },
        ..wire::Service::default()
    }
}

fn balancing(balancer: &LoadBalancer) -> Option<wire::LoadBalancing> {
    use wire::load_balancing as to;
    if *balancer == LoadBalancer::default() {
        return None;
    }
    let scope = |scope: &Scope| match scope {
        Scope::Region => to::Scope::Region.into(),
        Scope::Zone => to::Scope::Zone.into(),
        Scope::Subzone => to::Scope::Subzone.into(),
        Scope::Node => to::Scope::Node.into(),
        Scope::Cluster => to::Scope::Cluster.into(),
        Scope::Network => to::Scope::Network.into(),
    };
    Some(wire::LoadBalancing {
        routing_preference: balancer.preferences.iter().map(scope).collect(),
        mode: match balancer.mode {
            Mode::Standard => to::Mode::UnspecifiedMode.into(),
            Mode::Strict => to::Mode::Strict.into(),
            Mode::Failover => to::Mode::Failover.into(),
            Mode::Passthrough => to::Mode::Passthrough.into(),
        },
        health_policy: match balancer.health_policy {
            HealthPolicy::OnlyHealthy => to::HealthPolicy::OnlyHealthy.into(),
            HealthPolicy::AllowAll => to::HealthPolicy::AllowAll.into(),
        },
    })
}

fn gateway(gateway: &Gateway) -> wire::GatewayAddress {
    use wire::gateway_address::Destination as To;
    let destination = match &gateway.destination {
        Destination::Address(to) => To::Address(address(to)),
        Destination::Name(ServiceName { namespace, hostname }) => {
            let (namespace, hostname) = (namespace.to_string(), hostname.to_string());
            To::Hostname(wire::NamespacedHostname { namespace, hostname })
        }
    };
    wire::GatewayAddress { destination: Some(destination), hbone_mtls_port: gateway.port.into() }
}

fn address(address: &NetworkAddress) -> wire::NetworkAddress {
    let network = address.network.to_string();
    wire::NetworkAddress { network, address: octets(address.ip), length: None }
}

fn authorization(policy: &Arc<Policy>) -> security::Authorization {
    security::Authorization {
        name: policy.name.to_string(),
        namespace: policy.namespace.to_string(),
        scope: match policy.scope {
            policy::Scope::Global => security::Scope::Global.into(),
            policy::Scope::Namespace => security::Scope::Namespace.into(),
            policy::Scope::WorkloadSelector => security::Scope::WorkloadSelector.into(),
        },
        action: match policy.action {
            policy::Action::Allow => security::Action::Allow.into(),
            policy::Action::Deny => security::Action::Deny.into(),
        },
        groups: policy
            .rules
            .iter()
            .map(|rule| security::Group {
                rules: rule
                    .clauses
                    .iter()
                    .map(|clause| security::Rules {
                        matches: clause.matches.iter().map(matched).collect(),
                    })
                    .collect(),
            })
            .collect(),
        dry_run: policy.enforcement == Enforcement::DryRun,
        extensions: Vec::new(),
    }
}

fn matched(matched: &policy::Match) -> security::Match {
    fn both<T, U>(condition: &Condition<T>, to: impl Fn(&T) -> U) -> (Vec<U>, Vec<U>) {
        (condition.any.iter().map(&to).collect(), condition.none.iter().map(&to).collect())
    }
    let (namespaces, not_namespaces) = both(&matched.namespaces, text);
    let (principals, not_principals) = both(&matched.principals, text);
    let (source_ips, not_source_ips) = both(&matched.source_ips, net);
    let (destination_ips, not_destination_ips) = both(&matched.destination_ips, net);
    let (destination_ports, not_destination_ports) =
        both(&matched.destination_ports, |&port| port.into());
    let (service_accounts, not_service_accounts) =
        both(&matched.service_accounts, |account| security::ServiceAccountMatch {
            namespace: account.namespace.to_string(),
            service_account: account.name.to_string(),
        });
    security::Match {
        namespaces,
        not_namespaces,
        principals,
        not_principals,
        source_ips,
        not_source_ips,
        destination_ips,
        not_destination_ips,
        destination_ports,
        not_destination_ports,
        service_accounts,
        not_service_accounts,
        extensions: Vec::new(),
    }
}

fn text(text: &TextMatch) -> security::StringMatch {
    use security::string_match::MatchType;
    let kind = match text {
        TextMatch::Exact(text) => MatchType::Exact(text.to_string()),
        TextMatch::Prefix(text) => MatchType::Prefix(text.to_string()),
        TextMatch::Suffix(text) => MatchType::Suffix(text.to_string()),
        TextMatch::Presence => MatchType::Presence(()),
    };
    security::StringMatch { match_type: Some(kind) }
}

fn net(net: &IpNet) -> security::Address {
    let address: IpAddr = net.addr();
    security::Address { address: octets(address), length: net.prefix_len().into() }
}
