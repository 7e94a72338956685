//! Others in the pod's namespace: their filters, programs, rules and marks stay as they are, and ours work beside
//! them.

use std::{
    fs, os::unix::fs::MetadataExt as _, process::Command, thread::JoinHandle, time::Duration,
};

use aya::programs::TcAttachType;
use culvert_sys::bpf::LinkIds;
use culvert_tests::{
    apps::{App, Behaviour},
    cgroup::Cgroup,
    client,
    culvert::{Culvert, Mesh, Remains},
    flow_log::Direction,
    inspect,
    mesh_file::MeshFile,
    poll,
    process::{Process, finish},
    tap::Tap,
    topology::{Family, Pod, Topology},
};
use socket2::SockRef;

use crate::{
    foreign::{Foreign, NEXT, OK, end_the_chain, have_tools},
    talk::{await_filters, carried, talks},
};

fn has_our_filters(pod: &Pod) {
    await_filters(&pod.netns, "eth0", &["hold_in", "guard"]);
}

fn guard_passed(mesh: &Mesh<'_>) -> f64 {
    let labels = [("program", "guard"), ("outcome", "own")];
    mesh.a.metrics().unwrap().sum("culvert_bpf_outcomes_total", &labels)
}

#[test]
fn filters_of_others_run_beside_ours_and_stay_when_we_go() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools()) else { return };
    let (a1, a2, x) = (&topology.a1, &topology.a2, &topology.x);
    let early = [["filter", "ingress", "5", NEXT], ["filter", "egress", "5", NEXT]];
    let early = early.map(|arguments| Foreign::attach(&topology, a1, arguments));
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let late = [["filter", "ingress", "50", OK], ["filter", "egress", "50", OK]];
    let late = late.map(|arguments| Foreign::attach(&topology, a1, arguments));
    let foreign: Vec<_> = early.into_iter().chain(late).collect();
    let [inside, outside] = [a1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let talk = || {
        for family in Family::BOTH {
            talks(a1, x.at(family, outside.port()), "out");
            talks(x, a1.at(family, inside.port()), "in");
        }
    };
    let all_count = |talk: &dyn Fn()| {
        let before: Vec<_> = foreign.iter().map(Foreign::count).collect();
        talk();
        foreign.iter().zip(before).for_each(|(foreign, before)| foreign.counts_beyond(before));
    };

    has_our_filters(a1);
    let before = guard_passed(&mesh);
    all_count(&talk);
    poll::until(poll::SOON, "guard to count too", || {
        (guard_passed(&mesh) >= before + 2.0).then_some(())
    });

    mesh.a.set_pods(&[a2]).unwrap();
    await_filters(&a1.netns, "eth0", &[]);
    all_count(&talk);
    let left = inspect::filters(&a1.netns, "eth0").unwrap();
    let left: Vec<_> = left.iter().map(|filter| (filter.hook, filter.priority)).collect();
    let [five, fifty] = [5, 50].map(Some);
    assert_eq!(left, [("ingress", five), ("ingress", fifty), ("egress", five), ("egress", fifty)]);
}

#[test]
fn tcx_links_of_others_that_pass_packets_on_run_beside_ours() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools() && inspect::have_tcx())
    else {
        return;
    };
    let (a1, x) = (&topology.a1, &topology.x);
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let foreign = ["first", "last"].map(|place| {
        ["ingress", "egress"].map(|hook| Foreign::attach(&topology, a1, ["tcx", hook, place, NEXT]))
    });
    let app = App::start(&x.netns, Behaviour::Echo).unwrap();
    let passed = guard_passed(&mesh);
    for foreign in foreign.iter().flatten() {
        let before = foreign.count();
        talks(a1, x.at(Family::V4, app.port()), "out");
        foreign.counts_beyond(before);
    }
    poll::until(poll::SOON, "guard to count too", || {
        (guard_passed(&mesh) >= passed + 4.0).then_some(())
    });
}

