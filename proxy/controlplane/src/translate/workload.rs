//! Pods.

use std::sync::Arc;

use culvert_mesh::Identity;
use culvert_proto::istio::workload::{
    ApplicationTunnel, Locality, NetworkMode, TunnelProtocol, Workload as Wire, WorkloadStatus,
    WorkloadType,
};

use super::{
    Output, fault,
    service::octets,
    view::View,
    waypoint::{self, Traffic},
};
use crate::{
    objects::{Kind, Labels, Meta, Owner, Pod},
    resource::Resource,
    world::{MeshConfig, World},
};

const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";
const REDIRECTION: &str = "ambient.istio.io/redirection";
const SIDECAR: &str = "sidecar.istio.io/status";
const TUNNEL: &str = "networking.istio.io/tunnel";
const NETWORK: &str = "topology.istio.io/network";
const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";
/// The trust domain that is not written.
const DEFAULT_TRUST_DOMAIN: &str = "cluster.local";

pub(super) fn pod(
    namespace: &str,
    name: &str,
    pod: &Arc<Pod>,
    view: &View,
    world: &World,
    config: &MeshConfig,
    output: &mut Output,
) {
    let addresses = pod.addresses();
    if pod.is_over() || addresses.is_empty() {
        return;
    }
    let account = pod.service_account();
    if let Err(error) = Identity::new(&config.trust_domain, namespace, account) {
        let what = format!("{error}; correct it");
        let field = "spec.serviceAccountName";
        output.faults.push(fault(Kind::Pod, namespace, name, field, what));
        return;
    }
    let meta = &pod.metadata;
    let instance = meta.label(GATEWAY_NAME);
    let instance =
        instance.and_then(|of| view.waypoints.get(&(namespace.to_owned(), of.to_owned())));
    let waypoint = match instance {
        Some(_) => Ok(None),
        None => view.waypoint(namespace, &meta.labels, Traffic::Workload),
    };
    if let Err(what) = &waypoint {
        output.faults.push(fault(Kind::Pod, namespace, name, waypoint::FIELD, what));
    }
    let (workload_name, workload_type) = owner(name, meta);
    let (canonical_name, canonical_revision) = canonical(&meta.labels, &workload_name);
    let tunnel = instance.and_then(|waypoint| waypoint.binding);
    let native_tunnel = is_native(&meta.labels);
    let meshed = native_tunnel || is_enrolled(pod, &view.labels);
    output.add(Resource::workload(Wire {
        uid: format!("{}//Pod/{namespace}/{name}", config.cluster_id),
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        addresses: addresses.into_iter().map(octets).collect(),
        network: network(&meta.labels, config),
        tunnel_protocol: protocol(meshed).into(),
        trust_domain: trust_domain(config),
        service_account: account.to_owned(),
        waypoint: waypoint.ok().flatten().map(|waypoint| waypoint.address.clone()),
        node: pod.spec.node_name.clone(),
        canonical_name,
        canonical_revision,
        workload_type: workload_type.into(),
        workload_name,
        native_tunnel,
        authorization_policies: view.policies_of(&meta.labels),
        status: if pod.is_ready() {
            WorkloadStatus::Healthy.into()
        } else {
            WorkloadStatus::Unhealthy.into()
        },
        cluster_id: config.cluster_id.clone(),
        services: view.services_of_pod(name, pod),
        application_tunnel: tunnel.map(|(protocol, port)| ApplicationTunnel {
            protocol: protocol.into(),
            port: port.into(),
        }),
        locality: world.nodes.get(&pod.spec.node_name).and_then(|node| locality(&node.metadata)),
        network_mode: if pod.spec.host_network {
            NetworkMode::HostNetwork.into()
        } else {
            NetworkMode::Standard.into()
        },
        ..Wire::default()
    }));
}

/// Whether a node captures the pod: what its agent said where one did, what the labels ask for else.
fn is_enrolled(pod: &Pod, space: &Labels) -> bool {
    let meta = &pod.metadata;
    if pod.spec.host_network || meta.annotations.contains_key(SIDECAR) {
        return false;
    }
    match (meta.annotation(REDIRECTION), meta.label(DATAPLANE_MODE)) {
        (Some(said), _) => said == "enabled",
        (None, Some(mode)) => mode == "ambient",
        (None, None) => space.get(DATAPLANE_MODE).is_some_and(|mode| mode == "ambient"),
    }
}

pub(super) fn is_native(labels: &Labels) -> bool {
    let tunnels = labels.get(TUNNEL).map(String::as_str).unwrap_or_default();
    tunnels.split(',').any(|tunnel| tunnel.trim() == "http")
}

pub(super) fn protocol(meshed: bool) -> TunnelProtocol {
    if meshed { TunnelProtocol::Hbone } else { TunnelProtocol::None }
}

pub(super) fn network(labels: &Labels, config: &MeshConfig) -> String {
    labels.get(NETWORK).unwrap_or(&config.network).clone()
}

pub(super) fn trust_domain(config: &MeshConfig) -> String {
    match config.trust_domain.as_str() {
        DEFAULT_TRUST_DOMAIN => String::new(),
        other => other.to_owned(),
    }
}

fn locality(node: &Meta) -> Option<Locality> {
    let of = |label: &str| node.label(label).unwrap_or_default().to_owned();
    let locality = Locality {
        region: of("topology.kubernetes.io/region"),
        zone: of("topology.kubernetes.io/zone"),
        subzone: of("topology.istio.io/subzone"),
    };
    (locality != Locality::default()).then_some(locality)
}

/// The name and kind of what the pod is a replica of.
fn owner(pod: &str, meta: &Meta) -> (String, WorkloadType) {
    let Some(Owner { kind, name, .. }) = meta.controller() else {
        return (pod.to_owned(), WorkloadType::Pod);
    };
    match kind.as_str() {
        "ReplicaSet" => {
            let hash = meta.label("pod-template-hash").unwrap_or_default();
            let deployment = name.strip_suffix(hash).and_then(|name| name.strip_suffix('-'));
            match deployment.filter(|name| !hash.is_empty() && !name.is_empty()) {
                Some(deployment) => (deployment.to_owned(), WorkloadType::Deployment),
                None => (name.clone(), WorkloadType::Pod),
            }
        }
        "Job" => match name.rsplit_once('-') {
            // A cron job's jobs are named after the minute that they are of.
            Some((cron, minute))
                if (8..=10).contains(&minute.len())
                    && minute.bytes().all(|c| c.is_ascii_digit()) =>
            {
                (cron.to_owned(), WorkloadType::Cronjob)
            }
            _ => (name.clone(), WorkloadType::Job),
        },
        _ => (name.clone(), WorkloadType::Pod),
    }
}

/// The service and version that a workload goes by in telemetry.
pub(super) fn canonical(labels: &Labels, workload: &str) -> (String, String) {
    let first = |names: [&str; 3]| names.into_iter().find_map(|name| labels.get(name)).cloned();
    let name = first(["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]);
    let revision =
        first(["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"]);
    (name.unwrap_or_else(|| workload.to_owned()), revision.unwrap_or_else(|| "latest".to_owned()))
}
