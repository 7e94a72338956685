//! A proxy that dies and comes back: what its pods' connections do meanwhile.

use std::{net::SocketAddr, time::Duration};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    mesh_file::MeshFile,
    poll,
    tap::{HBONE_PORT, Tap},
    topology::{Family, Pod, Topology},
};

use crate::talk::PEER_DIALS;

#[test]
fn connects_to_and_from_the_pods_of_a_killed_proxy_wait_for_the_next_one() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let apps = [a1, b1].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1] = apps.each_ref().map(App::port);
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();

    for round in 0..3 {
        let before = eth0.look().segments.len();
        mesh.a.kill();
        let start = |from: &Pod, to: SocketAddr| {
            let what = format!("{} -> {to} in round {round}", from.name);
            (what, from.netns.start(move || client::exchange(to, b"patience")))
        };
        let waiting: Vec<_> = Family::BOTH
            .into_iter()
            .flat_map(|family| {
                let inside = a1.at(family, on_a1);
                [start(a1, b1.at(family, on_b1)), start(b1, inside), start(x, inside)]
            })
            .collect();
        // Into the gap: SYNs to 15008 by the other node's proxy, and to the app by x.
        let ((), arrival) = poll::timed(|| {
            poll::until(poll::SOON, "SYNs of both kinds and families at a1", || {
                let report = eth0.look();
                let fresh = report.segments.get(before..)?;
                let arrived = |to| fresh.iter().any(|segment| segment.opens() && segment.dst == to);
                Family::BOTH
                    .iter()
                    .all(|family| {
                        [HBONE_PORT, on_a1].iter().all(|port| arrived(a1.at(*family, *port)))
                    })
                    .then_some(())
            });
        });
        for (what, client) in &waiting {
            let given_up = arrival > PEER_DIALS && what.starts_with("b1");
            assert!(!client.is_finished() || given_up, "{what} did not wait");
        }

        let ((), start) = poll::timed(|| {
            mesh.a.launch().unwrap();
            mesh.a.wait_ready().unwrap();
        });
        for (what, client) in waiting {
            let reply = client.join().unwrap();
            if arrival + start > PEER_DIALS && what.starts_with("b1") && reply.is_err() {
                continue;
            }
            assert_eq!(reply.unwrap_or_else(|e| panic!("{what}: {e}")), b"patience", "{what}");
        }
    }
    let report = eth0.stop();
    let own = Family::BOTH.map(|family| a1.ip(family));
    let leaked =
        report.plaintext().find(|segment| segment.opens() && own.contains(&segment.src.ip()));
    assert_eq!(leaked, None, "a plaintext SYN left the pod");
}

#[test]
fn nothing_in_a_pod_is_reached_from_outside_while_its_proxy_is_dead() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, a2, x) = (&topology.a1, &topology.a2, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();

    mesh.a.kill();
    let impostor = App::start_on(&a1.netns, HBONE_PORT, Behaviour::Echo).unwrap();
    // Nor may the pod itself get past its proxy.
    let outside = App::start(&x.netns, Behaviour::Echo).unwrap();
    let dials = Family::BOTH.map(|family| {
        let (hbone, inside) = (a1.at(family, HBONE_PORT), a1.at(family, app.port()));
        let out = x.at(family, outside.port());
        [(x, hbone), (x, inside), (a2, hbone), (a2, inside), (a1, out)].map(|(from, to)| {
            let dial = move || client::dial_within(to, Duration::from_secs(3));
            (from.name, to, from.netns.start(dial))
        })
    });
    for (from, to, dial) in dials.into_iter().flatten() {
        assert!(dial.join().unwrap().is_err(), "{from} reached {to}");
    }
    for app in [app, impostor, outside] {
        assert_eq!(app.seen().len(), 0, "port {}", app.port());
    }
}

#[test]
fn a_proxy_that_is_stopped_leaves_the_pods_closed_and_cleanup_opens_them() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();

    let status = mesh.a.terminate(Duration::from_secs(10)).unwrap();
    assert_eq!(status.code(), Some(0));
    let to = a1.at(Family::V4, app.port());
    let reply = x.netns.run(|| client::dial_within(to, Duration::from_secs(2)));
    assert!(reply.is_err(), "x reached {to}");

    let finished = culvert_tests::culvert::cleanup(&topology.a).unwrap();
    assert_eq!((finished.code, finished.stderr.as_str()), (0, ""));
    for family in Family::BOTH {
        let reply = x.netns.run(|| client::exchange(a1.at(family, app.port()), b"in"));
        assert_eq!(reply.unwrap(), b"in", "{family:?}");
        let outside = App::start(&x.netns, Behaviour::Echo).unwrap();
        let reply = a1.netns.run(|| client::exchange(x.at(family, outside.port()), b"out"));
        assert_eq!(reply.unwrap(), b"out", "{family:?}");
    }
}