/// Programs that answer `OK` before ours would be asked.
const ENDS_OF_THE_CHAIN: [[&str; 3]; 2] = [["filter", "5", OK], ["tcx", "first", OK]];

#[test]
fn capture_goes_on_behind_a_program_that_ends_the_chain() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools()) else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let apps = [a1, b1].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [inside, outside] = apps.each_ref().map(App::port);
    for [kind, place, verdict] in ENDS_OF_THE_CHAIN {
        if kind == "tcx" && !inspect::have_tcx() {
            continue;
        }
        let _foreign = ["ingress", "egress"]
            .map(|hook| Foreign::attach(&topology, a1, [kind, hook, place, verdict]));
        let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
        for family in Family::BOTH {
            let since = (mesh.a.flows().len(), mesh.b.flows().len());
            talks(a1, b1.at(family, outside), kind);
            carried(&mesh.a, since.0, Direction::Outbound, b1.at(family, outside));
            talks(b1, a1.at(family, inside), kind);
            carried(&mesh.b, since.1, Direction::Outbound, a1.at(family, inside));
        }
        assert_eq!(eth0.stop().plaintext().count(), 0, "{kind}");
    }
}

/// Waits until ours are asked before all others; of those that came before ours, within one look of the watch.
#[track_caller]
fn await_ours_first(pod: &Pod) {
    poll::until(poll::SOON * 2, "ours to be the first at both hooks", || {
        let filters = inspect::filters(&pod.netns, "eth0").ok()?;
        let first = |hook| filters.iter().find(|filter| filter.hook == hook);
        (first("ingress")?.name == "hold_in" && first("egress")?.name == "guard").then_some(())
    });
}

fn reordered(mesh: &Mesh<'_>) -> f64 {
    let labels = [("kind", "filter_order")];
    mesh.a.metrics().unwrap().sum("culvert_steering_repairs_total", &labels)
}

#[test]
fn links_of_others_that_come_before_ours_are_overtaken_and_stay() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools() && inspect::have_tcx())
    else {
        return;
    };
    let (a1, a2) = (&topology.a1, &topology.a2);
    let _earlier = end_the_chain(&topology, a1);
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    await_ours_first(a1);
    assert!(reordered(&mesh) < 1.0, "an order was put right that had never been wrong");
    let _later = end_the_chain(&topology, a1);
    await_ours_first(a1);
    poll::until(poll::SOON, "both to be counted", || (reordered(&mesh) >= 2.0).then_some(()));
    let all = || {
        [TcAttachType::Ingress, TcAttachType::Egress]
            .map(|hook| inspect::links(&a1.netns, "eth0", hook).unwrap())
    };
    let foreign = |links: &[LinkIds]| links.iter().skip(1).copied().collect::<Vec<_>>();
    let before = all();
    assert_eq!(before.each_ref().map(Vec::len), [3, 3], "one of ours, two of others: {before:?}");

    // The next process takes over the links as they are, and gives them its programs.
    mesh.a.kill();
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    for (old, new) in before.iter().zip(&all()) {
        assert_eq!(old[0].link, new[0].link, "another link");
        assert_ne!(old[0].program, new[0].program, "the program of the process that was killed");
        assert_eq!(foreign(old), foreign(new));
    }
    mesh.a.set_pods(&[a2]).unwrap();
    await_filters(&a1.netns, "eth0", &[]);
    assert_eq!(all(), before.map(|links| foreign(&links)));
}

#[test]
fn connections_are_held_also_behind_a_link_that_ends_the_chain() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools() && inspect::have_tcx())
    else {
        return;
    };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let _foreign = end_the_chain(&topology, a1);
    await_ours_first(a1);
    mesh.a.kill();
    let waiting = Family::BOTH.map(|family| {
        let to = a1.at(family, app.port());
        x.netns.start(move || client::exchange(to, b"patience"))
    });
    let refused = poll::within(Duration::from_millis(700), || {
        waiting.iter().any(JoinHandle::is_finished).then_some(())
    });
    assert_eq!(refused, None, "it did not wait");
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    for dial in waiting {
        assert_eq!(dial.join().unwrap().unwrap(), b"patience");
    }
}

