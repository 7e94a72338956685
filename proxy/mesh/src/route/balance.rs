//! Which endpoint of a service gets a connection: eligibility, what failed lately, locality, then
//! chance by capacity, and of two the less loaded one.

use std::{net::IpAddr, sync::Arc};

use rand::Rng;

use super::{Place, Refusal, Request, same_family};
use crate::{
    endpoints::{Endpoint, Endpoints},
    service::{HealthPolicy, IpFamilies, Mode, Scope, Service},
    snapshot::Snapshot,
    workload::{Health, Protocol, Workload},
};

/// What is asked of a service.
#[derive(Clone, Copy)]
pub(super) struct Ask<'a> {
    pub(super) request: Request<'a>,
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
    /// The gateway of another network, which is reached from this one whatever network it is in.
    Gateway,
}

/// An endpoint, and how it is reached.
pub(super) struct Chosen<'a> {
    pub(super) workload: &'a Arc<Workload>,
    pub(super) reach: Reach,
}

/// How an endpoint is reached.
pub(super) enum Reach {
    /// Straight: this serves what was asked.
    Near(Place),
    /// Through the gateway of its network.
    Far,
}

/// How much an endpoint is to be preferred, most important first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    /// Nothing speaks against it. If something speaks against all, they are used all the same.
    trusted: bool,
    /// Of this network.
    near: bool,
    /// How much it has in common with the client, by what the service counts.
    rank: usize,
}

/// Picks one of the best endpoints: two by chance, each by its capacity, and of them the one with
/// less load.
pub(super) fn choose<'a>(
    snapshot: &'a Snapshot,
    service: &Service,
    ask: &Ask<'_>,
    rng: &mut (impl Rng + ?Sized),
) -> Result<Chosen<'a>, Refusal> {
    let all = snapshot.endpoints(&service.key);
    let two = draw(service, all, ask, rng).unwrap_or_else(|| scan(service, all, ask, rng));
    let chosen = match two {
        [Some(first), Some(second)] if is_busier(first, second, ask) => second,
        [Some(first), _] => first,
        [None, _] => return Err(none(service, all, ask)),
    };
    let reach = reach(service, chosen, ask).ok_or_else(|| none(service, all, ask))?;
    Ok(Chosen { workload: chosen.workload(), reach })
}

/// Two endpoints by chance, without looking at all of them: where many are equal, most of those
/// that come first are as good as any. `None`: look at all.
fn draw<'a>(
    service: &Service,
    all: &'a Endpoints,
    ask: &Ask<'_>,
    rng: &mut (impl Rng + ?Sized),
) -> Option<[Option<&'a Endpoint>; 2]> {
    let equal = service.load_balancer.mode == Mode::Standard && all.are_equal();
    if !equal || all.len() <= FEW {
        return None;
    }
    let best = Class { trusted: true, near: true, rank: 0 };
    let mut first = None;
    for _ in 0..DRAWS {
        let endpoint = all.get(rng.random_range(0..all.len()))?;
        if class(service, endpoint, ask) != Some(best) {
            continue;
        }
        match first {
            None => first = Some(endpoint),
            Some(one) if std::ptr::eq(one, endpoint) => {}
            Some(one) => return Some([Some(one), Some(endpoint)]),
        }
    }
    first.map(|one| [Some(one), None])
}

/// The two of the best class that chance, each by its capacity, puts first.
fn scan<'a>(
    service: &Service,
    all: &'a Endpoints,
    ask: &Ask<'_>,
    rng: &mut (impl Rng + ?Sized),
) -> [Option<&'a Endpoint>; 2] {
    let mut best = None;
    let mut two = [None; 2];
    for endpoint in all.iter() {
        let class = class(service, endpoint, ask);
        if class.is_none() || class < best {
            continue;
        }
        if class > best {
            (best, two) = (class, [None; 2]);
        }
        // The least of exponential variates whose rates are the weights falls to each by its
        // weight, and the second least likewise among the rest.
        let weight = f64::from(endpoint.workload().capacity);
        let ticket = -(1.0 - rng.random::<f64>()).ln() / weight;
        let holder = Some((ticket, endpoint));
        two = match two {
            [None, _] => [holder, None],
            [Some((first, _)), _] if ticket < first => [holder, two[0]],
            [_, Some((second, _))] if ticket >= second => two,
            [first, _] => [first, holder],
        };
    }
    two.map(|holder| holder.map(|(_, endpoint)| endpoint))
}

