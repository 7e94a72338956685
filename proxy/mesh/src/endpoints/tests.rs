use std::{collections::BTreeMap, path::Path};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::*;
use crate::file;

fn workload() -> Workload {
    let text = "workloads: [{uid: w, name: w, namespace: n, capacity: 1}]";
    let mesh = file::parse(Path::new("mesh.yaml"), text).unwrap();
    Workload::clone(mesh.find_workload("w").unwrap())
}

fn endpoint(workload: &Workload, uid: &str, capacity: u32) -> Endpoint {
    Endpoint::new(&Arc::new(Workload { uid: uid.into(), capacity, ..workload.clone() }), 0)
}

#[test]
fn any_sequence_of_changes_leaves_what_a_map_would_hold() {
    let mut rng = StdRng::seed_from_u64(5);
    let workload = workload();
    let mut endpoints = Endpoints::default();
    let mut want: BTreeMap<String, u32> = BTreeMap::new();
    for step in 0..6000 {
        let uid = format!("w-{}", rng.random_range(0..900));
        // Growing first, then shrinking.
        if rng.random_ratio(if step < 4000 { 4 } else { 1 }, 5) {
            let capacity = rng.random_range(1..3);
            endpoints.insert(endpoint(&workload, &uid, capacity));
            want.insert(uid, capacity);
        } else {
            endpoints.remove(&uid);
            want.remove(&uid);
        }
    }
    let told: Vec<_> =
        endpoints.iter().map(|e| (e.workload.uid.to_string(), e.workload.capacity)).collect();
    assert_eq!(told, want.clone().into_iter().collect::<Vec<_>>());
    assert_eq!(endpoints.len(), want.len());
    assert_eq!(endpoints.plain, want.values().filter(|capacity| **capacity == 1).count());
    for (index, (uid, _)) in want.iter().enumerate() {
        assert_eq!(&*endpoints.get(index).unwrap().workload.uid, uid);
        assert_eq!(&*endpoints.find(uid).unwrap().workload.uid, uid);
    }
    assert!(endpoints.get(want.len()).is_none() && endpoints.find("w-x").is_none());
    for uid in want.keys() {
        endpoints.remove(uid);
    }
    assert!(endpoints.is_empty() && endpoints.blocks.is_empty() && endpoints.are_equal());
}

#[test]
fn versions_share_all_blocks_but_the_changed_one() {
    let workload = workload();
    let all = (0..10_000).map(|i| endpoint(&workload, &format!("w-{i:05}"), 1));
    let old: Endpoints = all.collect();
    let mut new = old.clone();
    new.remove("w-05000");
    let kept = |new: &Endpoints| {
        let same = |block: &&Arc<_>| new.blocks.iter().any(|b| Arc::ptr_eq(b, block));
        old.blocks.iter().filter(same).count()
    };
    assert_eq!(kept(&new), old.blocks.len() - 1);
    assert_eq!((old.len(), new.len()), (10_000, 9_999));
}
