//! Where a connection that leaves a pod goes, and how it has to be carried there.
//! Dialling is left to `culvert-carry`, which takes a [`Route`] as its order.

mod balance;
mod network;
mod outlook;
mod place;
mod refusal;
mod waypoint;

#[cfg(test)]
mod tests;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rand::Rng;

use self::balance::{Ask, Reach, Role};
pub(crate) use self::waypoint::Hops;
pub use self::{
    outlook::{Failures, NoOutlook, Outlook},
    place::Place,
    refusal::Refusal,
};
use crate::{
    Identity,
    service::{Mode, Service},
    snapshot::Snapshot,
    workload::{HBONE_PORT, Protocol, Workload, canonical},
};

/// A connection that an app opened.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The workload whose app it is, known by the listener that accepted it.
    pub source: &'a Workload,
    /// What the app asked for, in the source's network.
    pub dst: SocketAddr,
    /// The uids of endpoints that this connection has tried in vain; it may ask again for others.
    pub failed: &'a [Arc<str>],
    /// What the node knows of endpoints.
    pub outlook: &'a dyn Outlook,
}

impl<'a> Request<'a> {
    /// A connection's first request, on a node that knows nothing of the endpoints.
    pub fn new(source: &'a Workload, dst: SocketAddr) -> Self {
        Self { source, dst, failed: &[], outlook: &NoOutlook }
    }
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {} but not {:?}", self.source.uid, self.dst, self.failed)
    }
}

/// What becomes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// Plain TCP. Never to a workload of the mesh, nor to an address that one owns.
    Direct {
        /// What to dial.
        dst: Place,
        /// The workload that is, if known.
        workload: Option<Arc<Workload>>,
        /// The service that was asked for, if one was.
        service: Option<Arc<Service>>,
    },
    /// CONNECT over mutual TLS.
    Hbone(HboneRoute),
    /// CONNECT over mutual TLS within another such tunnel.
    DoubleHbone(DoubleHboneRoute),
    /// Nothing may be dialled.
    Refuse(Refusal),
}

/// A tunnel, and what to ask of its far end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HboneRoute {
    /// What to dial.
    pub gateway: Place,
    /// The `:authority` of the CONNECT. Once [resolved](Route::resolve), an endpoint's is its
    /// address.
    pub authority: Place,
    /// The far end's certificate must hold one of these; never empty.
    pub expected: Vec<Identity>,
    /// The far end.
    pub workload: Arc<Workload>,
    /// The service that was asked for, if one was.
    pub service: Option<Arc<Service>>,
    /// What the far end is.
    pub hop: Hop,
}

/// A tunnel to the gateway of another network, and one within it to something there. The gateway
/// passes on the inner tunnel's bytes, and sees nothing of what they say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoubleHboneRoute {
    /// What to dial: the network's gateway.
    pub gateway: Place,
    /// The gateway's certificate must hold one of these; never empty.
    pub gateway_expected: Vec<Identity>,
    /// The `:authority` of both CONNECTs: the service's host name and port. Never to be resolved
    /// here.
    pub authority: Place,
    /// The certificate at the inner tunnel's far end must hold one of these; never empty.
    pub expected: Vec<Identity>,
    /// The gateway.
    pub gateway_workload: Arc<Workload>,
    /// What was chosen behind the gateway. The gateway may choose another of its kind.
    pub workload: Arc<Workload>,
    /// The service that was asked for.
    pub service: Arc<Service>,
    /// What the inner tunnel's far end is.
    pub hop: Hop,
}

/// What a tunnel ends at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// The workload that was asked for.
    Workload,
    /// The waypoint in front of it.
    Waypoint,
}

impl Route {
    /// The endpoint whose failure another one may make up for: to be named in
    /// [`Request::failed`] when it could not be reached.
    pub fn endpoint(&self) -> Option<&Arc<Workload>> {
        match self {
            Self::Direct { workload, .. } => workload.as_ref(),
            Self::Hbone(route) => Some(&route.workload),
            Self::DoubleHbone(route) => Some(&route.workload),
            Self::Refuse(_) => None,
        }
    }

