//! Two processes of one node: the newer takes over from the elder while pods talk, and either may die on the way.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aya::programs::TcAttachType;
use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Culvert, Mesh, Remains},
    http, inspect,
    load::Load,
    mesh_file::MeshFile,
    payload::{Digest, Source},
    poll,
    process::Process,
    require,
    tap::{Tap, WIRE},
    topology::{Family, Pod, Topology},
};
use nix::sys::signal::Signal;

use crate::talk::{await_filters, talks};

/// Longer than any scenario keeps connections through the elder.
const PATIENT: [&str; 2] = ["--drain", "2m"];
const CAPTURED: &[&str] = &["hold_in", "guard"];

fn mesh<'t>(topology: &'t Topology, more: &[&str]) -> Mesh<'t> {
    Mesh::start_with(topology, &MeshFile::new(topology), Remains::Pins, more).unwrap()
}

/// Tells a process to end, and waits for it.
#[track_caller]
fn end(mut process: Process) {
    process.signal(Signal::SIGTERM).unwrap();
    let status = process.wait(Duration::from_secs(30)).expect("it does not end");
    assert_eq!(status.code(), Some(0), "{status}");
}

/// SIGKILL, and waits until it is gone.
fn kill(mut process: Process) {
    process.kill();
}

/// Starts a process in place of the one that runs, and waits until it is ready; gives the elder.
#[track_caller]
fn succeed(culvert: &mut Culvert<'_>) -> Process {
    let elder = culvert.succeed().unwrap();
    culvert.wait_ready().unwrap();
    elder
}

/// Connections both ways between a1 and b1, by both families, that stay open.
struct Held {
    streams: Vec<(String, TcpStream)>,
}

impl Held {
    fn open(ways: &[(&Pod, SocketAddr)], count: usize) -> Self {
        let streams = ways.iter().cycle().take(count).map(|(from, to)| {
            let what = format!("{} -> {to}", from.name);
            let stream = from.netns.run(|| client::dial(*to));
            let stream = stream.unwrap_or_else(|e| panic!("{what}: {e}"));
            (what, stream)
        });
        let mut held = Self { streams: streams.collect() };
        held.talk("at first");
        held
    }

    #[track_caller]
    fn talk(&mut self, when: &str) {
        for (what, stream) in &mut self.streams {
            let reply = client::ping(stream, b"still here");
            assert_eq!(reply.unwrap_or_else(|e| panic!("{what} {when}: {e}")), b"still here");
        }
    }

    /// Each ends as its ends want it: whole, with an end of stream.
    #[track_caller]
    fn finish(self) {
        for (what, mut stream) in self.streams {
            let reply = client::converse(&mut stream, b"last words");
            assert_eq!(reply.unwrap_or_else(|e| panic!("{what}: {e}")), b"last words");
        }
    }
}

struct Ends {
    apps: [App; 2],
}

impl Ends {
    fn start(topology: &Topology) -> Self {
        Self {
            apps: [&topology.a1, &topology.b1]
                .map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap()),
        }
    }

    fn ways<'t>(&self, topology: &'t Topology) -> Vec<(&'t Pod, SocketAddr)> {
        let (a1, b1) = (&topology.a1, &topology.b1);
        let [on_a1, on_b1] = self.apps.each_ref().map(App::port);
        let ways =
            Family::BOTH.map(|family| [(a1, b1.at(family, on_b1)), (b1, a1.at(family, on_a1))]);
        ways.into_iter().flatten().collect()
    }

    /// Short connections, again and again, to node a's pod and from it.
    fn load(&self, topology: &Topology, workers: usize) -> [Load; 2] {
        let ways = self.ways(topology);
        [&topology.a1, &topology.b1].map(|pod| {
            let to: Vec<_> =
                ways.iter().filter(|(from, _)| from.name == pod.name).map(|(_, to)| *to).collect();
            Load::start(&pod.netns, &to, workers)
        })
    }
}

/// A new connection each way gets through.
#[track_caller]
fn all_talk(ways: &[(&Pod, SocketAddr)], when: &str) {
    for (from, to) in ways {
        talks(from, *to, when);
    }
}

/// A node that one process carries has one set of everything.
#[track_caller]
fn one_set(culvert: &Culvert<'_>, topology: &Topology) {
    let host = &topology.a.netns;
    poll::until(poll::SOON, "one mark_own and one cgroup of ours", || {
        let programs = inspect::socket_programs(culvert, host).ok()?;
        let own = programs.iter().filter(|(name, _)| name.starts_with("mark_own")).count();
        let cgroups = inspect::entries(culvert, host, "own_cgroups").ok()?;
        ((own, cgroups) == (1, 1)).then_some(())
    });
    for pod in [&topology.a1, &topology.a2] {
        assert_eq!(inspect::lookup_links(&pod.netns).unwrap(), 1, "{}", pod.name);
        let filters = inspect::filters(&pod.netns, "eth0").unwrap();
        let ours = filters.iter().filter(|filter| filter.is_ours()).count();
        assert_eq!(ours, CAPTURED.len(), "{}: {filters:?}", pod.name);
    }
}

