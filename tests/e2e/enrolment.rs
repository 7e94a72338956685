//! Pods that are enrolled and un-enrolled while they talk.
//!
//! The rule of the transition: a connection keeps the way it was opened on. One that was open before enrolment is never
//! touched. One that was captured goes on for the drain period after un-enrolment, and is ended at its end.

use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    inspect,
    load::{Load, Tally},
    mesh_file::{MeshFile, Protocol},
    poll, require,
    tap::{HBONE_PORT, Segment, Tap, WIRE},
    topology::{Family, Pod, Topology},
};

use crate::talk::{await_filters, carried, talks};

const CAPTURED: &[&str] = &["hold_in", "guard"];

/// Connections of a1 in both directions, to and from the mesh and outside of it, with an app at each end.
struct Traffic<'t> {
    ways: Vec<(&'t Pod, SocketAddr)>,
    _apps: [App; 3],
}

impl<'t> Traffic<'t> {
    fn new(topology: &'t Topology) -> Self {
        let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
        let apps = [a1, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
        let [on_a1, on_b1, on_x] = apps.each_ref().map(App::port);
        let ways = Family::BOTH.into_iter().flat_map(|family| {
            let inside = a1.at(family, on_a1);
            [(a1, b1.at(family, on_b1)), (a1, x.at(family, on_x)), (b1, inside), (x, inside)]
        });
        Self { ways: ways.collect(), _apps: apps }
    }

    fn open(&self) -> Vec<TcpStream> {
        let mut streams = Vec::new();
        for (from, to) in &self.ways {
            let stream = from.netns.run(|| client::dial(*to));
            streams.push(stream.unwrap_or_else(|e| panic!("{} -> {to}: {e}", from.name)));
        }
        self.all_live(&mut streams, "at first");
        streams
    }

    #[track_caller]
    fn all_live(&self, streams: &mut [TcpStream], when: &str) {
        for ((from, to), stream) in self.ways.iter().zip(streams) {
            let reply = client::ping(stream, b"alive?");
            let reply = reply.unwrap_or_else(|e| panic!("{} -> {to} {when}: {e}", from.name));
            assert_eq!(reply, b"alive?", "{} -> {to} {when}", from.name);
        }
    }
}

#[test]
fn connections_from_before_enrolment_survive_it_and_un_enrolment_too() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2) = (&topology.a1, &topology.a2);
    // What a control plane says of a pod that is not enrolled: it takes plaintext.
    let outside = MeshFile::default()
        .workload(a1, &topology.a, Protocol::Tcp)
        .workload(a2, &topology.a, Protocol::Hbone)
        .workload(&topology.b1, &topology.b, Protocol::Hbone);
    let mesh = Mesh::start(&topology, &outside, Remains::Nothing).unwrap();
    mesh.a.set_pods(&[a2]).unwrap();
    await_filters(&a1.netns, "eth0", &[]);
    let traffic = Traffic::new(&topology);
    let mut before = traffic.open();

    mesh.a.set_pods(&[a1, a2]).unwrap();
    await_filters(&a1.netns, "eth0", CAPTURED);
    mesh.set(&MeshFile::new(&topology)).unwrap();
    traffic.all_live(&mut before, "after enrolment");
    let since = mesh.a.flows().len();
    for (from, to) in &traffic.ways {
        talks(from, *to, "a new one");
    }
    let (_, out) = traffic.ways[0];
    carried(&mesh.a, since, Direction::Outbound, out);

    mesh.a.set_pods(&[a2]).unwrap();
    await_filters(&a1.netns, "eth0", &[]);
    poll::until(poll::SOON, "the end of un-enrolment", || {
        mesh.a.log().matches("pod un-enrolled").nth(1).map(drop)
    });
    traffic.all_live(&mut before, "after un-enrolment");
}

#[test]
fn captured_connections_go_on_for_the_drain_period_and_new_ones_go_direct_at_once() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2) = (&topology.a1, &topology.a2);
    let (file, drain) = (MeshFile::new(&topology), ["--drain", "10s"]);
    let mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &drain).unwrap();
    let traffic = Traffic::new(&topology);
    let mut captured = traffic.open();

    mesh.a.set_pods(&[a2]).unwrap();
    await_filters(&a1.netns, "eth0", &[]);
    // All of this is inside the drain period.
    traffic.all_live(&mut captured, "in the drain period");
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
    let mut direct = Vec::new();
    // b1 is captured still, and takes what has no identity as plaintext.
    for (from, to) in traffic.ways.iter().filter(|(from, _)| from.name != "b1") {
        talks(from, *to, "a new one");
        direct.push(*to);
    }
    let report = eth0.stop();
    for to in direct {
        assert!(
            report.segments.iter().any(|s| s.opens() && s.dst == to),
            "{to} was not reached direct"
        );
    }
    assert!(!report.segments.iter().any(|s| s.opens() && s.dst.port() == HBONE_PORT));

    for ((from, to), stream) in traffic.ways.iter().zip(&mut captured) {
        let end = client::next_event(stream).map_err(|error| error.kind());
        let cut =
            matches!(&end, Ok(bytes) if bytes.is_empty()) || end == Err(ErrorKind::ConnectionReset);
        assert!(cut, "{} -> {to} ended with {end:?}", from.name);
    }
}

