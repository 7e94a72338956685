//! How long decisions and changes take in meshes of 100, 10,000 and 100,000 workloads: `cargo bench -p culvert-mesh`.
//! That none of it grows with the mesh is what the tests count; this only says how much it is.

#![forbid(unsafe_code)]
#![expect(
    clippy::disallowed_types,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench reads the clock and talks to whoever started it"
)]

#[path = "../tests/costs/large.rs"]
mod large;

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use culvert_mesh::{
    Identity, Origin, Snapshot, Update,
    policy::{Connection, Scope, evaluate},
    route::{Request, route},
};
use rand::{SeedableRng as _, rngs::StdRng};

use crate::large::{mesh, one, policies, settled, vip, workload};

fn main() {
    for (workloads, services) in [(100, 10), (10_000, 1000), (100_000, 10_000), (10_000, 1)] {
        println!("{workloads} workloads in {services} services");
        let mesh = mesh(workloads, services);
        let source = mesh.find_workload("cluster//Pod/n/w-1").unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        tell("route", |index| {
            let request = Request::new(source, (vip(index % services), 80).into());
            black_box(route(&mesh, &request, &mut rng));
        });
        tell("find by address", |index| {
            let like = mesh.find_by_address("", &vip(index));
            black_box(like);
        });
        let (like, _) = one();
        let mut current = mesh.clone();
        tell("change one workload", |index| {
            let mut changed = workload(&like, index % workloads, services);
            changed.capacity = 2;
            current = current.apply(Origin::ControlPlane, [Update::Workload(changed)]);
        });
    }
    let start = Instant::now();
    let settled = settled(100_000);
    println!("100,000 parsed workloads settle in {:?}", start.elapsed());
    drop(settled);
    let (workload, _) = one();
    let all = [Scope::Global, Scope::Namespace].into_iter().flat_map(policies);
    let mesh = Snapshot::default().apply(Origin::ControlPlane, all);
    let connection = Connection {
        source: [10, 0, 0, 2].into(),
        identity: Identity::new("td", "n", "s-5000").ok(),
        destination: ([10, 0, 0, 1], 80).into(),
    };
    println!("20,000 policies");
    tell("verdict", |_| {
        black_box(evaluate(&mesh, &workload, &connection));
    });
}

/// Prints the median of many single runs of `work`.
fn tell(what: &str, mut work: impl FnMut(usize)) {
    let mut took: Vec<Duration> = (0..RUNS)
        .map(|index| {
            let start = Instant::now();
            work(index * 7919);
            start.elapsed()
        })
        .collect();
    let (_, median, _) = took.select_nth_unstable(RUNS / 2);
    println!("  {what}: {median:?}");
}

const RUNS: usize = 2000;