fn programs(mesh: &Mesh<'_>, topology: &Topology) -> Vec<(String, u64)> {
    let all = inspect::socket_programs(&mesh.a, &topology.a.netns).unwrap();
    all.into_iter().filter(|(name, _)| !name.starts_with("mark_own")).collect()
}

/// The whole of it, three times over: programs are replaced, sockets swapped, processes end.
#[test]
fn no_connection_is_lost_while_processes_hand_over() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    let wire = Tap::start(&topology.wire, WIRE, &[]).unwrap();
    let load = ends.load(&topology, require::rounds(6, 100));
    let mut before = programs(&mesh, &topology);
    for round in 0..3 {
        let mut held = Held::open(&ways, 200);
        let elder = succeed(&mut mesh.a);
        held.talk("with two processes");
        let after = programs(&mesh, &topology);
        for ((name, old), (same, new)) in before.iter().zip(&after) {
            assert_eq!(name, same, "round {round}");
            assert_ne!(old, new, "{name} is still the elder's in round {round}");
        }
        before = after;
        elder.signal(Signal::SIGTERM).unwrap();
        all_talk(&ways, "while the elder drains");
        held.talk("while their process drains");
        held.finish();
        end(elder);
        one_set(&mesh.a, &topology);
    }
    let ended = || load.iter().map(Load::ended).sum::<usize>();
    let want = require::rounds(100, 10_000);
    poll::until(Duration::from_mins(2), "enough connections", || (ended() >= want).then_some(()));
    for load in load {
        let tally = load.stop();
        assert!(tally.done > 0);
        assert_eq!(tally.failed(), 0, "of {}: {:#?}", tally.total(), tally.notes);
    }
    let report = wire.stop();
    let readable: Vec<_> = report.plaintext().collect();
    assert!(readable.is_empty(), "{readable:?}");
    assert_eq!(report.not_tls(), Vec::<String>::new());
}

#[test]
fn connections_of_the_elder_go_on_until_its_drain_ends() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &["--drain", "8s"]);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    let mut old = Held::open(&ways, 4);
    let elder = succeed(&mut mesh.a);
    // From b1 new ones share a tunnel with those before, as long as the elder does not say that it drains.
    let new: Vec<_> = ways.iter().copied().filter(|(from, _)| from.name == "a1").collect();
    let mut new = Held::open(&new, 4);
    elder.signal(Signal::SIGTERM).unwrap();
    old.talk("in the drain period");
    end(elder);
    for (what, stream) in &mut old.streams {
        let end = client::next_event(stream);
        assert!(!matches!(&end, Ok(bytes) if !bytes.is_empty()), "{what} ended with {end:?}");
    }
    new.talk("when the elder has ended");
    new.finish();
}

#[test]
fn transfers_under_way_complete() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let (a1, b1) = (&topology.a1, &topology.b1);
    let sinks = [a1, b1].map(|pod| App::start(&pod.netns, Behaviour::Sink).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let ways = [(a1, b1.at(Family::V4, sinks[1].port())), (b1, a1.at(Family::V6, sinks[0].port()))];
    let uploads: Vec<_> = ways
        .into_iter()
        .map(|(from, to)| {
            let stop = Arc::clone(&stop);
            from.netns.start(move || {
                let mut stream = client::dial(to).unwrap();
                let (mut source, mut sent) = (Source::new(usize::MAX), Digest::default());
                while !stop.load(Ordering::Relaxed) {
                    let chunk = source.next_chunk().expect("nothing left to send");
                    stream.write_all(chunk).unwrap_or_else(|e| panic!("{to}: {e}"));
                    sent.update(chunk);
                    // At full speed it would leave an emulated CPU no time for handshakes.
                    poll::within(Duration::from_millis(20), || None::<()>);
                }
                stream.shutdown(Shutdown::Write).unwrap();
                let mut reply = String::new();
                stream.read_to_string(&mut reply).unwrap_or_else(|e| panic!("{to}: {e}"));
                (reply, sent.report())
            })
        })
        .collect();
    poll::until(poll::SOON, "both transfers to arrive", || {
        sinks.iter().all(|sink| sink.seen().len() == 1).then_some(())
    });
    let elder = succeed(&mut mesh.a);
    elder.signal(Signal::SIGTERM).unwrap();
    all_talk(&Ends::start(&topology).ways(&topology), "while the elder drains");
    stop.store(true, Ordering::Relaxed);
    for upload in uploads {
        let (received, sent) = upload.join().unwrap();
        assert_eq!(received, sent);
    }
    end(elder);
}

