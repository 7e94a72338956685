//! The files a node is run by, changed while it runs.

use std::{fs, io::ErrorKind};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{self, Mesh, Remains},
    flow_log::Direction,
    mesh_file::{self, Action, MeshFile, Policy},
    poll,
    tap::Tap,
    topology::{Family, Topology},
};

#[test]
fn a_bad_mesh_file_keeps_the_old_state_and_is_reported() {
    let Some(topology) = Topology::with_culvert() else { return };
    let closed = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let open = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let policy = Policy::new("closed-port", "bank", Action::Deny).port(closed.port());
    let file = MeshFile::new(&topology).policy(&policy);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let path = culvert::mesh_path(&topology);
    let reach = |port| {
        let address = topology.b1.at(Family::V4, port);
        topology.a1.netns.run(|| client::exchange(address, b"x")).is_ok_and(|reply| reply == b"x")
    };

    for bad in ["workloads: [", "workloads: [{name: 7, nonsense: true}]", ""] {
        let before = mesh.b.log().len();
        mesh_file::replace(&path, bad).unwrap();
        let name = path.to_string_lossy().into_owned();
        poll::until(poll::SOON, &format!("a report about {bad:?}"), || {
            mesh.b.log().get(before..)?.lines().any(|line| line.contains(&name)).then_some(())
        });
        assert!(reach(open.port()), "{bad:?}: the mesh is gone");
        assert!(!reach(closed.port()), "{bad:?}: the policy is gone");
    }
    fs::remove_file(&path).unwrap();
    assert!(reach(open.port()));
    assert!(!reach(closed.port()));

    mesh.set(&MeshFile::new(&topology)).unwrap();
    poll::until(poll::SOON, "the next good file", || reach(closed.port()).then_some(()));
}

#[test]
fn a_pod_added_to_the_pods_file_is_captured_and_one_removed_is_released() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();

    for family in Family::BOTH {
        let address = b1.at(family, app.port());
        let is_captured = || {
            let eth0 = Tap::start(&a2.netns, "eth0", &[]).unwrap();
            let reply = a2.netns.run(|| client::exchange(address, b"x"));
            reply.is_ok_and(|reply| reply == b"x") && eth0.stop().plaintext().count() == 0
        };
        poll::until(poll::SOON, "a2 to be captured", || is_captured().then_some(()));
        let mut open = a2.netns.run(|| client::dial(address)).unwrap();
        assert_eq!(client::ping(&mut open, b"one").unwrap(), b"one", "{family:?}");

        mesh.a.set_pods(&[a1]).unwrap();
        poll::until(poll::SOON, "a2 to be released", || (!is_captured()).then_some(()));
        // What its proxy still carried cannot go on without it, and the app must learn of that.
        let end = client::next_event(&mut open).map_err(|error| error.kind());
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "{family:?}: the open connection");
        let reply = a1.netns.run(|| client::exchange(address, b"x"));
        assert_eq!(reply.unwrap(), b"x", "{family:?}: the other pod");

        drop(open);
        mesh.a.set_pods(&[a1, a2]).unwrap();
    }
    mesh.b.flow("a2 with its identity", |flow| {
        flow.goes(Direction::Inbound)
            && flow.identities().is_some_and(|(source, _)| source == a2.identity())
    });
}
