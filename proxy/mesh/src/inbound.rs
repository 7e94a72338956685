//! Where a connection that arrives through a tunnel goes inside its pod, or why it may not.
//! Authorization is left to `policy`, dialling and answering the peer to `culvert-carry`.

mod authority;

#[cfg(test)]
mod tests;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use self::authority::{Authority, Host};
use crate::{
    ports,
    route::Hops,
    service::Service,
    snapshot::{Snapshot, best},
    workload::{HBONE_PORT, Workload, canonical},
};

/// What a CONNECT asks for, found to be ours to give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The workload's own address, and the port to dial there.
    pub app: SocketAddr,
    /// The service that the connection is for, as far as can be told.
    pub service: Option<Arc<Service>>,
}

/// Why a CONNECT is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboundRefusal {
    /// The authority is neither `ip:port`, `[ip]:port` nor `host:port`.
    #[error("authority {authority:?} is not of the form ip:port, [ip]:port or host:port")]
    Authority {
        /// The first characters of what was sent.
        authority: String,
    },
    /// The authority's address is not the one the tunnel was opened to, nor one behind us.
    #[error("ip mismatch: authority names {ip} in a tunnel to {tunnel}")]
    IpMismatch {
        /// What the authority names.
        ip: IpAddr,
        /// What the tunnel was opened to.
        tunnel: IpAddr,
    },
    /// The authority's host name is that of a service which this workload does not serve.
    #[error("workload {workload} does not serve {hostname}")]
    NotServed {
        /// This workload's uid.
        workload: Arc<str>,
        /// The service's host name.
        hostname: Arc<str>,
    },
    /// The authority's host name is that of no service.
    #[error("no service is called {hostname}")]
    UnknownHostname {
        /// What the authority names.
        hostname: String,
    },
    /// The service has no such port here.
    #[error("service {hostname} has no port {port} on this workload")]
    NoSuchPort {
        /// The service's host name.
        hostname: Arc<str>,
        /// What the authority names.
        port: u16,
    },
    /// The port is the proxy's own; dialling it would loop.
    #[error("port {port} belongs to the proxy itself")]
    ProxyPort {
        /// The port.
        port: u16,
    },
}

impl InboundRefusal {
    /// The HTTP status of the answer: 400 for what the peer got wrong, 503 for what is not there.
    pub fn status(&self) -> u16 {
        match self {
            Self::Authority { .. } | Self::IpMismatch { .. } | Self::NotServed { .. } => 400,
            Self::UnknownHostname { .. } | Self::NoSuchPort { .. } | Self::ProxyPort { .. } => 503,
        }
    }
}

/// Where a CONNECT for `authority`, in a tunnel to `tunnel_dst` (an address of `local`), leads.
///
/// `proxy_ports` are ports of the pod that the proxy holds beside [`HBONE_PORT`]. The address is
/// always the tunnel's: an authority chooses a port and, at most, what is behind a waypoint.
///
/// # Errors
/// The authority is malformed, not ours to serve, or leads to a port that is not there.
pub fn target(
    snapshot: &Snapshot,
    local: &Workload,
    tunnel_dst: SocketAddr,
    authority: &str,
    proxy_ports: &[u16],
) -> Result<Target, InboundRefusal> {
    let tunnel = canonical(tunnel_dst).ip();
    let asked = Authority::parse(authority).ok_or_else(|| InboundRefusal::Authority {
        authority: authority.chars().take(LOGGED_AUTHORITY).collect(),
    })?;
    let (port, service) = match asked.host {
        Host::Ip(ip) => {
            if ip != tunnel && !fronts_address(snapshot, local, tunnel, ip) {
                return Err(InboundRefusal::IpMismatch { ip, tunnel });
            }
            (asked.port, attribute(snapshot, local, asked.port, None))
        }
        Host::Name(hostname) => {
            let service = find_service(snapshot, local, hostname)?;
            let port = service_port(service, local, asked.port).ok_or_else(|| {
                let hostname = Arc::clone(&service.key.hostname);
                InboundRefusal::NoSuchPort { hostname, port: asked.port }
            })?;
            (port, Some(service))
        }
    };
    let app_port = local.application_tunnel.and_then(|t| t.port).unwrap_or(port);
    for port in [port, app_port] {
        if port == HBONE_PORT || proxy_ports.contains(&port) {
            return Err(InboundRefusal::ProxyPort { port });
        }
    }
    Ok(Target { app: SocketAddr::new(tunnel, app_port), service: service.cloned() })
}

/// The service that a connection to `port` of `local` is for: the one called `forwarded_host` if
/// `local` serves it, else the first of its services that leads to that port.
pub fn attribute<'a>(
    snapshot: &'a Snapshot,
    local: &Workload,
    port: u16,
    forwarded_host: Option<&str>,
) -> Option<&'a Arc<Service>> {
    let services =
        || local.services.iter().filter_map(|m| Some((m, snapshot.find_service(&m.service)?)));
    let called = |host: &str| {
        services().find(|(_, service)| service.key.hostname.eq_ignore_ascii_case(host))
    };
    let leads_there = || {
        services().find(|(member, service)| {
            let mut ports = service.ports.iter().chain(member.ports.iter()).map(|(port, _)| port);
            ports.any(|p| local.target_port(&member.ports, service, p) == Some(port))
        })
    };
    let found = forwarded_host.and_then(called).or_else(leads_there);
    found.map(|(_, service)| service)
}

/// Whether `ip` belongs to something that `local`, reached at `tunnel`, is the waypoint of, or
/// whether `local` is a proxy that tells destinations apart by itself.
fn fronts_address(snapshot: &Snapshot, local: &Workload, tunnel: IpAddr, ip: IpAddr) -> bool {
    if local.application_tunnel.is_some() {
        return true;
    }
    let network = &*local.network;
    let is_waypoint = |hops: Hops<'_>| {
        let at_tunnel = || snapshot.find_by_address(network, &tunnel);
        hops.contain(snapshot, local)
            || at_tunnel().is_some_and(|workload| hops.contain(snapshot, workload))
    };
    if let Some(workload) = snapshot.find_by_address(network, &ip) {
        return is_waypoint(Hops::of_workload(workload));
    }
    let mut services = snapshot.services_of_vip(network, &ip);
    services.any(|service| is_waypoint(Hops::of_service(service)))
}

/// The service called `hostname` that `local` may be asked for.
fn find_service<'a>(
    snapshot: &'a Snapshot,
    local: &Workload,
    hostname: &str,
) -> Result<&'a Arc<Service>, InboundRefusal> {
    let hostname = hostname.to_ascii_lowercase();
    let services = || snapshot.services_of_hostname(&hostname);
    let served = services().filter(|s| local.membership(&s.key).is_some());
    let fronted = services().filter(|s| {
        local.application_tunnel.is_some() || Hops::of_service(s).contain(snapshot, local)
    });
    let namespace = local.namespace();
    if let Some(service) = best(served, namespace).or_else(|| best(fronted, namespace)) {
        return Ok(service);
    }
    let other = services().next();
    Err(match other {
        Some(other) => InboundRefusal::NotServed {
            workload: Arc::clone(&local.uid),
            hostname: Arc::clone(&other.key.hostname),
        },
        None => InboundRefusal::UnknownHostname { hostname },
    })
}

/// The port of `local` that gets what was sent to `port` of `service`.
fn service_port(service: &Service, local: &Workload, port: u16) -> Option<u16> {
    let own = local.membership(&service.key).map_or(ports::NONE, |member| &member.ports);
    local.target_port(own, service, port)
}

/// How much of an illegal authority is worth repeating.
const LOGGED_AUTHORITY: usize = 64;
