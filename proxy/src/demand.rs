//! In a mesh that is known on demand: has the state hold what a decision depends on, before it is made.
//!
//! What cannot be learned in time is an error: to carry such a connection in plaintext would be a guess.

use std::{collections::HashSet, net::IpAddr, sync::Arc};

use culvert_control::xds::{DemandError, Key, OnDemand};
use culvert_mesh::{
    Endpoint, PodRef, Snapshot,
    service::Service,
    workload::{Destination, Gateway, Workload},
};

use crate::{config::Config, state::State};

/// Records behind the one that was dialled, and those behind them: a service's waypoint may itself be a service.
const DEPTH: usize = 3;
/// Endpoints of a service whose gateways are looked for; the record of one beyond is learned when it is dialled itself.
const ENDPOINTS: usize = 256;

/// Asks the control plane for what the state does not hold.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    on_demand: OnDemand,
    cluster_id: Arc<str>,
}

impl Demand {
    pub(crate) fn new(on_demand: OnDemand, config: &Config) -> Self {
        Self { on_demand, cluster_id: config.cluster_id.as_str().into() }
    }

    /// Has the state hold the record of one of this node's pods, if there is one.
    pub(crate) async fn pod(&self, pod: &PodRef) -> Result<(), DemandError> {
        // The form of uid that Istio gives pods.
        let uid = format!("{}//Pod/{}/{}", self.cluster_id, pod.namespace, pod.name);
        self.on_demand.fetch(&Key::Workload(uid.into())).await
    }

    /// Has the state hold whatever is at `ip` for `source`, and the waypoints and gateways in front of it.
    pub(crate) async fn destination(
        &self,
        state: &State,
        source: &Workload,
        ip: IpAddr,
    ) -> Result<(), DemandError> {
        let network = &source.network;
        let known = {
            let snapshot = state.load();
            snapshot.services_of_vip(network, &ip).next().is_some()
                || snapshot.find_by_address(network, &ip).is_some()
        };
        if !known {
            self.on_demand.fetch(&Key::address(network, ip)).await?;
        }
        let mut asked = HashSet::new();
        for _ in 0..DEPTH {
            let missing = missing(&state.load(), source, ip, &asked);
            if missing.is_empty() {
                break;
            }
            for destination in missing {
                let key = match &destination {
                    Destination::Address(address) => Key::Address(address.clone()),
                    Destination::Name(name) => Key::Service(name.clone()),
                };
                self.on_demand.fetch(&key).await?;
                asked.insert(destination);
            }
        }
        Ok(())
    }
}

/// What stands in front of what is at `ip` and is neither in `snapshot` nor among `asked`.
fn missing(
    snapshot: &Snapshot,
    source: &Workload,
    ip: IpAddr,
    asked: &HashSet<Destination>,
) -> Vec<Destination> {
    let mut missing: Vec<Destination> = Vec::new();
    let mut add = |gateway: &Gateway| {
        let destination = &gateway.destination;
        if snapshot.find_destination(destination).is_none()
            && !asked.contains(destination)
            && !missing.contains(destination)
        {
            missing.push(destination.clone());
        }
    };
    if let Some(workload) = snapshot.find_by_address(&source.network, &ip) {
        let both = [workload.waypoint.as_deref(), workload.network_gateway.as_deref()];
        both.into_iter().flatten().for_each(&mut add);
    }
    for service in snapshot.services_of_vip(&source.network, &ip) {
        in_front_of(snapshot, source, service, &mut add);
    }
    missing
}

fn in_front_of(
    snapshot: &Snapshot,
    source: &Workload,
    service: &Service,
    add: &mut impl FnMut(&Gateway),
) {
    let weighted = service.weighted_waypoints.iter().map(|weighted| &weighted.gateway);
    service.waypoint.iter().chain(weighted).for_each(&mut *add);
    let endpoints = snapshot.endpoints(&service.key).iter().take(ENDPOINTS);
    let elsewhere =
        endpoints.map(Endpoint::workload).filter(|workload| workload.network != source.network);
    elsewhere.filter_map(|workload| workload.network_gateway.as_deref()).for_each(add);
}

#[cfg(test)]
mod tests;