/// How many segments a tap of the wire has seen that were there before this call, however far behind it is.
fn seen_by(wire: &Tap, topology: &Topology) -> usize {
    // A connection that is refused, between ports that nobody else uses.
    let port = u16::try_from(61_000 + wire.look().segments.len() % 4000).unwrap();
    let start = wire.look().segments.len();
    let to = SocketAddr::from(([10, 0, 0, 2], port));
    drop(topology.a.netns.run(|| client::dial_within(to, poll::SOON)));
    poll::until(poll::SOON, "the wire to be read", || {
        let report = wire.look();
        let fresh = report.segments.iter().skip(start);
        fresh.zip(start..).find(|(segment, _)| segment.dst == to).map(|(_, place)| place)
    })
}

#[test]
fn short_connections_through_cycles_of_enrolment_are_neither_refused_nor_reset() {
    // By filters a SYN can be lost while their qdisc comes or goes, about once in 20,000 connections.
    let Some(topology) = Topology::with_culvert().filter(|_| inspect::have_tcx()) else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let (file, drain) = (MeshFile::new(&topology), ["--drain", "2m"]);
    let mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &drain).unwrap();
    // What happens where the two choose the same port is another matter, and has a scenario of its own in `tcp_traps`.
    x.netns.set_sysctl("ipv4/ip_local_port_range", "10000 29999").unwrap();
    a1.netns.set_sysctl("ipv4/ip_local_port_range", "30000 60999").unwrap();
    let apps = [a1, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let to = |pod: &Pod, app: &App| Family::BOTH.map(|family| pod.at(family, app.port()));
    let wire = Tap::start(&topology.wire, WIRE, &[]).unwrap();
    let workers = require::rounds(3, 50);
    let loads = [(a1, x, &apps[2]), (x, a1, &apps[0]), (a1, b1, &apps[1]), (a2, b1, &apps[1])]
        .map(|(from, pod, app)| Load::start(&from.netns, &to(pod, app), workers));
    let ended = || loads.iter().map(Load::ended).sum::<usize>();

    // What a tap had seen while a1 was captured: from and to.
    let mut captured = Vec::new();
    let mut since = 0;
    for _ in 0..require::rounds(1, 6) {
        for (pods, filters) in [([a2].as_slice(), [].as_slice()), (&[a1, a2], CAPTURED)] {
            if filters.is_empty() {
                captured.push(since..seen_by(&wire, &topology));
            }
            mesh.a.set_pods(pods).unwrap();
            await_filters(&a1.netns, "eth0", filters);
            since = seen_by(&wire, &topology);
            let seen = ended();
            poll::until(poll::SOON, "connections in this state", || {
                (ended() >= seen + 8 * workers).then_some(())
            });
        }
    }
    let want = require::rounds(400, 10_000);
    poll::until(Duration::from_mins(2), "enough connections", || (ended() >= want).then_some(()));
    let tallies = loads.map(Load::stop);
    let report = wire.stop();
    captured.push(since..report.segments.len());

    let failed = tallies.each_ref().map(Tally::failed);
    assert_eq!(failed, [0; 4], "a1 -> x, x -> a1, a1 -> b1, a2 -> b1: {tallies:?}");
    assert!(tallies.iter().map(Tally::total).sum::<usize>() >= want, "{tallies:?}");
    assert_eq!(report.missed, 0);
    // Between two members that are captured nothing is plaintext; a connection of a1 from before is.
    let between = |pod: &Pod, segment: &Segment| {
        let ends = [segment.src.ip(), segment.dst.ip()];
        Family::BOTH.iter().any(|f| ends.contains(&pod.ip(*f)) && ends.contains(&b1.ip(*f)))
    };
    assert_eq!(report.plaintext().find(|segment| between(a2, segment)), None);
    for segment in captured.into_iter().flat_map(|range| &report.segments[range]) {
        let opened = segment.opens() && !segment.is_hbone() && between(a1, segment);
        assert!(!opened, "in plaintext while a1 was captured: {segment:?}");
    }
}
