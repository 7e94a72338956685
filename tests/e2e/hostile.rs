//! A pod that works against capture with every right in its own namespace: it may expose its own bytes, and gains
//! nothing of any other pod.

use std::{
    fs,
    net::SocketAddr,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::Path,
    process::Command,
    time::Duration,
};

use culvert_sys::bpf;
use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    inspect,
    mesh_file::{Action, MeshFile, Policy},
    poll,
    process::{Finished, finish},
    require,
    tap::{HBONE_PORT, Tap, WIRE},
    topology::{Family, Node, Pod, Topology},
};

use crate::{
    foreign::{end_the_chain, have_tools},
    talk::{await_filters, carried, talks},
};

/// All that mean something to us or to the mesh that we replace, and one with bits of somebody else.
const MARKS: [u32; 4] = [0x111, 0x53a, 0x539, 0x8_053a];

/// What a hostile dial may take before it counts as dropped.
const PATIENCE: Duration = Duration::from_millis(1200);

fn dial_marked(from: &Pod, to: SocketAddr, mark: u32) -> std::io::Result<Vec<u8>> {
    from.netns.run(|| {
        let mut stream = client::dial_prepared(to, |socket| socket.set_mark(mark))?;
        client::converse(&mut stream, b"hello there")
    })
}

#[test]
fn marks_of_ours_that_a_pod_sets_keep_no_connection_out_of_capture() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let apps = [a1, b1].map(|pod| (pod, App::start(&pod.netns, Behaviour::Echo).unwrap()));
    let eth0 = Tap::start(&a2.netns, "eth0", &[]).unwrap();
    for mark in MARKS {
        for (pod, app) in &apps {
            for family in Family::BOTH {
                let (since, to) = (mesh.a.flows().len(), pod.at(family, app.port()));
                let reply = dial_marked(a2, to, mark);
                assert_eq!(
                    reply.unwrap_or_else(|e| panic!("{mark:#x} -> {to}: {e}")),
                    b"hello there"
                );
                carried(&mesh.a, since, Direction::Outbound, to);
            }
        }
    }
    assert_eq!(eth0.stop().plaintext().count(), 0);
}

#[test]
fn marks_of_ours_that_a_pod_sets_exempt_nothing_at_a_neighbour() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let policy = Policy::new("ledger-only", "shop", Action::Allow).principal(&b1.identity());
    let file = MeshFile::new(&topology).policy(&policy);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    for (from, family) in Family::BOTH.into_iter().flat_map(|f| [(a2, f), (x, f)]) {
        for mark in MARKS {
            let reply = dial_marked(from, a1.at(family, app.port()), mark);
            assert!(!reply.is_ok_and(|r| !r.is_empty()), "{} got through by {mark:#x}", from.name);
        }
    }
    // With the address of the one that is allowed, too.
    let (to, taken) = (a1.at(Family::V4, app.port()), b1.at(Family::V4, 0));
    let reply = a2.netns.run(|| {
        let mut stream = client::dial_prepared(to, |socket| {
            socket.set_mark(0x53a)?;
            socket.set_ip_transparent_v4(true)?;
            socket.bind(&taken.into())
        })?;
        client::converse(&mut stream, b"hello there")
    });
    assert!(!reply.is_ok_and(|reply| !reply.is_empty()), "a taken address got through");
    mesh.a.flow("the taken address", |flow| {
        flow.goes(Direction::Outbound)
            && flow.error().is_some_and(|e| e.contains("no address of the pod"))
    });
    assert_eq!(app.seen().len(), 0);
    for family in Family::BOTH {
        talks(b1, a1.at(family, app.port()), "the one that is allowed");
    }
}

/// Where the proxy's listeners of a pod are: no address of the pod.
fn listeners(pod: &Pod) -> Vec<SocketAddr> {
    let table = |name: &str| {
        pod.netns.run(|| fs::read_to_string(format!("/proc/thread-self/net/{name}"))).unwrap()
    };
    let port = |local: &str| u16::from_str_radix(local.rsplit(':').next()?, 16).ok();
    let of = |table: String, prefix: &str, ip: &str| -> Vec<SocketAddr> {
        let rows = table.lines().filter_map(|row| row.split_whitespace().nth(1));
        let rows = rows.filter(|local| local.starts_with(prefix));
        rows.filter_map(|local| Some(SocketAddr::new(ip.parse().ok()?, port(local)?))).collect()
    };
    let v4 = of(table("tcp"), "080000C0", "192.0.0.8");
    let v6 = of(table("tcp6"), "00000001", "100::8");
    v4.into_iter().chain(v6).collect()
}

