//! Which endpoint of a service gets a connection: eligibility, locality, then weight.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rand::Rng;

use super::{Refusal, same_family};
use crate::{
    service::{Endpoint, HealthPolicy, IpFamilies, Mode, Scope, Service},
    workload::{Health, Workload},
};

/// What is asked of a service.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
    pub(super) source: &'a Workload,
    /// The address that the app asked for; the endpoint should be of its family.
    pub(super) ip: IpAddr,
    /// A service port.
    pub(super) port: u16,
    pub(super) role: Role,
}

/// What the service is asked as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The destination.
    Endpoint,
    /// A waypoint; one that demultiplexes by itself need not declare the port.
    Waypoint,
}

/// An endpoint and the address that serves what was asked.
pub(super) struct Chosen<'a> {
    pub(super) workload: &'a Arc<Workload>,
    pub(super) address: SocketAddr,
}

/// Picks one of the best endpoints at random, each by its capacity.
///
/// Endpoints in other networks are used only if there is no other, and then refused: so much as
/// one reachable endpoint keeps the service up.
pub(super) fn choose<'a>(
    service: &'a Service,
    ask: &Ask<'_>,
    rng: &mut (impl Rng + ?Sized),
) -> Result<Chosen<'a>, Refusal> {
    let candidates = || service.endpoints.iter().filter_map(|e| Some((e, rank(service, e, ask)?)));
    let reachable = || {
        candidates().filter_map(|(endpoint, rank)| {
            let local = endpoint.workload.network == ask.source.network;
            let address = local.then(|| address(service, endpoint, ask)).flatten()?;
            Some((endpoint, rank, address))
        })
    };
    let Some(best) = reachable().map(|(_, rank, _)| rank).max() else {
        let elsewhere = candidates()
            .map(|(e, _)| &e.workload)
            .find(|w| w.network != ask.source.network && w.network_gateway.is_some());
        return Err(none(service, ask, elsewhere));
    };
    let bests = || reachable().filter(|(_, rank, _)| *rank == best);
    let total: u64 = bests().map(|(e, ..)| u64::from(e.workload.capacity)).sum();
    // Only endpoints of some capacity have a rank, so the range is not empty.
    let mut ticket = rng.random_range(0..total.max(1));
    for (endpoint, _, address) in bests() {
        let share = u64::from(endpoint.workload.capacity);
        if ticket < share {
            return Ok(Chosen { workload: &endpoint.workload, address });
        }
        ticket -= share;
    }
    Err(none(service, ask, None))
}

fn none(service: &Service, ask: &Ask<'_>, elsewhere: Option<&Arc<Workload>>) -> Refusal {
    let (service_name, port) = (service.key.clone(), ask.port);
    match elsewhere {
        Some(workload) => Refusal::OtherNetwork {
            target: service_name.to_string().into(),
            network: Arc::clone(&workload.network),
        },
        None if ask.role == Role::Endpoint && !service.ports.contains_key(&port) => {
            Refusal::NoSuchPort { service: service_name, port }
        }
        None => Refusal::NoHealthyEndpoint { service: service_name, port },
    }
}

/// How much `endpoint` has in common with the client, by what the service counts. `None`: it may
/// not be used.
fn rank(service: &Service, endpoint: &Endpoint, ask: &Ask<'_>) -> Option<usize> {
    let workload = &*endpoint.workload;
    let healthy = endpoint.health == Health::Healthy
        || service.load_balancer.health_policy == HealthPolicy::AllowAll;
    let declared = service.ports.contains_key(&ask.port)
        || (ask.role == Role::Waypoint && workload.application_tunnel.is_some());
    let served = endpoint.target_port(service, ask.port).is_some();
    if !healthy || !declared || !served || workload.capacity == 0 {
        return None;
    }
    let preferences = &service.load_balancer.preferences;
    let run = preferences.iter().take_while(|s| shared(**s, ask.source, workload)).count();
    match service.load_balancer.mode {
        Mode::Standard => Some(0),
        // All candidates that count are in the client's network, so a leading `Network` changes
        // nothing among them.
        Mode::Failover => Some(run),
        Mode::Strict => (run == preferences.len()).then_some(0),
        Mode::Passthrough => None,
    }
}

fn shared(scope: Scope, a: &Workload, b: &Workload) -> bool {
    match scope {
        Scope::Region => a.locality.region == b.locality.region,
        Scope::Zone => a.locality.zone == b.locality.zone,
        Scope::Subzone => a.locality.subzone == b.locality.subzone,
        Scope::Node => a.node == b.node,
        Scope::Cluster => a.cluster_id == b.cluster_id,
        Scope::Network => a.network == b.network,
    }
}

fn address(service: &Service, endpoint: &Endpoint, ask: &Ask<'_>) -> Option<SocketAddr> {
    let allowed = |ip: &IpAddr| match service.ip_families {
        None | Some(IpFamilies::Dual) => true,
        Some(IpFamilies::Ipv4) => ip.is_ipv4(),
        Some(IpFamilies::Ipv6) => ip.is_ipv6(),
    };
    let ip = pick_ip(&endpoint.workload, ask.ip, allowed)?;
    Some(SocketAddr::new(ip, endpoint.target_port(service, ask.port)?))
}

/// The address of `workload` to use for a connection to `asked`: that one if it is the workload's,
/// else one that is allowed, best of the same family.
pub(super) fn pick_ip(
    workload: &Workload,
    asked: IpAddr,
    allowed: impl Fn(&IpAddr) -> bool,
) -> Option<IpAddr> {
    let addresses = || workload.addresses.iter().copied();
    let mut allowed = addresses().filter(allowed).peekable();
    let first = allowed.peek().copied();
    addresses()
        .find(|ip| *ip == asked)
        .or_else(|| allowed.find(|ip| same_family(*ip, asked)))
        .or(first)
}
