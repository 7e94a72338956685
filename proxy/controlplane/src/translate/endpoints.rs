//! Workloads that are not pods: workload entries, the endpoints of service entries, and those of slices.

use std::net::IpAddr;

use culvert_mesh::Identity;
use culvert_proto::istio::workload::{Locality, Workload as Wire, WorkloadStatus, WorkloadType};

use super::{
    Output, fault,
    service::{self, octets},
    view::{View, entry_ports},
    waypoint::{self, Traffic},
    workload,
};
use crate::{
    objects::{Endpoint, EndpointSlice, Kind, Labels, Meta, Resolution, ServiceEntry},
    resource::Resource,
    world::{MeshConfig, Space},
};

pub(super) fn all(
    namespace: &str,
    space: &Space,
    view: &View,
    config: &MeshConfig,
    output: &mut Output,
) {
    for (name, object) in &space.workload_entries {
        let meta = &object.metadata;
        let uid =
            format!("{}/networking.istio.io/WorkloadEntry/{namespace}/{name}", config.cluster_id);
        let services = view.services_of_entry(&meta.labels, &object.spec.ports);
        let entry = Entry { kind: Kind::WorkloadEntry, namespace, name, uid };
        entry.add(meta, &meta.labels, &object.spec, services, view, config, output);
    }
    for (name, object) in &space.service_entries {
        service_entry(namespace, name, object, view, config, output);
    }
    for slice in space.slices.values() {
        slice_endpoints(namespace, slice, view, config, output);
    }
}

fn service_entry(
    namespace: &str,
    name: &str,
    object: &ServiceEntry,
    view: &View,
    config: &MeshConfig,
    output: &mut Output,
) {
    let spec = &object.spec;
    let uid = |address: &str| {
        let cluster = &config.cluster_id;
        format!("{cluster}/networking.istio.io/ServiceEntry/{namespace}/{name}/{address}")
    };
    let services = |hosts: &[String], endpoint: &Endpoint| {
        let services = hosts.iter().filter_map(|host| view.service(&format!("{namespace}/{host}")));
        services.map(|s| (s.name.clone(), entry_ports(s, &endpoint.ports))).collect()
    };
    let dns = matches!(spec.resolution, Resolution::Dns | Resolution::DnsRoundRobin);
    if spec.endpoints.is_empty() && spec.workload_selector.is_none() && dns {
        // Its hosts are where it is.
        for host in &spec.hosts {
            let endpoint = Endpoint { address: host.clone(), ..Endpoint::default() };
            let entry = Entry { kind: Kind::ServiceEntry, namespace, name, uid: uid(host) };
            let services = services(std::slice::from_ref(host), &endpoint);
            let meta = &object.metadata;
            entry.add(meta, &Labels::new(), &endpoint, services, view, config, output);
        }
    }
    for endpoint in &spec.endpoints {
        let entry =
            Entry { kind: Kind::ServiceEntry, namespace, name, uid: uid(&endpoint.address) };
        let services = services(&spec.hosts, endpoint);
        let meta = &object.metadata;
        entry.add(meta, &endpoint.labels, endpoint, services, view, config, output);
    }
}

/// Where an endpoint was written.
struct Entry<'a> {
    kind: Kind,
    namespace: &'a str,
    name: &'a str,
    uid: String,
}

