//! What is asked for before a connection is decided upon.

use std::path::Path;

use culvert_mesh::{Origin, Update, file};

use super::*;

const MESH: &str = "
workloads:
- {uid: a, name: a, namespace: n, workloadIps: [10.0.0.1]}
- {uid: b, name: b, namespace: n, workloadIps: [10.0.0.2], waypoint: {destination: n/way}}
- {uid: far, name: far, namespace: n, network: far, networkGateway: {destination: n/gate},
   workloadIps: [10.0.0.3], services: {n/svc: {}}}
services:
- {name: way, namespace: n, hostname: way}
- {name: way2, namespace: n, hostname: way2}
- {name: gate, namespace: n, hostname: gate}
- {name: svc, namespace: n, hostname: svc, ports: {80: 80}, vips: [/10.1.0.1], waypoint: {destination: n/way},
   weightedWaypoints: [{destination: {destination: n/way2}, weight: 1}]}
";

/// The mesh without the records `gone`.
fn mesh(gone: &[&str]) -> Snapshot {
    let whole = file::parse(Path::new("mesh.yaml"), MESH).unwrap();
    whole.apply(Origin::File, gone.iter().map(|name| Update::RemoveAddress((*name).into())))
}

#[test]
fn what_stands_in_front_of_a_destination_is_missing_until_it_is_known_or_was_asked_for() {
    for (ip, gone, asked, want) in [
        ("10.0.0.2", &[][..], None, &[][..]),
        ("10.0.0.2", &["n/way"], None, &["n/way"]),
        ("10.0.0.2", &["n/way"], Some("n/way"), &[]),
        ("10.1.0.1", &["n/way", "n/way2", "n/gate"], None, &["n/way", "n/way2", "n/gate"]),
        ("10.1.0.1", &["n/way", "n/gate"], Some("n/way"), &["n/gate"]),
        ("10.9.9.9", &["n/way"], None, &[]),
    ] {
        let snapshot = mesh(gone);
        let source = snapshot.find_workload("a").unwrap();
        let asked = asked.map(|name: &str| {
            let (namespace, hostname) = name.split_once('/').unwrap();
            Destination::Name(culvert_mesh::workload::ServiceName {
                namespace: namespace.into(),
                hostname: hostname.into(),
            })
        });
        let found = missing(&snapshot, source, ip.parse().unwrap(), &asked.into_iter().collect());
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, want, "{ip} without {gone:?}");
    }
}