#[test]
fn nothing_leaves_in_plaintext_behind_a_link_that_ends_the_chain() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools() && inspect::have_tcx())
    else {
        return;
    };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let app = App::start(&x.netns, Behaviour::Echo).unwrap();
    let _foreign = end_the_chain(&topology, a1);
    await_ours_first(a1);
    // With nobody there who would put them back.
    mesh.a.kill();
    for family in ["-4", "-6"] {
        a1.netns.output("ip", &[family, "rule", "del", "pref", "1110"]).unwrap();
    }
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
    let dials = Family::BOTH.map(|family| {
        let to = x.at(family, app.port());
        a1.netns.start(move || client::dial_within(to, Duration::from_secs(2)).is_ok())
    });
    assert_eq!(dials.map(|dial| dial.join().unwrap()), [false, false]);
    assert_eq!(eth0.stop().plaintext().count(), 0);
}

/// As a version without tcx links left it.
#[test]
fn filters_of_an_older_version_make_way_for_links() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools() && inspect::have_tcx())
    else {
        return;
    };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, a2, x) = (&topology.a1, &topology.a2, &topology.x);
    let app = App::start(&x.netns, Behaviour::Echo).unwrap();
    mesh.a.kill();
    for pod in [a1, a2] {
        let id = fs::metadata(pod.netns.path()).unwrap().ino();
        let pins = mesh.a.pins().unwrap().join("pods").join(id.to_string());
        let mut command = Command::new("/usr/bin/python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/older.py")).arg(pins);
        let done = finish(&pod.netns, &mut command, poll::SOON).unwrap();
        assert_eq!(done.code, 0, "{}", done.stderr);
        for (interface, names) in [("eth0", &["hold_in", "guard"][..]), ("lo", &["hold_out"])] {
            let left = inspect::filters(&pod.netns, interface).unwrap();
            let left: Vec<_> = left.iter().map(|filter| (filter.priority, &*filter.name)).collect();
            assert_eq!(left, names.iter().map(|name| (Some(11), *name)).collect::<Vec<_>>());
        }
    }
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    await_ours_first(a1);
    for interface in ["eth0", "lo"] {
        let filters = inspect::filters(&a1.netns, interface).unwrap();
        assert!(filters.iter().all(|filter| filter.priority.is_none()), "{filters:?}");
    }
    let qdiscs = a1.netns.output("tc", &["qdisc", "list"]).unwrap();
    assert!(!qdiscs.contains("clsact"), "{qdiscs}");
    talks(a1, x.at(Family::V4, app.port()), "after the upgrade");

    // One that ceases to be ours meanwhile is released of the filters, too.
    mesh.a.set_pods(&[a1]).unwrap();
    await_filters(&a2.netns, "eth0", &[]);
}

#[test]
fn rules_and_routes_of_others_stay_as_they_are() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2) = (&topology.a1, &topology.a2);
    a1.netns
        .ip("rule add pref 100 fwmark 0x1000/0xf000 lookup 100\n\
             rule add pref 1200 to 192.0.2.0/24 lookup 100\n\
             route add default via 169.254.1.1 dev eth0 table 100\n\
             route add 198.51.100.0/24 via 169.254.1.1 dev eth0\n\
             route add fd00:99::/64 via fe80::1 dev eth0 table 100\n")
        .unwrap();
    a1.netns
        .output(
            "ip",
            &["-6", "rule", "add", "pref", "100", "fwmark", "0x1000/0xf000", "table", "100"],
        )
        .unwrap();
    let settings = || {
        let lists = [["rule", "list"].as_slice(), &["route", "list", "table", "all"]];
        let of = |family: &str, list: &[&str]| {
            let arguments: Vec<_> = [family].iter().chain(list).copied().collect();
            a1.netns.output("ip", &arguments).unwrap()
        };
        let all = lists.map(|list| ["-4", "-6"].map(|family| of(family, list))).concat().concat();
        without_the_kernels_own(&all)
    };
    let before = settings();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let during = settings();
    assert_ne!(during, before, "nothing was captured");
    for line in before.lines() {
        assert!(during.lines().any(|other| other == line), "{line} is gone:\n{during}");
    }
    mesh.a.set_pods(&[a2]).unwrap();
    poll::until(poll::SOON, "everything to be as before", || (settings() == before).then_some(()));
}

