//! What the proxy does for each connection and each change, in this process.

use std::{
    hint::black_box,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use culvert_control::convert;
use culvert_mesh::{
    Identity, Origin, Pool, Snapshot, Workload,
    policy::{Connection, evaluate},
    route::{Request, route},
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::{
    FEW,
    fleet::{self, Fleet, NETWORK},
};

/// Decisions between two looks at the clock, which costs more than some of them.
const BATCH: usize = 64;
/// Where peers come from.
const SOURCE: usize = 1;

/// A mesh, and the next change of it.
pub(super) struct Decisions {
    fleet: Fleet,
    mesh: Snapshot,
    pool: Pool,
    keys: StdRng,
}

/// The median of each.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) update: Duration,
    pub(super) identify: Duration,
    pub(super) route_service: Duration,
    pub(super) route_workload: Duration,
}

impl Decisions {
    pub(super) fn new(workloads: usize) -> Result<Self> {
        let fleet = Fleet { workloads };
        let (mut pool, mut mesh) = (Pool::default(), Snapshot::default());
        let services = (0..fleet.services()).map(Fleet::service);
        for (name, body) in services.chain((0..workloads).map(|index| fleet.workload(index))) {
            let update = pool.share(convert::address(&name, &body)?);
            mesh = mesh.apply(Origin::ControlPlane, [update]);
        }
        Ok(Self { fleet, mesh, pool, keys: StdRng::seed_from_u64(1) })
    }

    pub(super) fn sample(&mut self, rounds: usize) -> Result<Sample> {
        let Fleet { workloads } = self.fleet;
        let mut updates = Vec::with_capacity(rounds);
        for round in 0..rounds {
            // One more workload than there are comes and goes.
            let (name, body) = self.fleet.workload(workloads);
            let start = Instant::now();
            let next = if round.is_multiple_of(2) {
                let update = self.pool.share(convert::address(&name, &body)?);
                self.mesh.apply(Origin::ControlPlane, [update])
            } else {
                self.mesh.apply(Origin::ControlPlane, convert::address_removal(&name))
            };
            self.mesh = next;
            updates.push(start.elapsed());
        }
        let mesh = &self.mesh;
        let source = mesh.find_by_address(NETWORK, &fleet::ip(SOURCE).into());
        let source = source.map(|source| Workload::clone(source));
        let source = source.context("the mesh has lost a workload")?;
        let (services, mut keys, mut chance) =
            (self.fleet.services(), self.keys.clone(), self.keys.clone());
        let mut address = || Some(IpAddr::from(fleet::ip(keys.random_range(0..workloads))));
        let mut virtual_address = {
            let mut keys = self.keys.clone();
            move || Some(IpAddr::from(fleet::vip(keys.random_range(0..services))))
        };
        let mut routed = |ip: IpAddr| {
            drop(black_box(route(
                mesh,
                &Request::new(&source, (ip, fleet::PORT).into()),
                &mut chance,
            )));
        };
        Ok(Sample {
            update: median(updates),
            identify: timed(rounds, &mut address, |ip| {
                black_box(mesh.find_by_address(NETWORK, &ip));
            }),
            route_service: timed(rounds, &mut virtual_address, &mut routed),
            route_workload: timed(rounds, &mut address, &mut routed),
        })
    }
}

/// Verdicts under so many policies: how long one takes, as the median of so many batches.
pub(super) fn verdicts(policies: usize) -> Result<impl Fn(usize) -> Duration> {
    let one = Decisions::new(FEW)?;
    let mut mesh = one.mesh;
    for index in 0..policies {
        let (name, body) = fleet::policy(index);
        mesh = mesh.apply(Origin::ControlPlane, [convert::authorization(&name, &body)?]);
    }
    let address = fleet::ip(SOURCE).into();
    let workload =
        mesh.find_by_address(NETWORK, &address).map(|workload| Workload::clone(workload));
    let workload = workload.context("the mesh has lost a workload")?;
    let connections = (0..policies).map(|index| {
        let (namespace, account) = fleet::account(index);
        Ok(Connection {
            source: address,
            identity: Some(Identity::new("cluster.local", &namespace, &account)?),
            destination: (address, fleet::PORT).into(),
        })
    });
    let connections = connections.collect::<Result<Vec<_>>>()?;
    Ok(move |rounds| {
        let mut all = connections.iter().cycle();
        timed(
            rounds,
            || all.next(),
            |connection| {
                black_box(evaluate(&mesh, &workload, connection));
            },
        )
    })
}

/// The median of what `work` takes.
fn timed<T>(
    rounds: usize,
    mut next: impl FnMut() -> Option<T>,
    mut work: impl FnMut(T),
) -> Duration {
    let batches = (0..rounds).map(|_| {
        let batch: Vec<T> = std::iter::from_fn(&mut next).take(BATCH).collect();
        let count = u32::try_from(batch.len()).unwrap_or(u32::MAX).max(1);
        let start = Instant::now();
        batch.into_iter().for_each(&mut work);
        start.elapsed() / count
    });
    median(batches.collect())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