#[test]
fn an_elder_that_is_killed_in_between_leaves_all_to_its_successor() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    // Before the newer one is ready, and after.
    for early in [true, false] {
        let elder = mesh.a.succeed().unwrap();
        if early {
            kill(elder);
            mesh.a.wait_ready().unwrap();
        } else {
            mesh.a.wait_ready().unwrap();
            kill(elder);
        }
        all_talk(&ways, "when the elder is dead");
        one_set(&mesh.a, &topology);
    }
}

#[test]
fn an_elder_goes_on_when_its_successor_dies_before_it_is_ready_or_after() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    let wire = Tap::start(&topology.wire, WIRE, &[]).unwrap();
    let mut held = Held::open(&ways, 8);
    let lost = |mesh: &Mesh<'_>| mesh.a.log().matches("taking the pods back").count();
    for early in [true, false] {
        let load = ends.load(&topology, 2);
        let before = lost(&mesh);
        let elder = mesh.a.succeed().unwrap();
        if !early {
            mesh.a.wait_ready().unwrap();
        }
        mesh.a.kill();
        mesh.a.restore(elder);
        poll::until(poll::SOON, "the pods to be taken back", || {
            // One that died before it took anything has nothing that could be taken back.
            (early || lost(&mesh) > before).then_some(())
        });
        mesh.a.wait_ready().unwrap();
        all_talk(&ways, "when the successor is dead");
        held.talk("when the successor is dead");
        for load in load {
            let tally = load.stop();
            assert_eq!(tally.refused, 0, "{:#?}", tally.notes);
        }
        one_set(&mesh.a, &topology);
    }
    // And it keeps the pods up, as before.
    tear_rules_down(&topology.a1);
    held.finish();
    assert_eq!(wire.stop().plaintext().count(), 0);
}

#[test]
fn both_killed_pods_are_held_and_the_next_start_converges() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    let elder = succeed(&mut mesh.a);
    kill(elder);
    mesh.a.kill();
    let waiting: Vec<_> = ways
        .iter()
        .map(|(from, to)| {
            let to = *to;
            (to, from.netns.start(move || client::exchange(to, b"patience")))
        })
        .collect();
    let gone = poll::within(Duration::from_millis(700), || {
        waiting.iter().find(|(_, client)| client.is_finished()).map(|(to, _)| *to)
    });
    assert_eq!(gone, None, "it did not wait");
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    for (to, client) in waiting {
        let reply = client.join().unwrap();
        assert_eq!(reply.unwrap_or_else(|e| panic!("{to}: {e}")), b"patience");
    }
    one_set(&mesh.a, &topology);
}

fn readiness(topology: &Topology) -> (u16, String) {
    let to = SocketAddr::from(([127, 0, 0, 1], 15021));
    let reply = topology.a.netns.run(|| http::request("GET", to, "/healthz/ready")).unwrap();
    (reply.status, reply.body)
}

#[test]
fn readiness_is_the_newer_ones_and_an_unready_one_that_is_stopped_gives_the_node_back() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    let mut held = Held::open(&ways, 4);
    // Only the newer one is told of a pod that cannot be enrolled.
    let pods = topology.dir().join("newer.yaml");
    let text = fs::read_to_string(culvert_tests::culvert::pods_path(&topology.a)).unwrap();
    let missing =
        text.replacen(&topology.a2.netns.path().display().to_string(), "/run/netns/missing", 1);
    assert_ne!(text, missing);
    fs::write(&pods, missing).unwrap();
    let usual = culvert_tests::culvert::pods_path(&topology.a);
    mesh.a.set_flag("--pods", &pods.display().to_string());
    let elder = mesh.a.succeed().unwrap();
    assert_eq!(readiness(&topology).0, 500, "answered for the elder");
    let newer_log = "pod not enrolled";
    poll::until(poll::SOON, newer_log, || mesh.a.log().contains(newer_log).then_some(()));
    assert_eq!(readiness(&topology).0, 500);
    assert_eq!(mesh.a.terminate(Duration::from_secs(30)).unwrap().code(), Some(0));
    mesh.a.restore(elder);
    mesh.a.set_flag("--pods", &usual.display().to_string());
    assert_eq!(readiness(&topology), (200, "ready\n".to_owned()));
    held.talk("when the newer one has ended");
    all_talk(&ways, "when the newer one has ended");
    one_set(&mesh.a, &topology);
    held.finish();
}

