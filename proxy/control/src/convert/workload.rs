//! Workloads.

use culvert_mesh::workload::{
    ApplicationTunnel, HBONE_PORT, Health, Locality, Membership, NetworkMode, Protocol,
    TunnelProtocol, WorkloadType,
};
use culvert_mesh::{Identity, Workload};
use culvert_proto::istio::workload as raw;
use culvert_proto::istio::workload::application_tunnel;

use super::{ConvertError, ends, known};

/// What empty fields mean.
const TRUST_DOMAIN: &str = "cluster.local";
const SERVICE_ACCOUNT: &str = "default";
const CLUSTER: &str = "Kubernetes";
const CAPACITY: u32 = 1;

pub(super) fn workload(raw: raw::Workload) -> Result<Workload, ConvertError> {
    let or = |text: &str, default: &'static str| -> String {
        if text.is_empty() { default } else { text }.to_owned()
    };
    if raw.uid.is_empty() {
        return Err(ConvertError::Empty("uid"));
    }
    let identity = Identity::new(
        &or(&raw.trust_domain, TRUST_DOMAIN),
        &raw.namespace,
        &or(&raw.service_account, SERVICE_ACCOUNT),
    )?;
    let protocol = match known("tunnel_protocol", raw.tunnel_protocol)? {
        raw::TunnelProtocol::None => Protocol::Tcp,
        raw::TunnelProtocol::Hbone => Protocol::Hbone,
        raw::TunnelProtocol::LegacyIstioMtls => {
            let value = raw.tunnel_protocol;
            return Err(ConvertError::Unknown { field: "tunnel_protocol", value });
        }
    };
    let network_mode = match known("network_mode", raw.network_mode)? {
        raw::NetworkMode::Standard => NetworkMode::Standard,
        raw::NetworkMode::HostNetwork => NetworkMode::HostNetwork,
    };
    let workload_type = match known("workload_type", raw.workload_type)? {
        raw::WorkloadType::Deployment => WorkloadType::Deployment,
        raw::WorkloadType::Cronjob => WorkloadType::CronJob,
        raw::WorkloadType::Pod => WorkloadType::Pod,
        raw::WorkloadType::Job => WorkloadType::Job,
    };
    let health = match known("status", raw.status)? {
        raw::WorkloadStatus::Healthy => Health::Healthy,
        raw::WorkloadStatus::Unhealthy => Health::Unhealthy,
    };
    let addresses = raw.addresses.iter().map(|bytes| ends::ip("addresses", bytes));
    let addresses = addresses.collect::<Result<_, _>>()?;
    let mut services = raw.services.into_iter().map(membership).collect::<Result<Vec<_>, _>>()?;
    // A map has no order; records that say the same are equal.
    services.sort_unstable_by(|a, b| a.service.cmp(&b.service));
    services.dedup_by(|a, b| a.service == b.service);
    let locality = raw.locality.unwrap_or_default();
    Ok(Workload {
        uid: raw.uid.into(),
        name: raw.name.into(),
        identity,
        addresses,
        protocol,
        network: raw.network.into(),
        network_mode,
        node: raw.node.into(),
        hostname: raw.hostname.to_ascii_lowercase().into(),
        waypoint: raw.waypoint.map(|raw| ends::gateway("waypoint", raw)).transpose()?.map(Box::new),
        network_gateway: raw
            .network_gateway
            .map(|raw| ends::gateway("network_gateway", raw))
            .transpose()?
            .map(Box::new),
        workload_name: raw.workload_name.into(),
        workload_type,
        canonical_name: raw.canonical_name.into(),
        canonical_revision: raw.canonical_revision.into(),
        native_tunnel: raw.native_tunnel,
        application_tunnel: raw.application_tunnel.map(tunnel).transpose()?,
        policies: ends::texts(raw.authorization_policies),
        health,
        cluster_id: or(&raw.cluster_id, CLUSTER).into(),
        locality: Locality {
            region: locality.region.into(),
            zone: locality.zone.into(),
            subzone: locality.subzone.into(),
        },
        capacity: raw.capacity.unwrap_or(CAPACITY),
        services,
    })
}

fn membership((name, ports): (String, raw::PortList)) -> Result<Membership, ConvertError> {
    let (namespace, hostname) = name.split_once('/').unwrap_or(("", &name));
    Ok(Membership {
        service: ends::service_name("services", namespace, hostname)?,
        ports: ends::ports("services", &ports.ports)?,
        health: None,
    })
}

fn tunnel(raw: raw::ApplicationTunnel) -> Result<ApplicationTunnel, ConvertError> {
    const FIELD: &str = "application_tunnel";
    let protocol = match known(FIELD, raw.protocol)? {
        application_tunnel::Protocol::None => TunnelProtocol::None,
        application_tunnel::Protocol::Proxy => TunnelProtocol::Proxy,
    };
    let port = match raw.port {
        0 => None,
        port => Some(ends::port(FIELD, port)?),
    };
    // That one is the proxy's own: what is handed to it would come back.
    if port == Some(HBONE_PORT) {
        return Err(ConvertError::Port { field: FIELD, port: raw.port });
    }
    Ok(ApplicationTunnel { protocol, port })
}
