//! Others in the pod's namespace: their filters, programs, rules and marks stay as they are, and ours work beside
//! them.

use std::process::Command;

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    inspect,
    mesh_file::MeshFile,
    poll,
    process::Process,
    require,
    tap::Tap,
    topology::{Family, Pod, Topology},
};
use socket2::SockRef;

use crate::talk::{await_filters, carried, talks};

/// A program of someone else on `eth0` of a pod. As a filter it stays behind when this is dropped, as a link it goes.
struct Foreign {
    process: Process,
    what: String,
}

/// `TC_ACT_UNSPEC`, which for a tcx link is `TCX_NEXT`: the next one decides.
const NEXT: &str = "-1";
/// `TC_ACT_OK`, which for a tcx link is `TCX_PASS`: the packet passes, and nothing after it is asked.
const OK: &str = "0";

impl Foreign {
    fn attach(topology: &Topology, pod: &Pod, arguments: [&str; 4]) -> Self {
        let [kind, hook, place, verdict] = arguments;
        let mut command = Command::new("/usr/bin/python3");
        command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/foreign.py"))
            .args([kind, "eth0", hook, place, verdict]);
        let what = format!("{kind}-{hook}-{place}");
        let process = Process::spawn(&pod.netns, topology.dir(), &what, &mut command).unwrap();
        let foreign = Self { process, what };
        let counts =
            poll::within(poll::SOON, || foreign.process.log().contains("count").then_some(()));
        assert!(counts.is_some(), "{}: {}", foreign.what, foreign.process.log());
        foreign
    }

    fn count(&self) -> u64 {
        let log = self.process.log();
        let last = log.lines().rev().find_map(|line| line.strip_prefix("count "));
        last.and_then(|count| count.parse().ok()).unwrap_or_default()
    }

    #[track_caller]
    fn counts_beyond(&self, before: u64) {
        poll::until(poll::SOON, &format!("packets at {}", self.what), || {
            (self.count() > before).then_some(())
        });
    }
}

fn have_tools() -> bool {
    require::tool("/usr/bin/python3", &["--version"]) && require::tool("tc", &["-V"])
}

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
fn tcx_links_of_others_that_pass_packets_on_run_beside_our_filters() {
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
        lists.map(|list| ["-4", "-6"].map(|family| of(family, list))).concat().concat()
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
        all
    };
    let before = settings();
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    assert_eq!(settings(), before);
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
