//! What decisions and changes cost in a large mesh: counted, not timed.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test fails by it")]

mod large;

use allocation_counter::{AllocationInfo, measure};
use culvert_mesh::{
    Identity, Origin, Snapshot, Update,
    policy::{Connection, Scope, Verdict, evaluate},
    route::{Request, route},
};
use rand::{SeedableRng as _, rngs::StdRng};

use crate::large::{mesh, one, policies, settled, vip, workload};

/// What one change costs while another version is in use, as it is in a proxy.
fn cost_of_a_change(mesh: &Snapshot, services: usize) -> AllocationInfo {
    let (like, _) = one();
    let mut changed = workload(&like, 77, services);
    changed.node = "other".into();
    let mut next = None;
    let cost = measure(|| {
        next = Some(mesh.apply(Origin::ControlPlane, [Update::Workload(changed)]));
    });
    assert_eq!(&*next.unwrap().find_workload("cluster//Pod/n/w-77").unwrap().node, "other");
    cost
}

#[test]
fn a_change_copies_a_path_and_not_the_mesh() {
    let small = cost_of_a_change(&mesh(100, 10), 10);
    let large = cost_of_a_change(&mesh(30_000, 3000), 3000);
    // Each index is a few levels deeper, and a level costs a node.
    assert!(large.bytes_total < 4 * small.bytes_total, "{small:?} {large:?}");
    assert!(large.bytes_total < 32 << 10, "{large:?}");
    // A service of 10,000 endpoints is no reason to copy them.
    let service = cost_of_a_change(&mesh(10_000, 1), 1);
    assert!(service.bytes_total < 32 << 10, "{service:?}");
}

/// 80 MB for 100,000 workloads in 10,000 services; all costs are linear, so fewer tell as much.
#[test]
fn a_workload_and_its_share_of_a_service_fit_into_800_bytes() {
    let mut kept = None;
    let cost = measure(|| kept = Some(settled(20_000)));
    let (_pool, mesh) = kept.unwrap();
    assert_eq!((mesh.workloads().len(), mesh.services().len()), (20_000, 2_000));
    let each = cost.bytes_current / 20_000;
    assert!(each <= 800, "{each} bytes");
}

#[test]
fn a_route_costs_the_same_in_any_mesh() {
    let allocations = |workloads: usize, services: usize| {
        let mesh = mesh(workloads, services);
        let source = mesh.find_workload("cluster//Pod/n/w-1").unwrap();
        let request = Request::new(source, (vip(3), 80).into());
        let mut rng = StdRng::seed_from_u64(1);
        measure(|| drop(route(&mesh, &request, &mut rng))).count_total
    };
    let (small, large) = (allocations(100, 10), allocations(30_000, 3000));
    assert!(large <= small + 8, "{small} {large}");
    // Nor in a service of many endpoints.
    assert!(allocations(10_000, 4) <= small + 8);
}

#[test]
fn verdicts_allocate_nothing() {
    let (mut workload, _) = one();
    workload.policies = vec!["n/WorkloadSelector-1".into(), "n/WorkloadSelector-2".into()];
    let all = [Scope::Global, Scope::Namespace, Scope::WorkloadSelector].into_iter();
    let mesh = Snapshot::default().apply(Origin::ControlPlane, all.flat_map(policies));
    for (account, allowed) in [("s-4", true), ("s-5", false), ("s-none", false)] {
        let connection = Connection {
            source: [10, 0, 0, 2].into(),
            identity: Identity::new("td", "n", account).ok(),
            destination: ([10, 0, 0, 1], 80).into(),
        };
        let mut verdict = None;
        let cost = measure(|| verdict = Some(evaluate(&mesh, &workload, &connection)));
        assert_eq!(verdict == Some(Verdict::Allowed), allowed, "{account}");
        assert_eq!(cost.count_total, 0, "{account}");
    }
}
