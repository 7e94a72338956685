//! Pods that come from a node agent which is a process of its own: ours with our proxy, and with one that is not ours.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Ca,
    client,
    culvert::{self, Culvert, ENVIRONMENT, Remains},
    mesh_file::{self, MeshFile},
    poll,
    process::Process,
    require,
    tap::Tap,
    topology::{Family, Node, Pod, Topology},
};

use crate::talk::talks;

const PYTHON: &str = "/usr/bin/python3";

fn socket(node: &Node) -> PathBuf {
    node.dir.join("agent/ztunnel.sock")
}

/// `culvert agent` with the node's pods file.
fn agent(node: &Node) -> Process {
    let mut command = Command::new(culvert::binary().unwrap());
    command.args(["agent", "--node", &node.name, "--pods"]).arg(culvert::pods_path(node));
    command.arg("--listen").arg(socket(node)).envs(ENVIRONMENT);
    Process::spawn(&node.netns, &node.dir, "agent", &mut command).unwrap()
}

/// A proxy of the node that has its pods from the agent alone.
fn proxy<'t>(topology: &'t Topology, node: &'t Node, ca: &Ca, remains: Remains) -> Culvert<'t> {
    let none = node.dir.join("no-pods.yaml");
    mesh_file::replace(&none, "pods: []\n").unwrap();
    let (none, socket) = (none.to_string_lossy(), socket(node).to_string_lossy().into_owned());
    let more = ["--pods", &*none, "--zds", &socket];
    Culvert::start_with(topology, node, &[&topology.a1, &topology.a2], ca, remains, &more).unwrap()
}

/// Whether `from` reaches the echoing app at `to` through the proxy.
fn is_captured(from: &Pod, to: std::net::SocketAddr) -> bool {
    let eth0 = Tap::start(&from.netns, "eth0", &[]).unwrap();
    let reply = from.netns.run(|| client::exchange(to, b"x"));
    reply.is_ok_and(|reply| reply == b"x") && eth0.stop().plaintext().count() == 0
}

#[test]
fn a_proxy_captures_the_pods_that_an_agent_hands_over_and_keeps_them_while_it_is_away() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    MeshFile::new(&topology).write(&culvert::mesh_path(&topology)).unwrap();
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let _b = Culvert::start(&topology, &topology.b, &[b1], &ca, Remains::Nothing).unwrap();
    culvert::write_pods(&topology.a, &[a1, a2]).unwrap();
    let mut first = agent(&topology.a);
    let a = proxy(&topology, &topology.a, &ca, Remains::Nothing);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();

    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        assert!(is_captured(a1, to) && is_captured(a2, to), "{family:?}");
    }
    let to = b1.at(Family::V4, app.port());
    let mut open = a1.netns.run(|| client::dial(to)).unwrap();
    assert_eq!(client::ping(&mut open, b"one").unwrap(), b"one");

    // Nothing hangs on the agent but changes.
    first.kill();
    poll::until(poll::SOON, "the proxy to notice", || a.log().contains("no agent").then_some(()));
    assert!(is_captured(a1, to) && is_captured(a2, to));
    culvert::write_pods(&topology.a, &[a1]).unwrap();
    let _second = agent(&topology.a);
    poll::until(poll::SOON * 2, "a2 to be released", || (!is_captured(a2, to)).then_some(()));
    assert!(is_captured(a1, to));
    culvert::write_pods(&topology.a, &[a1, a2]).unwrap();
    poll::until(poll::SOON, "a2 to be captured", || is_captured(a2, to).then_some(()));
    assert_eq!(client::ping(&mut open, b"two").unwrap(), b"two", "the open connection");
}

#[test]
fn another_proxy_gets_the_pods_of_one_that_is_killed() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    MeshFile::new(&topology).write(&culvert::mesh_path(&topology)).unwrap();
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let _b = Culvert::start(&topology, &topology.b, &[b1], &ca, Remains::Nothing).unwrap();
    culvert::write_pods(&topology.a, &[a1]).unwrap();
    let _agent = agent(&topology.a);
    let mut a = proxy(&topology, &topology.a, &ca, Remains::Pins);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let to = b1.at(Family::V4, app.port());
    talks(a1, to, "before");
    a.kill();
    a.launch().unwrap();
    a.wait_ready().unwrap();
    assert!(is_captured(a1, to));
}

#[test]
fn a_proxy_that_is_not_ours_is_handed_pods_too() {
    let Some(topology) = Topology::with_culvert() else { return };
    if !require::tool(PYTHON, &["--version"]) {
        return;
    }
    let (a1, a2) = (&topology.a1, &topology.a2);
    culvert::write_pods(&topology.a, &[a1]).unwrap();
    let _agent = agent(&topology.a);
    poll::until(poll::SOON, "the agent's socket", || socket(&topology.a).exists().then_some(()));
    let mut command = Command::new(PYTHON);
    command
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/zds.py"))
        .arg(socket(&topology.a))
        .arg("4");
    let mut proxy =
        Process::spawn(&topology.a.netns, &topology.a.dir, "zds", &mut command).unwrap();
    let inode = |pod: &Pod| {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(pod.netns.path()).unwrap().ino()
    };
    let told = |count: usize| {
        poll::until(poll::SOON, &format!("{count} requests"), || {
            (proxy.log().lines().count() >= count).then_some(())
        });
    };
    told(2);
    culvert::write_pods(&topology.a, &[a1, a2]).unwrap();
    told(3);
    culvert::write_pods(&topology.a, &[a2]).unwrap();
    told(4);
    let add = |pod: &Pod| {
        let uid = format!("{}/{}", pod.namespace, pod.name);
        format!("add {uid} {uid} {} {}", pod.service_account, inode(pod))
    };
    let removed = format!("del {}/{}", a1.namespace, a1.name);
    let log = proxy.log();
    assert_eq!(log.lines().collect::<Vec<_>>(), [add(a1), "snapshot".to_owned(), add(a2), removed]);
    assert!(proxy.wait(Duration::from_secs(5)).is_some_and(|status| status.success()));
}