impl Entry<'_> {
    #[expect(clippy::too_many_arguments, reason = "what it is made of comes from as many places")]
    fn add(
        self,
        meta: &Meta,
        own_labels: &Labels,
        endpoint: &Endpoint,
        services: std::collections::HashMap<String, culvert_proto::istio::workload::PortList>,
        view: &View,
        config: &MeshConfig,
        output: &mut Output,
    ) {
        let Self { kind, namespace, name, uid } = self;
        let account = match endpoint.service_account.as_str() {
            "" => "default",
            account => account,
        };
        if let Err(error) = Identity::new(&config.trust_domain, namespace, account) {
            let what = format!("{error}; correct it");
            output.faults.push(fault(kind, namespace, name, "serviceAccount", what));
            return;
        }
        let ip = endpoint.address.parse::<IpAddr>().ok();
        if endpoint.address.is_empty() && endpoint.network.is_empty() {
            let what = "no address; write an IP address or a host name";
            output.faults.push(fault(kind, namespace, name, "address", what));
            return;
        }
        let waypoint = view.waypoint(namespace, own_labels, Traffic::Workload);
        if let Err(what) = &waypoint {
            output.faults.push(fault(kind, namespace, name, waypoint::FIELD, what));
        }
        let (canonical_name, canonical_revision) = workload::canonical(&meta.labels, name);
        let native_tunnel = workload::is_native(own_labels) || workload::is_native(&meta.labels);
        let meshed =
            native_tunnel || meta.annotation("ambient.istio.io/redirection") == Some("enabled");
        let resource = Resource::workload(Wire {
            uid,
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            addresses: ip.map(|ip| octets(ip.to_canonical())).into_iter().collect(),
            hostname: if ip.is_some() { String::new() } else { endpoint.address.clone() },
            network: match endpoint.network.as_str() {
                "" => workload::network(own_labels, config),
                network => network.to_owned(),
            },
            tunnel_protocol: workload::protocol(meshed).into(),
            trust_domain: workload::trust_domain(config),
            service_account: account.to_owned(),
            waypoint: waypoint.ok().flatten().map(|waypoint| waypoint.address.clone()),
            canonical_name,
            canonical_revision,
            workload_type: WorkloadType::Pod.into(),
            workload_name: name.to_owned(),
            native_tunnel,
            authorization_policies: view.policies_of(own_labels),
            status: WorkloadStatus::Healthy.into(),
            cluster_id: config.cluster_id.clone(),
            services,
            locality: locality(&endpoint.locality),
            capacity: (endpoint.weight != 0).then_some(endpoint.weight),
            ..Wire::default()
        });
        if !output.add(resource) {
            let what = format!("address {} is there twice; remove one", endpoint.address);
            output.faults.push(fault(kind, namespace, name, "endpoints", what));
        }
    }
}

/// `region/zone/subzone`.
fn locality(text: &str) -> Option<Locality> {
    let mut parts = text.splitn(3, '/').map(str::to_owned);
    let locality = Locality {
        region: parts.next().unwrap_or_default(),
        zone: parts.next().unwrap_or_default(),
        subzone: parts.next().unwrap_or_default(),
    };
    (locality != Locality::default()).then_some(locality)
}

/// Endpoints that no pod stands for: somebody wrote them by hand.
fn slice_endpoints(
    namespace: &str,
    slice: &EndpointSlice,
    view: &View,
    config: &MeshConfig,
    output: &mut Output,
) {
    let Some(service) = slice.metadata.label(service::SLICE_OF) else { return };
    let Some(service) = view.service(&service::name(namespace, service, config)) else { return };
    if slice.address_type == "FQDN" {
        return;
    }
    // A slice's ports are by the names of the service's.
    let named = slice.ports.iter().filter(|port| matches!(port.protocol.as_str(), "" | "TCP"));
    let named = named.filter_map(|port| Some((port.name.as_str(), port.port?)));
    let named: std::collections::BTreeMap<_, _> = named.collect();
    let ports = service.ports.iter().filter_map(|port| {
        Some(culvert_proto::istio::workload::Port {
            service_port: port.port.into(),
            target_port: (*named.get(port.name.as_str())?).into(),
            app_protocol: 0,
        })
    });
    let ports = culvert_proto::istio::workload::PortList { ports: ports.collect() };
    for endpoint in slice.endpoints.iter().filter(|endpoint| endpoint.target_ref.is_none()) {
        for address in &endpoint.addresses {
            let Ok(ip) = address.parse::<IpAddr>() else { continue };
            let cluster = &config.cluster_id;
            let host = service.name.rsplit('/').next().unwrap_or_default();
            let health = match endpoint.conditions.ready {
                Some(false) => WorkloadStatus::Unhealthy,
                _ => WorkloadStatus::Healthy,
            };
            output.add(Resource::workload(Wire {
                uid: format!("{cluster}/discovery.k8s.io/EndpointSlice/{namespace}/{host}/{ip}"),
                name: host.split('.').next().unwrap_or_default().to_owned(),
                namespace: namespace.to_owned(),
                addresses: vec![octets(ip.to_canonical())],
                network: config.network.clone(),
                trust_domain: workload::trust_domain(config),
                service_account: "default".to_owned(),
                node: endpoint.node_name.clone(),
                canonical_name: host.split('.').next().unwrap_or_default().to_owned(),
                canonical_revision: "latest".to_owned(),
                workload_type: WorkloadType::Pod.into(),
                workload_name: host.split('.').next().unwrap_or_default().to_owned(),
                status: health.into(),
                cluster_id: cluster.clone(),
                services: [(service.name.clone(), ports.clone())].into(),
                locality: locality(&format!("/{}", endpoint.zone)).filter(|l| !l.zone.is_empty()),
                ..Wire::default()
            }));
        }
    }
}