#[test]
fn the_proxys_listeners_are_out_of_reach_for_every_pod() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let found: Vec<_> = [a1, a2].into_iter().flat_map(listeners).collect();
    assert_eq!(found.len(), 16, "four roles, two families, two pods: {found:?}");
    let picked = || {
        let labels = [("program", "pick_listener"), ("outcome", "outbound")];
        mesh.a.metrics().unwrap().sum("culvert_bpf_outcomes_total", &labels)
    };
    let before = picked();
    let dial = |to| client::converse(&mut client::dial_within(to, PATIENCE)?, b"anyone?");
    let dials: Vec<_> = [a2, x]
        .into_iter()
        .flat_map(|from| found.iter().map(move |to| (from, *to)))
        .map(|(from, to)| (from, to, from.netns.start(move || dial(to))))
        .collect();
    for (from, to, dial) in dials {
        let reply = dial.join().unwrap();
        assert!(!reply.is_ok_and(|reply| !reply.is_empty()), "{} reached {to}", from.name);
    }
    // Not even by way of the proxy itself, around and around.
    assert!((picked() - before - 16.0).abs() < f64::EPSILON, "{before} to {}", picked());
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    talks(a2, b1.at(Family::V4, app.port()), "afterwards");
}

#[test]
fn an_app_on_a_port_of_the_mesh_gets_nothing_that_is_not_its_own() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a2, b1, x) = (&topology.a2, &topology.b1, &topology.x);
    let impostor = App::start_on(&a2.netns, HBONE_PORT, Behaviour::Echo).unwrap();
    let _others =
        [15001, 15006].map(|port| App::start_on(&a2.netns, port, Behaviour::Echo).unwrap());
    let app = App::start(&a2.netns, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        let (since, to) = (mesh.b.flows().len(), a2.at(family, app.port()));
        talks(b1, to, "to the mesh as before");
        carried(&mesh.b, since, Direction::Outbound, to);
        let hbone = a2.at(family, HBONE_PORT);
        for from in [x, a2] {
            let reply = from.netns.run(|| client::exchange(hbone, b"GET / HTTP/1.0\r\n\r\n"));
            assert!(!reply.is_ok_and(|r| r.starts_with(b"GET")), "{} reached {hbone}", from.name);
        }
        // What redirection by iptables would take away, a pod may use here.
        for port in [15001, 15006] {
            talks(x, a2.at(family, port), "a port like any other");
        }
    }
    assert_eq!(impostor.seen().len(), 0);
}

/// What a pod with `CAP_NET_ADMIN` can undo in its own namespace: by iproute2, a command each.
const TEARS: [&[&str]; 4] = [
    &["ip", "rule", "del", "pref", "1110"],
    &["ip", "-6", "rule", "del", "pref", "1110"],
    &["ip", "route", "flush", "table", "1111"],
    &["ip", "-6", "route", "flush", "table", "1111"],
];

/// The same where our programs are no tcx links, which nobody can delete from within.
const TEARS_OF_FILTERS: [&[&str]; 3] = [
    &["tc", "filter", "del", "dev", "eth0", "egress"],
    &["tc", "filter", "del", "dev", "eth0", "ingress"],
    &["tc", "qdisc", "del", "dev", "eth0", "clsact"],
];

