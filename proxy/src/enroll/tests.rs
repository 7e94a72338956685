use std::{collections::VecDeque, path::Path, process::Command};

use culvert_agent::pods::Place;
use culvert_capture::{BpfLog, GuardHost, NodeOptions, ProbeCgroup, Settings, WhenDown};
use culvert_carry::Timeouts;
use culvert_dns::Zone;
use culvert_mesh::{PodRef, Snapshot};
use culvert_observe::{Connections, Dns, Observe};
use culvert_sys::caps::{Capability, Effective};
use culvert_tls::{Authority, Certificates};
use prometheus_client::registry::Registry;
use tokio::{runtime::Handle, sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{names::Names, pods::PodEvent, readiness::Readiness, state::State};

const MISSING: &str = "/run/netns/culvert-unit-missing";

/// A network namespace at a path, removed in the end.
struct Namespace(String);

impl Namespace {
    /// `None`, and a printed reason, where the machine does not allow it.
    fn new(test: &str) -> Option<Self> {
        let able = Effective::read().unwrap();
        if !able.has(Capability::NetAdmin) || !able.has(Capability::SysAdmin) {
            println!("skipped: network namespaces need root");
            return None;
        }
        let name = format!("enroll{}-{test}", std::process::id());
        assert!(Command::new("ip").args(["netns", "add", &name]).status().unwrap().success());
        Some(Self(name))
    }

    fn path(&self) -> String {
        format!("/run/netns/{}", self.0)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        assert!(Command::new("ip").args(["netns", "del", &self.0]).status().unwrap().success());
    }
}

/// Tells what it was given, then nothing more.
struct Script(VecDeque<PodEvent>);

impl PodSource for Script {
    async fn next(&mut self) -> PodEvent {
        match self.0.pop_front() {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    fn is_static(&self) -> bool {
        true
    }

    fn settled(&mut self, _uid: &str, _outcome: Result<(), &str>) {}
}

fn added(name: &str, service_account: &str, netns: &str) -> PodEvent {
    let pod = PodRef {
        name: name.into(),
        namespace: "shop".into(),
        service_account: service_account.into(),
    };
    PodEvent::Added(PodSpec {
        uid: name.into(),
        pod,
        netns: Place::Path(netns.into()),
        settings: Settings::default(),
    })
}

/// An enrolment that someone else steers for, so that nothing is loaded.
fn enrolment(dir: &Path) -> Enrolment {
    enrolment_that_drains(dir, Duration::ZERO)
}

fn enrolment_that_drains(dir: &Path, drain: Duration) -> Enrolment {
    let options = NodeOptions {
        cgroup_root: dir.to_owned(),
        own_cgroup: dir.to_owned(),
        when_down: WhenDown::Hold,
        probes: ProbeCgroup::Off,
        guard_host: GuardHost::Off,
        log: BpfLog::Off,
    };
    let mut registry = Registry::default();
    let context = NodeContext {
        home: Netns::current().unwrap(),
        state: State::new(Snapshot::default()),
        certificates: Arc::new(Certificates::new(Authority::create(dir, "unit").unwrap())),
        observe: Observe::register(&mut registry, "test"),
        connections: Connections::new(1),
        timeouts: Timeouts::default(),
        network: String::new(),
        cluster_id: String::new(),
        zone: Zone::default(),
        dns: Dns::register(&mut registry),
        names: Names::of_machine(),
        proxy_ports: &[],
    };
    let marks = Marks { proxy: None, delivery: None };
    let tasks = Tasks::new(Handle::current());
    let node = Arc::new(Node::start(&options, None).unwrap());
    let (elder_gone, commands) = (CancellationToken::new(), mpsc::channel(1).1);
    elder_gone.cancel();
    let succession = Succession::new(commands, elder_gone);
    Enrolment::new(node, Arc::new(context), marks, drain, tasks, succession)
}

/// Lets the enrolment follow `events`, and try again as often as it likes.
async fn follow(enrolment: &mut Enrolment, events: impl IntoIterator<Item = PodEvent>) {
    let mut script = Script(events.into_iter().collect());
    let readiness = Readiness::default();
    let starting = readiness.latch("pods");
    let following = enrolment.follow(&mut script, starting, || readiness.latch("pods"));
    timeout(RETRY * 3, following).await.unwrap_err();
}

fn carried(enrolment: &Enrolment) -> Vec<(&str, &str)> {
    let pods = enrolment.enrolled.values().map(|pod| &pod.proxy.context.pod);
    pods.map(|pod| (&*pod.name, &*pod.service_account)).collect()
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_was_corrected_is_not_tried_again_as_it_was() {
    let Some(netns) = Namespace::new("corrected") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut enrolment = enrolment(dir.path());
    follow(&mut enrolment, [added("a", "web", MISSING)]).await;
    assert!(enrolment.failed.contains_key("a"));
    follow(&mut enrolment, [added("a", "web", &netns.path())]).await;
    assert_eq!(carried(&enrolment), [("a", "web")]);
    assert!(enrolment.failed.is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_namespace_is_one_pods() {
    let Some(netns) = Namespace::new("shared") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut enrolment = enrolment(dir.path());
    let both = [added("a", "web", &netns.path()), added("b", "db", &netns.path())];
    follow(&mut enrolment, both).await;
    assert_eq!(carried(&enrolment), [("a", "web")]);
    // It is the other's once the first has left it.
    follow(&mut enrolment, [PodEvent::Removed("a".into())]).await;
    assert_eq!(carried(&enrolment), [("b", "db")]);
}

#[tokio::test(start_paused = true)]
async fn a_changed_pod_takes_the_place_of_the_one_before() {
    let Some(netns) = Namespace::new("changed") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut enrolment = enrolment(dir.path());
    follow(&mut enrolment, [added("a", "web", &netns.path())]).await;
    follow(&mut enrolment, [added("a", "db", &netns.path())]).await;
    assert_eq!(carried(&enrolment), [("a", "db")]);
    follow(&mut enrolment, [added("a", "db", MISSING)]).await;
    assert!(carried(&enrolment).is_empty());
}

/// A pod with a connection that does not end by itself, which leaves.
async fn leaving(enrolment: &mut Enrolment, name: &str, netns: &Namespace) {
    follow(enrolment, [added(name, "web", &netns.path())]).await;
    for pod in enrolment.enrolled.values() {
        pod.proxy.tasks.spawn(std::future::pending());
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_drains_keeps_no_other_waiting() {
    let (Some(one), Some(two)) = (Namespace::new("drains"), Namespace::new("waits")) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut enrolment = enrolment_that_drains(dir.path(), Duration::from_hours(1));
    leaving(&mut enrolment, "a", &one).await;
    let events = [PodEvent::Removed("a".into()), added("b", "db", &two.path())];
    follow(&mut enrolment, events).await;
    assert_eq!(carried(&enrolment), [("b", "db")]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_back_while_it_drains_is_captured_at_once() {
    let Some(netns) = Namespace::new("back") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut enrolment = enrolment_that_drains(dir.path(), Duration::from_hours(1));
    leaving(&mut enrolment, "a", &netns).await;
    follow(&mut enrolment, [PodEvent::Removed("a".into())]).await;
    assert!(carried(&enrolment).is_empty());
    follow(&mut enrolment, [added("b", "db", &netns.path())]).await;
    assert_eq!(carried(&enrolment), [("b", "db")]);
}
