//! The waypoints of services and workloads: who has one, which one, and how it is reached.

use std::sync::Arc;

use rand::Rng;

use super::{
    Decision, HboneRoute, Hop, Place, Refusal, Route,
    balance::{self, Reach, Role},
    expected,
};
use crate::{
    Identity,
    service::{Service, WeightedGateway},
    snapshot::{Found, Snapshot},
    workload::{Destination, Gateway, Workload},
};

/// The waypoints through which a destination may be reached.
pub(crate) struct Hops<'a> {
    weighted: &'a [WeightedGateway],
    single: Option<&'a Gateway>,
}

impl<'a> Hops<'a> {
    pub(crate) fn of_service(service: &'a Service) -> Self {
        Self { weighted: &service.weighted_waypoints, single: service.waypoint.as_ref() }
    }

    pub(crate) fn of_workload(workload: &'a Workload) -> Self {
        Self { weighted: &[], single: workload.waypoint.as_deref() }
    }

    /// Whether `workload` is one of the waypoints. What it sends has been through a waypoint, and
    /// sending it there again would never end.
    pub(crate) fn contain(&self, snapshot: &Snapshot, workload: &Workload) -> bool {
        let weighted = self.weighted.iter().map(|w| &w.gateway);
        weighted.chain(self.single).any(|gateway| {
            match snapshot.find_destination(&gateway.destination) {
                Some(Found::Service(service)) => workload.membership(&service.key).is_some(),
                Some(Found::Workload(waypoint)) => waypoint.uid == workload.uid,
                None => false,
            }
        })
    }

    /// A waypoint by weight; the single one if none has weight. `None`: there is no waypoint.
    pub(super) fn choose(&self, rng: &mut (impl Rng + ?Sized)) -> Option<&'a Gateway> {
        let total: u64 = self.weighted.iter().map(|w| u64::from(w.weight)).sum();
        if total == 0 {
            return self.single;
        }
        let mut ticket = rng.random_range(0..total);
        for one in self.weighted {
            let share = u64::from(one.weight);
            if ticket < share {
                return Some(&one.gateway);
            }
            ticket -= share;
        }
        self.single
    }
}

impl<R: Rng + ?Sized> Decision<'_, R> {
    /// To `gateway`, which is asked for what the app asked for. Fails closed.
    pub(super) fn via_waypoint(
        &mut self,
        gateway: &Gateway,
        target: &dyn std::fmt::Display,
        service: Option<&Arc<Service>>,
    ) -> Result<Route, Refusal> {
        let unusable = || Refusal::NoWaypoint {
            waypoint: gateway.destination.clone(),
            target: target.to_string().into(),
        };
        let found = self.snapshot.find_destination(&gateway.destination).ok_or_else(unusable)?;
        let (workload, place, expected) = match found {
            Found::Service(waypoint) => {
                let ask = self.ask(gateway.port, Role::Waypoint);
                let chosen = balance::choose(self.snapshot, waypoint, &ask, self.rng)?;
                let workload = chosen.workload;
                match chosen.reach {
                    Reach::Near(place) => (workload, place, expected(workload, Some(waypoint))),
                    Reach::Far => {
                        let expected = self.identities(waypoint, workload);
                        return self.via_far_waypoint(workload, service, expected);
                    }
                }
            }
            Found::Workload(waypoint) if waypoint.network != self.source.network => {
                return self.via_far_waypoint(waypoint, service, expected(waypoint, None));
            }
            Found::Workload(waypoint) => {
                self.untried(waypoint)?;
                let place = match &gateway.destination {
                    Destination::Address(address) => {
                        Some(Place::Address((address.ip, gateway.port).into()))
                    }
                    Destination::Name(_) => {
                        balance::place(waypoint, self.dst.ip(), gateway.port, |_| true)
                    }
                };
                (waypoint, place.ok_or_else(unusable)?, expected(waypoint, None))
            }
        };
        Ok(Route::Hbone(HboneRoute {
            gateway: place,
            authority: self.dst.into(),
            expected,
            workload: Arc::clone(workload),
            service: service.cloned(),
            hop: Hop::Waypoint,
        }))
    }

    /// To a waypoint in another network. What cannot be named there cannot be asked for.
    fn via_far_waypoint(
        &mut self,
        waypoint: &Arc<Workload>,
        service: Option<&Arc<Service>>,
        expected: Vec<Identity>,
    ) -> Result<Route, Refusal> {
        self.untried(waypoint)?;
        match service {
            Some(service) => self.via_network(waypoint, service, expected, Hop::Waypoint),
            None => Err(Refusal::OtherNetwork {
                target: Arc::clone(&waypoint.uid),
                network: Arc::clone(&waypoint.network),
            }),
        }
    }
}
