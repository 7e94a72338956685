//! What a pod may choose about its own capture, by annotations that change while connections are open.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Culvert, Mesh, Remains},
    flow_log::Direction,
    mesh_file::{Action, MeshFile, Policy},
    poll,
    tap::{HBONE_PORT, Tap},
    topology::{Family, Pod, Topology},
};

use crate::talk::{carried, count, talks};

const BYPASS_INBOUND: &str = "ambient.istio.io/bypass-inbound-capture";
const INBOUND_PORTS: &str = "culvert.io/exclude-inbound-ports";
const OUTBOUND_PORTS: &str = "culvert.io/exclude-outbound-ports";
const OUTBOUND_CIDRS: &str = "culvert.io/exclude-outbound-cidrs";
const INTERFACES: &str = "culvert.io/exclude-interfaces";

const NEEDLE: &[u8] = b"readable by anyone on the way";
/// Long enough for whatever is let through.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Gives a1 these annotations, and a2 none.
fn annotate(topology: &Topology, culvert: &Culvert<'_>, annotations: &[(&str, &str)]) {
    culvert.annotate(&[(&topology.a1, annotations), (&topology.a2, &[])]).unwrap();
}

fn outcomes(culvert: &Culvert<'_>, program: &str, outcome: &str) -> u64 {
    let labels = [("program", program), ("outcome", outcome)];
    count(culvert, "culvert_bpf_outcomes_total", &labels)
}

/// Whether the app at `to` answers `from`.
fn reaches(from: &Pod, to: SocketAddr) -> bool {
    from.netns.run(|| {
        let reply = client::dial_within(to, AT_ONCE)
            .and_then(|mut stream| client::converse(&mut stream, NEEDLE));
        reply.is_ok_and(|reply| reply == NEEDLE)
    })
}

/// How many segments with the needle pass the pod's interface while it talks to the app at `to`.
#[track_caller]
fn readable(pod: &Pod, to: SocketAddr) -> usize {
    let eth0 = Tap::start(&pod.netns, "eth0", &[NEEDLE]).unwrap();
    let reply = pod.netns.run(|| client::exchange(to, NEEDLE));
    assert_eq!(reply.unwrap(), NEEDLE, "{to}");
    eth0.stop().needles().count()
}

/// Waits until what the pod sends to `to` can be read on the way, or no more.
#[track_caller]
fn await_readable(pod: &Pod, to: SocketAddr, wanted: bool) {
    let what =
        format!("{to} to be dialled {} the proxy", if wanted { "around" } else { "through" });
    // There and back.
    let segments = if wanted { 2 } else { 0 };
    poll::until(poll::SOON, &what, || (readable(pod, to) == segments).then_some(()));
}

#[test]
fn a_pod_takes_its_inbound_plaintext_itself_while_it_asks_for_that() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let other = App::start(&a1.netns, Behaviour::Echo).unwrap();
    // Whatever comes through the proxy is denied.
    let deny = |name, app: &App| Policy::new(name, "shop", Action::Deny).port(app.port());
    let file = MeshFile::new(&topology).policy(&deny("one", &app)).policy(&deny("two", &other));
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let port = app.port().to_string();
    let closed = |from: &Pod, app: &App, why: &str| {
        for family in Family::BOTH {
            assert!(!reaches(from, a1.at(family, app.port())), "{why}: {} {family:?}", from.name);
        }
    };
    closed(x, &app, "not asked for");
    for (annotation, value, also_other) in
        [(BYPASS_INBOUND, "true", true), (INBOUND_PORTS, port.as_str(), false)]
    {
        annotate(&topology, &mesh.a, &[(annotation, value)]);
        for family in Family::BOTH {
            let to = a1.at(family, app.port());
            poll::until(poll::SOON, annotation, || reaches(x, to).then_some(()));
            let before = outcomes(&mesh.a, "pick_listener", "excluded");
            assert!(reaches(x, to));
            assert_eq!(outcomes(&mesh.a, "pick_listener", "excluded") - before, 1);
            let peer = app.seen().last().unwrap().peer;
            assert_eq!(peer.ip(), x.ip(family));
            assert_eq!(reaches(x, a1.at(family, other.port())), also_other, "{annotation}");
        }
        let mut open = x.netns.run(|| client::dial(a1.at(Family::V4, app.port()))).unwrap();
        assert_eq!(client::ping(&mut open, b"open").unwrap(), b"open");
        // What comes by HBONE is the proxy's still.
        closed(b1, &app, annotation);
        annotate(&topology, &mesh.a, &[]);
        poll::until(poll::SOON, "capture again", || {
            (!reaches(x, a1.at(Family::V4, app.port()))).then_some(())
        });
        closed(x, &app, "no more asked for");
        assert_eq!(client::ping(&mut open, b"still").unwrap(), b"still", "{annotation}");
    }
}