    /// The DNS name that has to be resolved before anything can be dialled.
    pub fn unresolved(&self) -> Option<&Arc<str>> {
        match self {
            Self::Direct { dst: place, .. }
            | Self::Hbone(HboneRoute { gateway: place, .. })
            | Self::DoubleHbone(DoubleHboneRoute { gateway: place, .. }) => place.name(),
            Self::Refuse(_) => None,
        }
    }

    /// This route, now that its [unresolved](Self::unresolved) name is known to lead to `ip`.
    ///
    /// Whoever answers for a name must not lead plaintext to a workload of the mesh: if the address
    /// is one's, its terms apply.
    #[must_use]
    pub fn resolve(
        self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        ip: IpAddr,
        rng: &mut (impl Rng + ?Sized),
    ) -> Self {
        let Some(name) = self.unresolved().cloned() else { return self };
        match self {
            Self::Direct { dst, workload, service } => {
                let dst = SocketAddr::new(ip.to_canonical(), dst.port());
                let mut decision = Decision::new(snapshot, request, rng);
                let (workload, service) = (workload.as_ref(), service.as_ref());
                decision.direct(dst, workload, service).unwrap_or_else(Self::Refuse)
            }
            Self::Hbone(route) => Self::Hbone(HboneRoute {
                gateway: route.gateway.resolved(&name, ip),
                authority: route.authority.resolved(&name, ip),
                ..route
            }),
            Self::DoubleHbone(route) => Self::DoubleHbone(DoubleHboneRoute {
                gateway: route.gateway.resolved(&name, ip),
                ..route
            }),
            Self::Refuse(refusal) => Self::Refuse(refusal),
        }
    }
}

/// Decides about `request`. All choices are `rng`'s.
///
/// An address means the service of exactly that virtual address, else the workload that owns it,
/// else the service whose range holds it: the most specific claim wins. What nobody claims is not
/// the mesh's and passes through in plaintext.
pub fn route(snapshot: &Snapshot, request: &Request<'_>, rng: &mut (impl Rng + ?Sized)) -> Route {
    Decision::new(snapshot, request, rng).target().unwrap_or_else(Route::Refuse)
}

struct Decision<'a, R: ?Sized> {
    snapshot: &'a Snapshot,
    request: Request<'a>,
    source: &'a Workload,
    dst: SocketAddr,
    rng: &'a mut R,
}

impl<'a, R: Rng + ?Sized> Decision<'a, R> {
    fn new(snapshot: &'a Snapshot, request: &Request<'a>, rng: &'a mut R) -> Self {
        let (request, source, dst) = (*request, request.source, canonical(request.dst));
        Self { snapshot, request, source, dst, rng }
    }

    fn target(&mut self) -> Result<Route, Refusal> {
        let snapshot = self.snapshot;
        let (network, client) = (&*self.source.network, self.source.namespace());
        let ip = self.dst.ip();
        if let Some(service) = snapshot.find_by_vip(network, &ip, client) {
            self.for_service(service)
        } else if let Some(workload) = snapshot.find_by_address(network, &ip) {
            self.for_workload(workload, None)
        } else if let Some(service) = snapshot.find_by_cidr(network, &ip, client) {
            self.for_service(service)
        } else if let Some(hidden) =
            snapshot.services_of_vip(network, &ip).find(|s| in_mesh(snapshot, s))
        {
            Err(Refusal::NotVisible { service: hidden.key.clone() })
        } else {
            self.direct(self.dst, None, None)
        }
    }

