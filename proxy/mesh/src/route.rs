//! Where a connection that leaves a pod goes, and how it has to be carried there.
//! Dialling is left to `culvert-carry`, which takes a [`Route`] as its order.

mod balance;
mod refusal;
mod waypoint;

#[cfg(test)]
mod tests;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use rand::Rng;

use self::balance::{Ask, Role};
pub use self::refusal::Refusal;
pub(crate) use self::waypoint::Hops;
use crate::{
    Identity,
    service::{Mode, Service},
    snapshot::Snapshot,
    workload::{HBONE_PORT, Protocol, Workload, canonical},
};

/// A connection that an app opened.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The workload whose app it is, known by the listener that accepted it.
    pub source: &'a Workload,
    /// What the app asked for, in the source's network.
    pub dst: SocketAddr,
}

/// What becomes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// Plain TCP. Never to a workload of the mesh, nor to an address that one owns.
    Direct {
        /// What to dial.
        dst: SocketAddr,
        /// The workload that is, if known.
        workload: Option<Arc<Workload>>,
        /// The service that was asked for, if one was.
        service: Option<Arc<Service>>,
    },
    /// CONNECT over mutual TLS.
    Hbone(HboneRoute),
    /// Nothing may be dialled.
    Refuse(Refusal),
}

/// A tunnel, and what to ask of its far end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HboneRoute {
    /// What to dial.
    pub gateway: SocketAddr,
    /// The `:authority` of the CONNECT: `ip:port` or `[ip]:port`.
    pub authority: String,
    /// The far end's certificate must hold one of these; never empty.
    pub expected: Vec<Identity>,
    /// The far end.
    pub workload: Arc<Workload>,
    /// The service that was asked for, if one was.
    pub service: Option<Arc<Service>>,
    /// What the far end is.
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

/// Decides about `request`. All choices are `rng`'s.
///
/// An address means the service of exactly that virtual address, else the workload that owns it,
/// else the service whose range holds it: the most specific claim wins. What nobody claims is not
/// the mesh's and passes through in plaintext.
pub fn route(snapshot: &Snapshot, request: &Request<'_>, rng: &mut (impl Rng + ?Sized)) -> Route {
    Decision { snapshot, source: request.source, dst: canonical(request.dst), rng }
        .target()
        .unwrap_or_else(Route::Refuse)
}

struct Decision<'a, R: ?Sized> {
    snapshot: &'a Snapshot,
    source: &'a Workload,
    dst: SocketAddr,
    rng: &'a mut R,
}

impl<'a, R: Rng + ?Sized> Decision<'a, R> {
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
            snapshot.services_of_vip(network, &ip).iter().find(|s| in_mesh(s))
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
        let chosen = balance::choose(service, &ask, self.rng)?;
        match chosen.workload.protocol {
            Protocol::Tcp => self.direct(chosen.address, Some(chosen.workload), Some(service)),
            Protocol::Hbone => Ok(hbone(chosen.workload, chosen.address, Some(service))),
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
        Ok(match workload.protocol {
            Protocol::Hbone => hbone(workload, self.dst, service),
            Protocol::Tcp => Route::Direct {
                dst: self.dst,
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
            _ => Ok(Route::Direct { dst, workload: workload.cloned(), service: service.cloned() }),
        }
    }

    fn ask(&self, port: u16, role: Role) -> Ask<'a> {
        Ask { source: self.source, ip: self.dst.ip(), port, role }
    }
}

/// The route to `workload` itself; `app` is its address and the port that its app is to get.
fn hbone(workload: &Arc<Workload>, app: SocketAddr, service: Option<&Arc<Service>>) -> Route {
    Route::Hbone(HboneRoute {
        gateway: SocketAddr::new(app.ip(), HBONE_PORT),
        authority: app.to_string(),
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
fn in_mesh(service: &Service) -> bool {
    service.endpoints.iter().any(|e| e.workload.protocol == Protocol::Hbone)
}

/// Whether `a` and `b` are of one address family.
fn same_family(a: IpAddr, b: IpAddr) -> bool {
    a.is_ipv4() == b.is_ipv4()
}