#[test]
fn ports_and_networks_that_a_pod_excludes_are_dialled_around_the_proxy() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let [app, other] = [(); 2].map(|()| App::start(&b1.netns, Behaviour::Echo).unwrap());
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let port = app.port().to_string();
    let v4 = format!("{}/32", b1.ip(Family::V4));
    let both = format!("{v4}, {}", b1.ip(Family::V6));
    for family in Family::BOTH {
        assert_eq!(readable(a1, b1.at(family, app.port())), 0, "{family:?}");
    }
    // What is excluded, and whether that is so for the other port, and for IPv6.
    for (annotation, value, other_port, v6) in [
        (OUTBOUND_PORTS, port.as_str(), false, true),
        (OUTBOUND_CIDRS, v4.as_str(), true, false),
        (OUTBOUND_CIDRS, both.as_str(), true, true),
        (OUTBOUND_CIDRS, "::/0", true, true),
    ] {
        annotate(&topology, &mesh.a, &[(annotation, value)]);
        let excluded =
            |family| (family == Family::V4 && value != "::/0") || (family == Family::V6 && v6);
        let mut kept = Vec::new();
        for family in Family::BOTH {
            let to = b1.at(family, app.port());
            await_readable(a1, to, excluded(family));
            let other = b1.at(family, other.port());
            let segments = if other_port && excluded(family) { 2 } else { 0 };
            assert_eq!(readable(a1, other), segments, "{annotation} {value}: {other}");
            let mut open = a1.netns.run(|| client::dial(to)).unwrap();
            assert_eq!(client::ping(&mut open, b"open").unwrap(), b"open");
            kept.push(open);
        }
        annotate(&topology, &mesh.a, &[]);
        for family in Family::BOTH {
            await_readable(a1, b1.at(family, app.port()), false);
        }
        for mut open in kept {
            assert_eq!(client::ping(&mut open, b"still").unwrap(), b"still", "{annotation}");
        }
    }
    assert_eq!(outcomes(&mesh.a, "guard", "uncaptured"), 0);
}

#[test]
fn an_interface_that_a_pod_excludes_is_left_alone_and_no_other_leaks() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1, node) = (&topology.a1, &topology.b1, &topology.a.netns);
    node.ip(&format!(
        "link add second type veth peer name net1 netns {}\nlink set second up\n\
         addr add 10.99.0.1/24 dev second\naddr add fd99::1/64 dev second nodad\n",
        a1.netns.name(),
    ))
    .unwrap();
    a1.netns
        .ip("link set net1 up\naddr add 10.99.0.2/24 dev net1\naddr add fd99::2/64 dev net1 nodad\n")
        .unwrap();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let [inside, beside, beyond] =
        [&a1.netns, node, &b1.netns].map(|netns| App::start(netns, Behaviour::Echo).unwrap());
    let pairs: [(IpAddr, IpAddr); 2] = [("10.99.0.1", "10.99.0.2"), ("fd99::1", "fd99::2")]
        .map(|(node, own)| (node.parse().unwrap(), own.parse().unwrap()));
    let excluded = || {
        ["mark_connect", "guard", "pick_listener"]
            .map(|program| outcomes(&mesh.a, program, "excluded"))
    };
    let by_net1 = |out: IpAddr, own: IpAddr| {
        let before = excluded();
        talks(a1, SocketAddr::new(out, beside.port()), "out by net1");
        let to = SocketAddr::new(own, inside.port());
        assert_eq!(node.run(|| client::exchange(to, b"in")).unwrap(), b"in", "{to}");
        let mut each = before.into_iter().zip(excluded()).map(|(before, now)| now - before);
        [each.next(), each.next(), each.next()].map(Option::unwrap)
    };
    for (out, own) in pairs {
        assert_eq!(by_net1(out, own), [0; 3], "not asked for");
    }
    annotate(&topology, &mesh.a, &[(INTERFACES, "net1,net2")]);
    for (out, own) in pairs {
        poll::until(poll::SOON, "net1 to be excluded", || {
            (by_net1(out, own) == [1; 3]).then_some(())
        });
    }
    // From its address by another interface nothing leaves, neither captured nor around the proxy.
    for (family, (_, own)) in Family::BOTH.into_iter().zip(pairs) {
        let to = b1.at(family, beyond.port());
        let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
        let before = outcomes(&mesh.a, "guard", "uncaptured");
        a1.netns.start(move || drop(client::dial_from(SocketAddr::new(own, 0), to)));
        poll::until(poll::SOON, "its SYN to be dropped", || {
            (outcomes(&mesh.a, "guard", "uncaptured") > before).then_some(())
        });
        assert_eq!(eth0.stop().segments.iter().filter(|s| s.src.ip() == own).count(), 0);
        assert_eq!(readable(a1, to), 0, "by eth0");
    }
    annotate(&topology, &mesh.a, &[]);
    for (out, own) in pairs {
        poll::until(poll::SOON, "net1 to be captured", || {
            (by_net1(out, own) == [0; 3]).then_some(())
        });
    }
}

