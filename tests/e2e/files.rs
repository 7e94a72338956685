//! The files a node is run by, changed while it runs.

use std::{
    fs,
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    time::Duration,
};

use aya::programs::TcAttachType;
use culvert_sys::bpf::LinkIds;
use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{self, Mesh, Remains},
    flow_log::Direction,
    http, inspect,
    load::Load,
    mesh_file::{self, Action, MeshFile, Policy},
    poll,
    process::Process,
    tap::Tap,
    topology::{Family, Topology},
};

use crate::talk::{await_filters, talks};

#[test]
fn a_bad_mesh_file_keeps_the_old_state_and_is_reported() {
    let Some(topology) = Topology::with_culvert() else { return };
    let closed = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let open = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let policy = Policy::new("closed-port", "bank", Action::Deny).port(closed.port());
    let file = MeshFile::new(&topology).policy(&policy);
    let mesh = Mesh::start_from_files(&topology, &file, Remains::Nothing).unwrap();
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

#[test]
fn a_restart_with_bad_pods_carries_the_others_and_keeps_the_bad_ones_closed() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, a2, x) = (&topology.a1, &topology.a2, &topology.x);
    let on_b1 = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let on_a2 = App::start(&a2.netns, Behaviour::Echo).unwrap();
    let into_a2 = a2.at(Family::V4, on_a2.port());

    mesh.a.kill();
    // A pod that has taken the address of another, and one whose namespace is gone.
    let taken = format!("{}/32", a1.ip(Family::V4));
    a2.netns.output("ip", &["addr", "add", &taken, "dev", "lo"]).unwrap();
    let path = culvert::pods_path(&topology.a);
    let gone = "- {name: gone, namespace: shop, serviceAccount: web, netns: /run/netns/cv-gone}\n";
    mesh_file::replace(&path, &(fs::read_to_string(&path).unwrap() + gone)).unwrap();
    mesh.a.launch().unwrap();
    talks(a1, topology.b1.at(Family::V4, on_b1.port()), "the good pod");
    for pod in ["shop/a2", "shop/gone"] {
        poll::until(poll::SOON, "a report", || {
            let log = mesh.a.log();
            let mut lines = log.lines();
            lines.find(|line| line.contains("pod not enrolled") && line.contains(pod)).map(drop)
        });
    }
    let ready = || {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 15021));
        topology.a.netns.run(|| http::request("GET", address, "/healthz/ready")).unwrap().status
    };
    assert_eq!(ready(), 500);
    let dial = x.netns.run(|| client::dial_within(into_a2, Duration::from_secs(3)));
    assert!(dial.is_err(), "a2 was opened");

    // One that is to be enrolled no more is released, though this process has never enrolled it.
    mesh.a.set_pods(&[a1]).unwrap();
    await_filters(&a2.netns, "eth0", &[]);
    poll::until(poll::SOON, "the node to be ready", || (ready() == 200).then_some(()));
    talks(x, into_a2, "the released pod");

    a2.netns.output("ip", &["addr", "del", &taken, "dev", "lo"]).unwrap();
    mesh.a.set_pods(&[a1, a2]).unwrap();
    await_filters(&a2.netns, "eth0", &["hold_in", "guard"]);
    talks(x, into_a2, "the mended pod");
}

#[test]
fn a_pod_that_gets_another_name_is_captured_all_the_while() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let a1 = &topology.a1;
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let mut monitor = Command::new("tc");
    let filters =
        Process::spawn(&a1.netns, topology.dir(), "filters", monitor.arg("monitor")).unwrap();
    let guard = || inspect::links(&a1.netns, "eth0", TcAttachType::Egress).unwrap();
    let before = guard();
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
    let to = Family::BOTH.map(|family| topology.b1.at(family, app.port()));
    let load = Load::start(&a1.netns, &to, 8);
    let rename_in = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let renamed = text.replace("name: a1\n", "name: renamed\n");
        assert_ne!(text, renamed, "{}", path.display());
        mesh_file::replace(path, &renamed).unwrap();
    };
    rename_in(&culvert::pods_path(&topology.a));
    poll::until(poll::SOON, "the pod to be enrolled anew", || {
        let log = mesh.a.log();
        let mut lines = log.lines();
        lines.find(|l| l.contains("pod enrolled") && l.contains("shop/renamed")).map(drop)
    });
    // Until here connections of the new name wait for it to be known.
    rename_in(&culvert::mesh_path(&topology));
    mesh.a.flow("a connection of the renamed pod", |flow| {
        flow.goes(Direction::Outbound) && flow.is("src.workload", "renamed")
    });
    let tally = load.stop();
    assert_eq!(tally.failed(), 0, "{tally:?}");
    let report = eth0.stop();
    let leaked = report.plaintext().find(|segment| segment.opens());
    assert_eq!(leaked, None, "a plaintext SYN left the pod");
    // However short a gap is, it would show here.
    if inspect::have_tcx() {
        let ids = |links: &[LinkIds]| links.iter().map(|link| link.link).collect::<Vec<_>>();
        assert_eq!(ids(&guard()), ids(&before), "the link of the guard was replaced");
        assert_ne!(guard(), before, "the link has no new program");
    } else {
        let seen = filters.log();
        assert!(seen.contains("name guard"), "the new guard was not seen: {seen}");
        assert!(!seen.contains("deleted"), "{seen}");
    }
}