/// What `ip` lists, but for routes that the kernel makes of a link's addresses: they may be late.
fn without_the_kernels_own(list: &str) -> String {
    let kept: Vec<_> = list.lines().filter(|line| !line.contains(" proto kernel ")).collect();
    kept.join("\n")
}

#[test]
fn the_namespace_of_the_node_is_left_as_it_is() {
    let Some(topology) = Topology::with_culvert() else { return };
    let node = &topology.a.netns;
    let settings = || {
        let mut all = String::new();
        for (program, arguments) in [
            ("ip", ["-4", "rule", "list"].as_slice()),
            ("ip", &["-6", "rule", "list"]),
            ("ip", &["-4", "route", "list", "table", "all"]),
            ("ip", &["-6", "route", "list", "table", "all"]),
            ("tc", &["qdisc", "list"]),
            ("tc", &["filter", "list", "dev", "cali-a1", "ingress"]),
        ] {
            all += &node.output(program, arguments).unwrap();
        }
        without_the_kernels_own(&all)
    };
    let before = settings();
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    assert_eq!(settings(), before);
}

/// As a CNI that stands in for kube-proxy does.
#[test]
fn a_program_that_may_rewrite_what_pods_connect_to_is_reported_once() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools()) else { return };
    let a1 = &topology.a1;
    let theirs = Cgroup::create(&topology.a.name, "theirs").unwrap();
    let pod = theirs.child("pod").unwrap();
    let mut command = Command::new("/usr/bin/python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/rewriter.py")).arg(theirs.path());
    let attached = Process::spawn(&a1.netns, topology.dir(), "theirs", &mut command).unwrap();
    poll::until(poll::SOON, "it to be attached", || {
        attached.log().contains("attached").then_some(())
    });
    // A process of the pod, beneath where it is attached.
    let mut sleep = Command::new("sh");
    sleep.args(["-c", "echo $$ > $0/cgroup.procs && exec sleep 60"]).arg(pod.path());
    let resident = Process::spawn(&a1.netns, topology.dir(), "resident", &mut sleep).unwrap();
    poll::until(poll::SOON, "the process to be in its cgroup", || {
        let inside = fs::read_to_string(pod.path().join("cgroup.procs")).ok()?;
        inside.contains(&resident.pid().to_string()).then_some(())
    });

    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let found = |mesh: &Culvert<'_>| {
        let labels = [("kind", "foreign_connect_program")];
        mesh.metrics().unwrap().sum("culvert_steering_failures_total", &labels)
    };
    poll::until(poll::SOON, "both to be counted", || (found(&mesh.a) >= 2.0).then_some(()));
    for name in ["theirs4", "theirs6"] {
        let log = mesh.a.log();
        let reports = log.lines().filter(|line| line.contains(name)).count();
        assert_eq!(reports, 1, "{name}: {log}");
    }
    drop((attached, resident));
}

#[test]
fn bits_of_a_mark_that_are_not_ours_stay_on_a_captured_socket() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        for mark in [0x8_0000, 0x8_0042, 0xffff_0000] {
            let since = mesh.a.flows().len();
            let dial = || client::dial_prepared(to, |socket| socket.set_mark(mark));
            let mut stream = a1.netns.run(dial).unwrap();
            assert_eq!(client::converse(&mut stream, b"marked").unwrap(), b"marked", "{mark:#x}");
            carried(&mesh.a, since, Direction::Outbound, to);
            let kept = SockRef::from(&stream).mark().unwrap();
            assert_eq!(kept & !0xfff, mark & !0xfff, "{mark:#x} became {kept:#x}");
        }
    }
}
