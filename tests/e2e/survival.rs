//! What stays in the kernel when proxies die, stop and come back, and pods that were there first.

use std::time::Duration;

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    client,
    culvert::{Culvert, Mesh, Remains, mesh_path},
    flow_log::Direction,
    inspect,
    mesh_file::MeshFile,
    poll, require,
    topology::{Family, Topology},
};

use crate::talk::{PEER_DIALS, carried, talks};

#[test]
fn twenty_kills_leave_one_program_on_each_hook_and_no_stale_entry() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let inside = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let host = &topology.a.netns;
    let maps = ["pods", "addrs", "pods_by_addr", "own_cgroups", "saved"];
    let entries = |mesh: &Mesh<'_>| maps.map(|map| inspect::entries(&mesh.a, host, map).unwrap());
    let filters = || {
        [(a1, "eth0"), (a1, "lo"), (a2, "eth0"), (a2, "lo")].map(|(pod, interface)| {
            let filters = inspect::filters(&pod.netns, interface).unwrap();
            filters.iter().map(|filter| (filter.hook, filter.name.clone())).collect::<Vec<_>>()
        })
    };
    let owned = |hook, name: &str| (hook, name.to_owned());
    let eth0 = vec![owned("ingress", "hold_in"), owned("egress", "guard")];
    let lo = vec![owned("ingress", "hold_out")];
    let before = entries(&mesh);
    let mut links = inspect::socket_programs(&mesh.a, host).unwrap();

    for round in 0..20 {
        for family in Family::BOTH {
            talks(b1, a1.at(family, inside.port()), "in");
        }
        let mut open = a1.netns.run(|| client::dial(b1.at(Family::V4, app.port()))).unwrap();
        client::ping(&mut open, b"open while it is killed").unwrap();
        mesh.a.kill();
        mesh.a.launch().unwrap();
        mesh.a.wait_ready().unwrap();
        assert_eq!(
            filters(),
            [eth0.clone(), lo.clone(), eth0.clone(), lo.clone()],
            "round {round}"
        );
        for pod in [a1, a2] {
            assert_eq!(
                inspect::lookup_links(&pod.netns).unwrap(),
                1,
                "{} in round {round}",
                pod.name
            );
        }
        assert_eq!(entries(&mesh), before, "{maps:?} in round {round}");
        let now = inspect::socket_programs(&mesh.a, host).unwrap();
        assert_eq!(now.len(), links.len(), "round {round}");
        for ((name, old), (same, new)) in links.iter().zip(&now) {
            assert_eq!(name, same, "round {round}");
            assert_ne!(old, new, "{name} is still the program of the proxy that was killed");
        }
        links = now;
    }
    talks(a1, b1.at(Family::V6, app.port()), "after all of them");
    poll::until(poll::SOON, "exemptions to be gone with their connections", || {
        (inspect::entries(&mesh.a, host, "exempt").unwrap() == 0).then_some(())
    });
}

#[test]
fn connects_made_while_a_stopped_proxy_is_away_wait_for_the_next_one() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let apps = [a1, b1].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1] = apps.each_ref().map(App::port);
    assert_eq!(mesh.a.terminate(poll::SOON).unwrap().code(), Some(0));
    let waiting = Family::BOTH.map(|family| {
        [(a1, b1.at(family, on_b1)), (b1, a1.at(family, on_a1)), (x, a1.at(family, on_a1))].map(
            |(from, to)| (from, to, from.netns.start(move || client::exchange(to, b"patience"))),
        )
    });
    let ((), gap) = poll::timed(|| {
        let gone = poll::within(Duration::from_millis(700), || {
            let mut all = waiting.iter().flatten();
            all.find(|(.., client)| client.is_finished()).map(|one| (one.0.name, one.1))
        });
        assert_eq!(gone, None, "it did not wait");
        mesh.a.launch().unwrap();
        mesh.a.wait_ready().unwrap();
    });
    for (from, to, client) in waiting.into_iter().flatten() {
        let reply = client.join().unwrap();
        if gap > PEER_DIALS && from.name == b1.name && reply.is_err() {
            continue;
        }
        assert_eq!(reply.unwrap_or_else(|e| panic!("{} -> {to}: {e}", from.name)), b"patience");
    }
}

#[test]
fn a_pod_that_went_away_while_no_proxy_ran_leaves_nothing_behind() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, a2, host) = (&topology.a1, &topology.a2, &topology.a.netns);
    let maps = ["pods", "pods_by_addr", "saved"];
    let entries = |mesh: &Mesh<'_>| maps.map(|map| inspect::entries(&mesh.a, host, map).unwrap());
    let with_both = entries(&mesh);
    mesh.a.kill();
    a2.netns.delete();
    mesh.a.set_pods(&[a1]).unwrap();
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    poll::until(poll::SOON, "only one pod to be left", || {
        (entries(&mesh) == with_both.map(|count| count / 2)).then_some(())
    });
    let pods = std::fs::read_dir(mesh.a.pins().unwrap().join("pods")).unwrap().count();
    assert_eq!(pods, 1);
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    talks(a1, topology.b1.at(Family::V4, app.port()), "the other pod");
}

/// As after a reboot of the node: pods run and talk before culvert does.
#[test]
fn pods_that_run_before_culvert_are_all_captured_when_it_comes() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    MeshFile::new(&topology).write(&mesh_path(&topology)).unwrap();
    let b = Culvert::start(&topology, &topology.b, &[b1], &ca, Remains::Nothing).unwrap();
    let apps = [a1, a2].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let outside = App::start(&x.netns, Behaviour::Echo).unwrap();
    // The first connections of these pods are not captured, and that must not be remembered.
    let mut before = Family::BOTH.map(|family| {
        [(a1, x.at(family, outside.port())), (x, a2.at(family, apps[1].port()))].map(
            |(from, to)| {
                let mut stream = from.netns.run(|| client::dial(to)).unwrap();
                client::ping(&mut stream, b"before").unwrap();
                stream
            },
        )
    });

    let a = Culvert::start(&topology, &topology.a, &[a1, a2], &ca, Remains::Nothing).unwrap();
    for family in Family::BOTH {
        for (pod, app) in [a1, a2].into_iter().zip(&apps) {
            talks(pod, x.at(family, outside.port()), "out");
            carried(&a, 0, Direction::Outbound, x.at(family, outside.port()));
            talks(b1, pod.at(family, app.port()), "in");
            carried(&b, 0, Direction::Outbound, pod.at(family, app.port()));
        }
    }
    for stream in before.iter_mut().flatten() {
        assert_eq!(client::ping(stream, b"and after").unwrap(), b"and after");
    }
}