/// Whether `first` has more load than `second`, in proportion to their capacities.
fn is_busier(first: &Endpoint, second: &Endpoint, ask: &Ask<'_>) -> bool {
    let (first, second) = (first.workload(), second.workload());
    let load = |workload: &Workload| u64::from(ask.request.outlook.load(workload));
    let (one, other) = (load(first), load(second));
    one.saturating_mul(second.capacity.into()) > other.saturating_mul(first.capacity.into())
}

/// Why no endpoint of `service` can be used.
fn none(service: &Service, all: &Endpoints, ask: &Ask<'_>) -> Refusal {
    let (key, port) = (service.key.clone(), ask.port);
    if ask.role == Role::Endpoint && !service.ports.contains(port) {
        return Refusal::NoSuchPort { service: key, port };
    }
    let untried = Ask { request: Request { failed: &[], ..ask.request }, ..*ask };
    if all.iter().any(|endpoint| class(service, endpoint, &untried).is_some()) {
        return Refusal::Exhausted { target: key.to_string().into() };
    }
    Refusal::NoHealthyEndpoint { service: key, port }
}

/// `None`: it may not be used.
fn class(service: &Service, endpoint: &Endpoint, ask: &Ask<'_>) -> Option<Class> {
    let workload = endpoint.workload();
    let healthy = endpoint.health() == Health::Healthy
        || service.load_balancer.health_policy == HealthPolicy::AllowAll;
    let declared = service.ports.contains(ask.port)
        || (ask.role != Role::Endpoint && workload.application_tunnel.is_some());
    let served = endpoint.target_port(service, ask.port).is_some();
    let failed = ask.request.failed.contains(&workload.uid);
    if !healthy || !declared || !served || failed || workload.capacity == 0 {
        return None;
    }
    let rank = rank(service, workload, ask.request.source)?;
    let near = matches!(reach(service, endpoint, ask)?, Reach::Near(_));
    Some(Class { trusted: !ask.request.outlook.is_avoided(workload), near, rank })
}

/// How much `workload` has in common with the client. `None`: not as much as it must.
fn rank(service: &Service, workload: &Workload, source: &Workload) -> Option<usize> {
    let preferences = &service.load_balancer.preferences;
    let shares = |scope: &&Scope| shared(**scope, source, workload);
    let run = || preferences.iter().take_while(shares).count();
    match service.load_balancer.mode {
        Mode::Standard => Some(0),
        Mode::Strict => (run() == preferences.len()).then_some(0),
        Mode::Failover => Some(match preferences.split_first() {
            // The network is preferred, not required: what is not in it still counts by the rest,
            // and never as much as what is.
            Some((Scope::Network, rest)) if source.network == workload.network => {
                1 + rest.len() + rest.iter().take_while(shares).count()
            }
            Some((Scope::Network, rest)) => rest.iter().take_while(shares).count(),
            _ => run(),
        }),
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

/// `None`: there is no way to it.
fn reach(service: &Service, endpoint: &Endpoint, ask: &Ask<'_>) -> Option<Reach> {
    let workload = endpoint.workload();
    if ask.role != Role::Gateway && workload.network != ask.request.source.network {
        let tunnels = workload.protocol == Protocol::Hbone && workload.network_gateway.is_some();
        return tunnels.then_some(Reach::Far);
    }
    let allowed = |ip: &IpAddr| match service.ip_families {
        None | Some(IpFamilies::Dual) => true,
        Some(IpFamilies::Ipv4) => ip.is_ipv4(),
        Some(IpFamilies::Ipv6) => ip.is_ipv6(),
    };
    let port = endpoint.target_port(service, ask.port)?;
    place(workload, ask.ip, port, allowed).map(Reach::Near)
}

/// Where `workload` is for a connection to `asked`: at that address if it is the workload's, else
/// at one that is allowed, best of the same family. One without addresses is where its name leads.
pub(super) fn place(
    workload: &Workload,
    asked: IpAddr,
    port: u16,
    allowed: impl Fn(&IpAddr) -> bool,
) -> Option<Place> {
    let addresses = || workload.addresses.iter().copied();
    if workload.addresses.is_empty() && !workload.hostname.is_empty() {
        return Some(Place::Name { host: Arc::clone(&workload.hostname), port });
    }
    let mut allowed = addresses().filter(allowed).peekable();
    let first = allowed.peek().copied();
    let ip = addresses()
        .find(|ip| *ip == asked)
        .or_else(|| allowed.find(|ip| same_family(*ip, asked)))
        .or(first)?;
    Some(Place::Address((ip, port).into()))
}

/// So few endpoints are all looked at.
const FEW: usize = 32;
/// When half of the endpoints are not ready, one connection in 4,000 looks at all of them.
const DRAWS: usize = 16;