#[test]
fn one_thing_torn_down_leaks_nothing_and_is_put_back() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a2, b1) = (&topology.a2, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let inside = App::start(&a2.netns, Behaviour::Echo).unwrap();
    let mut open = a2.netns.run(|| client::dial(b1.at(Family::V4, app.port()))).unwrap();
    let of_filters = if inspect::have_tcx() { &[][..] } else { &TEARS_OF_FILTERS };
    for tear in TEARS.iter().chain(of_filters) {
        let eth0 = Tap::start(&a2.netns, "eth0", &[]).unwrap();
        a2.netns.output(tear[0], &tear[1..]).unwrap();
        let dials = Family::BOTH.map(|family| {
            let to = b1.at(family, app.port());
            a2.netns.start(move || client::dial_within(to, PATIENCE).map(drop))
        });
        // Either it was captured all the same, or it did not get out.
        let outcomes = dials.map(|dial| dial.join().unwrap().is_ok());
        assert_eq!(eth0.stop().plaintext().count(), 0, "{tear:?} leaked, {outcomes:?}");

        await_filters(&a2.netns, "eth0", &["hold_in", "guard"]);
        for family in Family::BOTH {
            let to = b1.at(family, app.port());
            poll::until(poll::SOON, &format!("{tear:?} to be put back"), || {
                a2.netns.run(|| client::dial_within(to, PATIENCE)).ok().map(drop)
            });
            let since = mesh.a.flows().len();
            talks(a2, to, "once it is put back");
            carried(&mesh.a, since, Direction::Outbound, to);
            talks(b1, a2.at(family, inside.port()), "in, once it is put back");
        }
        assert_eq!(
            client::ping(&mut open, b"still").unwrap(),
            b"still",
            "{tear:?} cut a connection"
        );
    }
}

#[test]
fn what_is_changed_without_any_announcement_is_put_back_within_seconds_and_counted() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let a2 = &topology.a2;
    let setting = "ipv4/tcp_fwmark_accept";
    a2.netns.set_sysctl(setting, "0").unwrap();
    poll::until(Duration::from_secs(7), "the sysctl", || {
        let path = Path::new("/proc/sys/net").join(setting);
        (a2.netns.run(|| fs::read_to_string(path)).unwrap().trim() == "1").then_some(())
    });
    poll::until(poll::SOON, "its count", || {
        let repairs = mesh.a.metrics().unwrap();
        let count = repairs.sum("culvert_steering_repairs_total", &[("kind", "sysctl")]);
        ((count - 1.0).abs() < f64::EPSILON).then_some(())
    });
    assert!(mesh.a.log().contains(setting), "no word of the repair");
}

/// Not by the pod, which cannot: as somebody on the node would, with `bpftool link detach`.
#[test]
fn a_link_that_is_detached_is_put_back_within_seconds_and_counted() {
    let Some(topology) = Topology::with_culvert().filter(|_| inspect::have_tcx()) else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a2, b1) = (&topology.a2, &topology.b1);
    let id = fs::metadata(a2.netns.path()).unwrap().ino();
    let links = mesh.a.pins().unwrap().join(format!("pods/{id}/tc"));
    let detached = fs::read_dir(links).unwrap().map(|link| {
        let link = bpf::open_pin(&link.unwrap().path()).unwrap();
        bpf::link_detach(link.as_fd()).unwrap();
    });
    assert_eq!(detached.count(), 3);
    await_filters(&a2.netns, "eth0", &["hold_in", "guard"]);
    await_filters(&a2.netns, "lo", &["hold_out"]);
    poll::until(poll::SOON, "all to be counted", || {
        let repairs = mesh.a.metrics().unwrap();
        let count = repairs.sum("culvert_steering_repairs_total", &[("kind", "filter")]);
        ((count - 3.0).abs() < f64::EPSILON).then_some(())
    });
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    talks(a2, b1.at(Family::V6, app.port()), "afterwards");
}

#[test]
fn a_pod_that_tears_everything_down_exposes_itself_and_nobody_else() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools()) else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let policy = Policy::new("mesh-only", "bank", Action::Allow).any_principal();
    let file = MeshFile::new(&topology).policy(&policy);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    // What it only removed would be put back: it takes the place of the rules and of the guard.
    for family in ["-4", "-6"] {
        a2.netns.output("ip", &[family, "rule", "add", "pref", "1", "lookup", "main"]).unwrap();
    }
    let _ahead = if inspect::have_tcx() {
        Some(end_the_chain(&topology, a2))
    } else {
        poll::until(poll::SOON, "the place of the guard to be taken", || {
            let egress = ["dev", "eth0", "egress", "pref", "11", "protocol", "all"];
            a2.netns.output("tc", &[["filter", "del"].as_slice(), &egress].concat()).ok()?;
            let other = ["u32", "match", "u32", "0", "0"];
            a2.netns.output("tc", &[["filter", "add"].as_slice(), &egress, &other].concat()).ok()
        });
        None
    };
    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        let reply = a2.netns.run(|| client::exchange(to, b"without identity"));
        assert!(
            !reply.is_ok_and(|reply| !reply.is_empty()),
            "plaintext got past the policy of {to}"
        );
        assert_eq!(app.seen().len(), 0, "plaintext was delivered");
    }
    for family in Family::BOTH {
        let (since, to) = (mesh.a.flows().len(), b1.at(family, app.port()));
        talks(a1, to, "the neighbour");
        carried(&mesh.a, since, Direction::Outbound, to);
    }
}

