//! The way into another network: its gateway, and a second tunnel through it.

use std::{collections::BTreeSet, sync::Arc};

use rand::Rng;

use super::{
    Decision, DoubleHboneRoute, Hop, Place, Refusal, Route,
    balance::{self, Reach, Role},
    expected,
};
use crate::{
    Identity,
    endpoints::Endpoint,
    service::Service,
    snapshot::Found,
    workload::{Destination, Workload},
};

/// The gateway of a network, and how it is reached and known.
struct Way {
    gateway: Place,
    workload: Arc<Workload>,
    expected: Vec<Identity>,
}

impl<R: Rng + ?Sized> Decision<'_, R> {
    /// To something like `far`, behind the gateway of its network. The gateway is asked for what
    /// the app asked `service` for. Fails closed.
    pub(super) fn via_network(
        &mut self,
        far: &Arc<Workload>,
        service: &Arc<Service>,
        expected: Vec<Identity>,
        hop: Hop,
    ) -> Result<Route, Refusal> {
        let way = self.way_to(far)?;
        Ok(Route::DoubleHbone(DoubleHboneRoute {
            gateway: way.gateway,
            gateway_expected: way.expected,
            // A virtual address means nothing there, and an endpoint's may be another's.
            authority: Place::Name {
                host: Arc::clone(&service.key.hostname),
                port: self.dst.port(),
            },
            expected,
            gateway_workload: way.workload,
            workload: Arc::clone(far),
            service: Arc::clone(service),
            hop,
        }))
    }

    /// Whoever may answer for `service` in the network of `far`. The gateway chooses, so any
    /// endpoint there may.
    pub(super) fn identities(&self, service: &Service, far: &Workload) -> Vec<Identity> {
        let there = |workload: &&Arc<Workload>| workload.network == far.network;
        let endpoints = self.snapshot.endpoints(&service.key);
        let own: BTreeSet<_> =
            endpoints.iter().map(Endpoint::workload).filter(there).map(|w| &w.identity).collect();
        let vouched = &service.subject_alt_names;
        let own = own.into_iter().filter(|identity| !vouched.contains(identity));
        vouched.iter().chain(own).cloned().collect()
    }

    fn way_to(&mut self, far: &Workload) -> Result<Way, Refusal> {
        let no_way = || Refusal::OtherNetwork {
            target: Arc::clone(&far.uid),
            network: Arc::clone(&far.network),
        };
        let gateway = far.network_gateway.as_deref().ok_or_else(no_way)?;
        let found = self.snapshot.find_destination(&gateway.destination).ok_or_else(no_way)?;
        let (workload, place, expected) = match found {
            Found::Service(service) => {
                let ask = self.ask(gateway.port, Role::Gateway);
                let chosen = balance::choose(self.snapshot, service, &ask, self.rng)?;
                let Reach::Near(place) = chosen.reach else { return Err(no_way()) };
                (chosen.workload, place, expected(chosen.workload, Some(service)))
            }
            Found::Workload(workload) => {
                let place = match &gateway.destination {
                    Destination::Address(address) => {
                        Some(Place::Address((address.ip, gateway.port).into()))
                    }
                    Destination::Name(_) => {
                        balance::place(workload, self.dst.ip(), gateway.port, |_| true)
                    }
                };
                (workload, place.ok_or_else(no_way)?, expected(workload, None))
            }
        };
        Ok(Way { gateway: place, workload: Arc::clone(workload), expected })
    }
}