    fn for_service(&mut self, service: &Arc<Service>) -> Result<Route, Refusal> {
        let hops = Hops::of_service(service);
        if !hops.contain(self.snapshot, self.source)
            && let Some(gateway) = hops.choose(self.rng)
        {
            return self.via_waypoint(gateway, &service.key, Some(service));
        }
        if service.load_balancer.mode == Mode::Passthrough {
            return self.direct(self.dst, None, Some(service));
        }
        let ask = self.ask(self.dst.port(), Role::Endpoint);
        let chosen = balance::choose(self.snapshot, service, &ask, self.rng)?;
        let workload = chosen.workload;
        match (chosen.reach, workload.protocol) {
            (Reach::Near(place), Protocol::Hbone) => Ok(hbone(workload, place, Some(service))),
            (Reach::Near(Place::Address(dst)), Protocol::Tcp) => {
                self.direct(dst, Some(workload), Some(service))
            }
            (Reach::Near(dst), Protocol::Tcp) => Ok(Route::Direct {
                dst,
                workload: Some(Arc::clone(workload)),
                service: Some(Arc::clone(service)),
            }),
            (Reach::Far, _) => {
                let expected = self.identities(service, workload);
                self.via_network(workload, service, expected, Hop::Workload)
            }
        }
    }

    /// To a workload that was asked for by its own address.
    fn for_workload(
        &mut self,
        workload: &Arc<Workload>,
        service: Option<&Arc<Service>>,
    ) -> Result<Route, Refusal> {
        let hops = Hops::of_workload(workload);
        if !hops.contain(self.snapshot, self.source)
            && let Some(gateway) = hops.choose(self.rng)
        {
            return self.via_waypoint(gateway, &workload.uid, service);
        }
        self.untried(workload)?;
        Ok(match workload.protocol {
            Protocol::Hbone => hbone(workload, self.dst.into(), service),
            Protocol::Tcp => Route::Direct {
                dst: self.dst.into(),
                workload: Some(Arc::clone(workload)),
                service: service.cloned(),
            },
        })
    }

    /// The only place where plaintext towards an address begins that its owner was not asked by:
    /// if a workload owns it after all, that workload's terms apply.
    fn direct(
        &mut self,
        dst: SocketAddr,
        workload: Option<&Arc<Workload>>,
        service: Option<&Arc<Service>>,
    ) -> Result<Route, Refusal> {
        match self.snapshot.find_by_address(&self.source.network, &dst.ip()) {
            Some(owner) if workload.is_none() || owner.protocol == Protocol::Hbone => {
                self.dst = dst;
                self.for_workload(owner, service)
            }
            _ => Ok(Route::Direct {
                dst: dst.into(),
                workload: workload.cloned(),
                service: service.cloned(),
            }),
        }
    }

    /// What nothing can stand in for is not tried twice.
    fn untried(&self, workload: &Workload) -> Result<(), Refusal> {
        if self.request.failed.contains(&workload.uid) {
            return Err(Refusal::Exhausted { target: Arc::clone(&workload.uid) });
        }
        Ok(())
    }

    fn ask(&self, port: u16, role: Role) -> Ask<'a> {
        Ask { request: self.request, ip: self.dst.ip(), port, role }
    }
}

/// The route to `workload` itself; `app` is where it is and the port that its app is to get.
fn hbone(workload: &Arc<Workload>, app: Place, service: Option<&Arc<Service>>) -> Route {
    let gateway = match &app {
        Place::Address(address) => Place::Address((address.ip(), HBONE_PORT).into()),
        Place::Name { host, .. } => Place::Name { host: Arc::clone(host), port: HBONE_PORT },
    };
    Route::Hbone(HboneRoute {
        gateway,
        authority: app,
        expected: expected(workload, service.map(|s| &**s)),
        workload: Arc::clone(workload),
        service: service.cloned(),
        hop: Hop::Workload,
    })
}

/// Who may answer for `workload` when it is reached through `service`.
fn expected(workload: &Workload, service: Option<&Service>) -> Vec<Identity> {
    let mut expected = service.map_or_else(Vec::new, |s| s.subject_alt_names.clone());
    if !expected.contains(&workload.identity) {
        expected.push(workload.identity.clone());
    }
    expected
}

/// Whether plaintext to the service could end at a workload of the mesh.
fn in_mesh(snapshot: &Snapshot, service: &Service) -> bool {
    snapshot.endpoints(&service.key).iter().any(|e| e.workload().protocol == Protocol::Hbone)
}

/// Whether `a` and `b` are of one address family.
fn same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4()
}