/// Sends SYNs as whole frames towards the gateway of the pod.
fn send_syns(
    node: &Node,
    pod: &Pod,
    from: SocketAddr,
    to: SocketAddr,
    count: u32,
    mark: u32,
) -> Finished {
    send_frames(node, pod, from, to, &[count.to_string(), mark.to_string()])
}

/// What `syns.py` sends, by its last arguments.
fn send_frames(
    node: &Node,
    pod: &Pod,
    from: SocketAddr,
    to: SocketAddr,
    more: &[String],
) -> Finished {
    let link = format!("cali-{}", pod.name);
    let shown = node.netns.output("ip", &["-o", "link", "show", &link]).unwrap();
    let gateway = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).unwrap();
    let mut command = Command::new("/usr/bin/python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/syns.py")).args([
        "eth0",
        gateway,
        &from.ip().to_string(),
        &to.ip().to_string(),
        &to.port().to_string(),
    ]);
    command.args(more);
    finish(&pod.netns, &mut command, poll::SOON * 2).unwrap()
}

#[test]
fn syns_that_a_pod_sends_past_its_tcp_do_not_leave_it() {
    if !require::tool("/usr/bin/python3", &["--version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let (a2, x, node) = (&topology.a2, &topology.x, &topology.a);
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&x.netns, Behaviour::Echo).unwrap();
    let outside = Tap::start(&node.netns, "cali-a2", &[]).unwrap();
    for mark in [0, 0x539, 0x53a, 0x111] {
        for family in Family::BOTH {
            let to = x.at(family, app.port());
            let sent = send_syns(node, a2, a2.at(family, 0), to, 50, mark);
            assert_eq!(sent.code, 0, "{}", sent.stderr);
        }
    }
    let dropped = |outcome| {
        let labels = [("program", "guard"), ("outcome", outcome)];
        mesh.a.metrics().unwrap().sum("culvert_bpf_outcomes_total", &labels)
    };
    poll::until(poll::SOON, "guard to have dropped them all", || {
        (dropped("uncaptured") + dropped("route_lost") >= 400.0).then_some(())
    });
    let report = outside.stop();
    assert_eq!(report.segments.iter().find(|segment| segment.opens()), None);
}

/// A SYN, and what belongs to no connection: by flags of TCP.
const FLAGS: [&str; 4] = ["0x02", "0x10", "0x12", "0x18"];
const EACH: usize = 20;

/// Sends frames from a2 to x past the hooks of tc; how many reached the wire.
fn reach_the_wire(topology: &Topology, port: u16) -> usize {
    let (a2, x) = (&topology.a2, &topology.x);
    let wire = Tap::start(&topology.wire, WIRE, &[]).unwrap();
    for family in Family::BOTH {
        for flags in FLAGS {
            let more = [EACH.to_string(), "0".to_owned(), flags.to_owned()];
            let to = x.at(family, port);
            let sent = send_frames(&topology.a, a2, a2.at(family, 0), to, &more);
            assert_eq!((sent.code, sent.stdout.trim()), (0, "sent 20"), "{}", sent.stderr);
        }
    }
    // What came after them has reached it.
    let behind = SocketAddr::from(([10, 0, 0, 2], 9));
    drop(topology.a.netns.run(|| client::dial_within(behind, PATIENCE)));
    poll::until(poll::SOON, "the wire to be read", || {
        wire.look().segments.iter().any(|segment| segment.dst == behind).then_some(())
    });
    wire.stop().segments.iter().filter(|segment| segment.dst.port() == port).count()
}

#[test]
fn frames_past_the_pods_own_filters_are_stopped_at_the_nodes_end() {
    let Some(topology) = Topology::with_culvert().filter(|_| have_tools()) else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let all = Family::BOTH.len() * FLAGS.len() * EACH;
    let off = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    assert_eq!(reach_the_wire(&topology, 7), all, "without `--guard-host`");
    drop(off);

    let (file, on) = (MeshFile::new(&topology), ["--guard-host"]);
    let mut mesh = Mesh::start_with(&topology, &file, Remains::Pins, &on).unwrap();
    mesh.a.set_pods(&[a1]).unwrap();
    await_filters(&a2.netns, "eth0", &[]);
    await_filters(&topology.a.netns, "cali-a2", &[]);
    assert_eq!(reach_the_wire(&topology, 7), all, "a2 is not captured");
    let apps = [a2, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a2, on_b1, on_x] = apps.each_ref().map(App::port);
    let mut before: Vec<_> = Family::BOTH
        .iter()
        .flat_map(|family| [(a2, x.at(*family, on_x)), (x, a2.at(*family, on_a2))])
        .map(|(from, to)| from.netns.run(|| client::dial(to)).unwrap())
        .collect();

    mesh.a.set_pods(&[a1, a2]).unwrap();
    await_filters(&topology.a.netns, "cali-a2", &["guard_host"]);
    assert_eq!(reach_the_wire(&topology, 7), 0);
    let counted = || {
        let labels = [("program", "guard_host"), ("outcome", "handmade")];
        mesh.a.metrics().unwrap().sum("culvert_bpf_outcomes_total", &labels)
    };
    poll::until(poll::SOON, "all to be counted", || {
        u32::try_from(all).is_ok_and(|all| counted() >= f64::from(all)).then_some(())
    });
    for family in Family::BOTH {
        let since = mesh.a.flows().len();
        talks(a2, b1.at(family, on_b1), "to the mesh");
        carried(&mesh.a, since, Direction::Outbound, b1.at(family, on_b1));
        talks(a2, x.at(family, on_x), "out of the mesh");
        for from in [b1, x, a1] {
            talks(from, a2.at(family, on_a2), "in");
        }
    }
    for stream in &mut before {
        assert_eq!(client::ping(stream, b"before").unwrap(), b"before");
    }
    // Of all that was ordinary nothing was dropped, and nothing came by without its socket.
    for outcome in ["uncaptured", "unowned"] {
        let labels = [("program", "guard_host"), ("outcome", outcome)];
        let count = mesh.a.metrics().unwrap().sum("culvert_bpf_outcomes_total", &labels);
        assert!(count < 1.0, "{outcome}: {count}");
    }

    mesh.a.kill();
    assert_eq!(reach_the_wire(&topology, 7), 0, "without a proxy");
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    talks(a2, b1.at(Family::V4, on_b1), "after a restart");
    assert_eq!(reach_the_wire(&topology, 7), 0, "after a restart");
    mesh.a.set_pods(&[a1]).unwrap();
    await_filters(&topology.a.netns, "cali-a2", &[]);
    talks(a2, x.at(Family::V4, on_x), "un-enrolled");
}

#[test]
fn a_flood_of_syns_to_one_pod_leaves_the_others_working() {
    if !require::tool("/usr/bin/python3", &["--version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let apps = [a1, a2, b1].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_a2, on_b1] = apps.each_ref().map(App::port);
    // To the application and to HBONE, from addresses that nobody answers for.
    let floods = [
        ("192.0.2.1:0", a1.at(Family::V4, on_a1)),
        ("[2001:db8::1]:0", a1.at(Family::V6, HBONE_PORT)),
    ];
    for (taken, to) in floods {
        let taken = taken.parse().unwrap();
        let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
        std::thread::scope(|scope| {
            let flood = scope.spawn(|| send_syns(&topology.b, x, taken, to, 20_000, 0));
            let mut rounds = 0;
            while rounds == 0 || !flood.is_finished() {
                talks(a2, b1.at(family, on_b1), "during the flood");
                talks(b1, a2.at(family, on_a2), "during the flood");
                rounds += 1;
            }
            let sent = flood.join().unwrap();
            assert_eq!((sent.code, sent.stdout.trim()), (0, "sent 20000"), "{}", sent.stderr);
        });
        // Cookies let in whoever means it.
        talks(x, a1.at(family, on_a1), "after the flood");
        talks(b1, a1.at(family, on_a1), "after the flood");
        talks(a1, b1.at(family, on_b1), "after the flood");
    }
}