#[test]
fn a_mistake_in_an_annotation_leaves_the_pods_settings_and_is_counted() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let port = app.port().to_string();
    let exclude = [(OUTBOUND_PORTS, port.as_str())];
    let to = b1.at(Family::V4, app.port());
    annotate(&topology, &mesh.a, &exclude);
    await_readable(a1, to, true);
    mesh.a.annotate(&[(a1, &[(OUTBOUND_PORTS, "http")]), (a2, &exclude)]).unwrap();
    // The other pod's annotations are in force, so this file has been read.
    await_readable(a2, to, true);
    assert_eq!(readable(a1, to), 2, "the former settings stay");
    assert_eq!(count(&mesh.a, "culvert_pod_settings_refused_total", &[]), 1);
    let log = mesh.a.log();
    let told = log.lines().find(|line| line.contains("annotation refused")).unwrap();
    for part in ["pods.yaml:", "pod shop/a1", OUTBOUND_PORTS, "must be a port"] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[test]
fn a_node_may_let_no_pod_go_around_the_proxy() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let more = ["--allow-pod-bypass", "false"];
    let mesh =
        Mesh::start_with(&topology, &MeshFile::new(&topology), Remains::Nothing, &more).unwrap();
    let port = app.port().to_string();
    annotate(&topology, &mesh.a, &[(OUTBOUND_PORTS, &port), (BYPASS_INBOUND, "true")]);
    poll::until(poll::SOON, "the annotations to be refused", || {
        mesh.a.log().contains("--allow-pod-bypass").then_some(())
    });
    let since = mesh.a.flows().len();
    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        assert_eq!(readable(a1, to), 0, "{family:?}");
        carried(&mesh.a, since, Direction::Outbound, to);
    }
}

#[test]
fn settings_hold_while_no_proxy_runs_and_are_those_of_the_file_after() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, x) = (&topology.a1, &topology.x);
    let [inside, outside] = [a1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let port = outside.port().to_string();
    let annotations = [(BYPASS_INBOUND, "true"), (OUTBOUND_PORTS, port.as_str())];
    annotate(&topology, &mesh.a, &annotations);
    poll::until(poll::SOON, "the settings to be in force", || {
        talks(a1, x.at(Family::V4, outside.port()), "whichever way");
        (outcomes(&mesh.a, "mark_connect", "excluded") > 0).then_some(())
    });
    let excluded = |mesh: &Mesh<'_>| {
        outcomes(&mesh.a, "mark_connect", "excluded")
            + outcomes(&mesh.a, "pick_listener", "excluded")
    };
    let around = || {
        for family in Family::BOTH {
            talks(a1, x.at(family, outside.port()), "out, around the proxy");
            talks(x, a1.at(family, inside.port()), "in, around the proxy");
            let hbone = a1.at(family, HBONE_PORT);
            assert!(!reaches(x, hbone), "{hbone}");
        }
    };
    around();
    mesh.a.kill();
    poll::until(poll::SOON, "the proxy to be gone", || mesh.a.pid().is_none().then_some(()));
    around();
    // Of the next start the file decides.
    annotate(&topology, &mesh.a, &[]);
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    let before = excluded(&mesh);
    for family in Family::BOTH {
        talks(a1, x.at(family, outside.port()), "captured");
        talks(x, a1.at(family, inside.port()), "captured");
    }
    assert_eq!(excluded(&mesh), before);
}
