//! Policies that change while the mesh runs.

use std::time::Duration;

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::{Action, MeshFile, Policy},
    netns::Netns,
    poll,
    topology::{Family, Topology},
};
use serde_json::json;

#[test]
fn a_policy_change_closes_the_open_connections_that_it_forbids_and_no_others() {
    let Some(topology) = Topology::with_culvert() else { return };
    let file = MeshFile::new(&topology);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();

    for family in Family::BOTH {
        mesh.set(&file).unwrap();
        let address = b1.at(family, app.port());
        let dial = || {
            poll::within(poll::SOON, || {
                let mut stream = client::dial(address).ok()?;
                client::ping(&mut stream, b"one").ok()?;
                Some(stream)
            })
        };
        let mut forbidden = a1.netns.run(dial).unwrap();
        let mut allowed = a2.netns.run(dial).unwrap();

        let policy = Policy::new("not-a1", "bank", Action::Deny).principal(&a1.identity());
        mesh.set(&file.clone().policy(&policy)).unwrap();

        let end = client::next_event(&mut forbidden);
        assert!(
            matches!(&end, Ok(bytes) if bytes.is_empty())
                || matches!(&end, Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset),
            "{family:?}: {end:?}"
        );
        mesh.b.flow("the change of policy", |flow| {
            flow.goes(Direction::Inbound)
                && flow.is("dst.hbone_addr", &address.to_string())
                && flow.error().is_some_and(|error| error.contains("policy"))
        });
        assert_eq!(client::ping(&mut allowed, b"two").unwrap(), b"two", "{family:?}");
        let refused = a1.netns.run(|| client::exchange(address, b"three"));
        assert!(!refused.is_ok_and(|reply| !reply.is_empty()), "{family:?} came through");
    }
}

#[test]
fn a_pod_that_comes_under_a_policy_loses_the_connections_that_it_forbids() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let policy = Policy::new("not-a1", "bank", Action::Deny)
        .principal(&a1.identity())
        .for_those_that_name_it();
    let file = MeshFile::new(&topology).policy(&policy);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let address = b1.at(Family::V4, app.port());
    let open = |from: &Netns| {
        let mut stream = from.run(|| client::dial(address)).unwrap();
        assert_eq!(client::ping(&mut stream, b"one").unwrap(), b"one");
        stream
    };
    let (mut forbidden, mut allowed) = (open(&a1.netns), open(&a2.netns));

    // No policy changes: the pod's record does.
    mesh.set(&file.field(b1, "authorizationPolicies", json!(["bank/not-a1"]))).unwrap();

    let end = client::next_event(&mut forbidden);
    assert!(
        matches!(&end, Ok(bytes) if bytes.is_empty())
            || matches!(&end, Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset),
        "{end:?}"
    );
    assert_eq!(client::ping(&mut allowed, b"two").unwrap(), b"two");
}

#[test]
fn a_dry_run_policy_denies_nothing() {
    let Some(topology) = Topology::with_culvert() else { return };
    let policy = Policy::new("would-deny", "bank", Action::Deny)
        .principal(&topology.a1.identity())
        .source(topology.x.ip(Family::V4))
        .source(topology.x.ip(Family::V6))
        .dry_run();
    let file = MeshFile::new(&topology).policy(&policy);
    let _mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();

    for from in [&topology.a1, &topology.x] {
        for family in Family::BOTH {
            let address = topology.b1.at(family, app.port());
            let mut stream = from.netns.run(|| client::dial(address)).unwrap();
            assert_eq!(client::ping(&mut stream, b"one").unwrap(), b"one");
            // Long enough for a check that would close it.
            let quiet = poll::within(Duration::from_millis(300), || {
                client::ping(&mut stream, b"still").err()
            });
            assert!(quiet.is_none(), "{} by {family:?}: {quiet:?}", from.name);
        }
    }
}