#[test]
fn a_third_process_is_refused_and_a_word_on_the_control_socket_drains_the_elder() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let mut elder = succeed(&mut mesh.a);
    let newer = mesh.a.succeed().unwrap();
    let status = mesh.a.process().unwrap().wait(poll::SOON).expect("the third goes on");
    assert_eq!(status.code(), Some(2));
    let log = mesh.a.log();
    assert!(log.contains("two culverts run under this name already"), "{log}");
    mesh.a.restore(newer);

    let mut control = UnixStream::connect(mesh.a.control_socket(0)).unwrap();
    control.write_all(b"drain\n").unwrap();
    let mut reply = [0; 9];
    control.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"draining\n");
    let status = elder.wait(Duration::from_secs(30)).expect("it does not end");
    assert_eq!(status.code(), Some(0));
}

#[test]
fn pods_come_and_go_while_two_processes_hold_the_node() {
    if !require::tool("bpftool", &["version"]) {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    mesh.a.set_pods(&[a1]).unwrap();
    await_filters(&a2.netns, "eth0", &[]);
    let ends = Ends::start(&topology);
    let ways = ends.ways(&topology);
    let elder = succeed(&mut mesh.a);
    // Of a1, through both.
    let mut held = Held::open(&ways, 4);

    mesh.a.set_pods(&[a1, a2]).unwrap();
    await_filters(&a2.netns, "eth0", CAPTURED);
    let inside = App::start(&a2.netns, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        talks(b1, a2.at(family, inside.port()), "a pod that came");
    }
    mesh.a.set_pods(&[a2]).unwrap();
    await_filters(&a1.netns, "eth0", &[]);
    held.talk("in the drain period of a pod that left");
    held.finish();
    end(elder);
    poll::until(poll::SOON * 3, "the pod that left to be un-enrolled", || {
        (inspect::lookup_links(&a1.netns).ok()? == 0).then_some(())?;
        let pods = fs::read_dir(mesh.a.pins().ok()?.join("pods")).ok()?.count();
        (pods == 1).then_some(())
    });
    for family in Family::BOTH {
        talks(b1, a2.at(family, inside.port()), "the pod that stays");
    }
}

#[test]
fn the_last_of_two_ephemeral_processes_cleans_up() {
    let Some(topology) = Topology::with_culvert() else { return };
    let file = MeshFile::new(&topology);
    let mut mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &PATIENT).unwrap();
    let folder = mesh.a.pins().unwrap().parent().unwrap().to_owned();
    let elder = succeed(&mut mesh.a);
    end(elder);
    assert!(folder.exists());
    let ends = Ends::start(&topology);
    all_talk(&ends.ways(&topology), "when the elder has ended");
    assert_eq!(mesh.a.terminate(Duration::from_secs(30)).unwrap().code(), Some(0));
    assert!(!folder.exists(), "{} is still there", folder.display());
    let sockets = mesh.a.control_socket(0);
    assert!(!sockets.parent().unwrap().exists());
    await_filters(&topology.a1.netns, "eth0", &[]);
}

/// Takes the rules away that send captured connections to `lo`, and waits until they are put back.
#[track_caller]
fn tear_rules_down(pod: &Pod) {
    for family in ["-4", "-6"] {
        let rule = ["rule", "show", "pref", "1110"];
        let show = || pod.netns.output("ip", &[&[family][..], &rule].concat()).unwrap();
        assert_ne!(show(), "", "there is no rule");
        pod.netns.output("ip", &[family, "rule", "del", "pref", "1110"]).unwrap();
        poll::until(poll::SOON, "the rule", || (!show().is_empty()).then_some(()));
    }
}

#[test]
fn drift_is_put_back_once_and_by_the_newer_one() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = mesh(&topology, &PATIENT);
    let a1 = &topology.a1;
    let elder = succeed(&mut mesh.a);
    let hooks = || {
        [TcAttachType::Ingress, TcAttachType::Egress]
            .map(|hook| inspect::links(&a1.netns, "eth0", hook).unwrap())
    };
    let before = hooks();
    tear_rules_down(a1);
    // Whoever looks at all sees this within 5 s, and with it whatever else is not as it has made it.
    let setting = "ipv4/tcp_fwmark_accept";
    a1.netns.set_sysctl(setting, "0").unwrap();
    let counted = |kind| {
        let metrics = mesh.a.metrics().unwrap();
        metrics.sum("culvert_steering_repairs_total", &[("kind", kind)])
    };
    poll::until(Duration::from_secs(12), "both repairs to be counted", || {
        (counted("rule") > 1.5 && counted("sysctl") > 0.5).then_some(())
    });
    let repairs = |what: &str| mesh.a.log().lines().filter(|line| line.contains(what)).count();
    assert_eq!(
        (repairs("rule of mark"), repairs(setting)),
        (2, 1),
        "the elder has had a hand in it"
    );
    assert_eq!(hooks(), before);
    end(elder);
}
