//! Both ends over a real socket, and each against a peer that misbehaves.
#![expect(clippy::disallowed_methods, reason = "what a test spawns ends with it")]

use std::{
    fs::File,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use culvert_mesh::PodRef;
use culvert_proto::istio::workload::zds::{
    Ack, AddWorkload, KeepWorkload, SnapshotSent, WorkloadInfo, WorkloadRequest, WorkloadResponse,
    ZdsHello, workload_request::Payload, workload_response,
};
use culvert_sys::seqpacket;
use prost::Message as _;
use tempfile::TempDir;
use tokio::{net::UnixStream, task::JoinHandle, time::timeout};

use super::{
    AddError, BindError, Client, ClientError, Pod, Pods, Request, Server, WireError,
    wire::{Connection, short},
};

/// Longer than any deadline of the protocol.
const PATIENCE: Duration = Duration::from_secs(20);

struct Agent {
    pods: Pods,
    path: PathBuf,
    task: JoinHandle<()>,
    folder: TempDir,
}

impl Agent {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ztunnel.sock");
        let server = Server::bind(&path).unwrap();
        let pods = server.pods();
        Self { pods, path, task: tokio::spawn(server.run()), folder }
    }

    async fn proxy(&self) -> Proxy {
        Proxy { client: Client::connect(&self.path).await.unwrap() }
    }

    /// Adds a pod while something else answers for it.
    fn add(&self, uid: &str) -> JoinHandle<Result<(), AddError>> {
        let (pods, pod) = (self.pods.clone(), pod(uid));
        tokio::spawn(async move { pods.add(pod).await })
    }

    fn remove(&self, uid: &'static str) -> JoinHandle<()> {
        let pods = self.pods.clone();
        tokio::spawn(async move { pods.remove(uid).await })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Proxy {
    client: Client,
}

impl Proxy {
    /// The next request in short, answered.
    async fn told(&mut self) -> String {
        self.told_and(Ok(())).await
    }

    async fn told_and(&mut self, answer: Result<(), &str>) -> String {
        let request = timeout(PATIENCE, self.client.next()).await.unwrap().unwrap();
        self.client.answer(answer).await.unwrap();
        brief(&request)
    }

    /// Whether nothing is asked of it now.
    async fn is_left_alone(&mut self) -> bool {
        timeout(Duration::from_millis(300), self.client.next()).await.is_err()
    }
}

fn brief(request: &Request) -> String {
    match request {
        Request::Add { uid, pod, netns } => {
            let inode = File::from(netns.try_clone().unwrap()).metadata().unwrap().ino();
            assert_eq!(inode, own_netns().1, "it is the namespace that was sent");
            format!("add {uid} {}/{}", pod.namespace, pod.name)
        }
        Request::Keep { uid } => format!("keep {uid}"),
        Request::Remove { uid } => format!("remove {uid}"),
        Request::Snapshot => "snapshot".to_owned(),
    }
}

fn own_netns() -> (File, u64) {
    let file = File::open("/proc/self/ns/net").unwrap();
    let inode = file.metadata().unwrap().ino();
    (file, inode)
}

fn pod(uid: &str) -> Pod {
    let pod = PodRef { name: uid.into(), namespace: "shop".into(), service_account: "web".into() };
    Pod { uid: uid.into(), pod, netns: Some(Arc::new(OwnedFd::from(own_netns().0))) }
}

#[tokio::test]
async fn a_proxy_is_told_of_every_pod_and_then_of_changes() {
    let agent = Agent::start();
    let waiting = agent.add("a");
    let lost = Pod { netns: None, ..pod("lost") };
    let pods = agent.pods.clone();
    let kept = tokio::spawn(async move { pods.add(lost).await });
    tokio::task::yield_now().await;
    let mut proxy = agent.proxy().await;
    assert_eq!(proxy.told().await, "add a shop/a");
    assert_eq!(proxy.told().await, "keep lost");
    assert_eq!(proxy.told().await, "snapshot");
    waiting.await.unwrap().unwrap();
    kept.await.unwrap().unwrap();

    let adding = agent.add("b");
    assert_eq!(proxy.told().await, "add b shop/b");
    adding.await.unwrap().unwrap();
    let removing = agent.remove("a");
    assert_eq!(proxy.told().await, "remove a");
    removing.await.unwrap();
    assert!(proxy.is_left_alone().await);
}

#[tokio::test]
async fn additions_are_the_newest_proxys_and_removals_everybodys() {
    let agent = Agent::start();
    let mut old = agent.proxy().await;
    assert_eq!(old.told().await, "snapshot");
    let adding = agent.add("a");
    assert_eq!(old.told().await, "add a shop/a");
    adding.await.unwrap().unwrap();

    let mut new = agent.proxy().await;
    assert_eq!(new.told().await, "add a shop/a");
    assert_eq!(new.told().await, "snapshot");
    let adding = agent.add("b");
    assert_eq!(new.told().await, "add b shop/b");
    adding.await.unwrap().unwrap();
    assert!(old.is_left_alone().await);

    let removing = agent.remove("a");
    let (one, other) = tokio::join!(old.told(), new.told());
    assert_eq!((one.as_str(), other.as_str()), ("remove a", "remove a"));
    removing.await.unwrap();
}

#[tokio::test]
async fn when_the_newest_leaves_the_one_before_it_takes_over() {
    let agent = Agent::start();
    let mut old = agent.proxy().await;
    assert_eq!(old.told().await, "snapshot");
    let mut new = agent.proxy().await;
    assert_eq!(new.told().await, "snapshot");
    let adding = agent.add("a");
    // It is asked, and goes without an answer.
    timeout(PATIENCE, new.client.next()).await.unwrap().unwrap();
    drop(new);
    assert_eq!(old.told().await, "add a shop/a");
    adding.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_removal_waits_for_no_proxy_that_leaves() {
    let agent = Agent::start();
    let mut proxy = agent.proxy().await;
    assert_eq!(proxy.told().await, "snapshot");
    let adding = agent.add("a");
    assert_eq!(proxy.told().await, "add a shop/a");
    adding.await.unwrap().unwrap();
    let removing = agent.remove("a");
    timeout(PATIENCE, proxy.client.next()).await.unwrap().unwrap();
    drop(proxy);
    timeout(PATIENCE, removing).await.unwrap().unwrap();
    assert_eq!(agent.pods.proxies(), 0);
}

#[tokio::test]
async fn pods_that_come_and_go_without_a_proxy_are_told_to_the_next_one_as_they_are_then() {
    let agent = Agent::start();
    let adding: Vec<_> = ["a", "b", "c"].map(|uid| agent.add(uid)).into();
    tokio::task::yield_now().await;
    agent.pods.remove("b").await;
    let mut proxy = agent.proxy().await;
    assert_eq!(proxy.told().await, "add a shop/a");
    assert_eq!(proxy.told().await, "add c shop/c");
    assert_eq!(proxy.told().await, "snapshot");
    let mut outcomes = Vec::new();
    for adding in adding {
        outcomes.push(adding.await.unwrap().is_ok());
    }
    assert_eq!(outcomes, [true, false, true]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_a_proxy_refuses_is_offered_again() {
    let agent = Agent::start();
    let mut proxy = agent.proxy().await;
    assert_eq!(proxy.told().await, "snapshot");
    let adding = agent.add("a");
    assert_eq!(proxy.told_and(Err("port 15008 is taken")).await, "add a shop/a");
    let error = adding.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("port 15008 is taken"), "{error}");
    assert_eq!(proxy.told().await, "add a shop/a");
    agent.pods.enrolled("a").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_proxy_that_does_not_answer_is_given_up() {
    let agent = Agent::start();
    let mut mute = agent.proxy().await;
    // It reads, and says nothing until it is too late.
    timeout(PATIENCE, mute.client.next()).await.unwrap().unwrap();
    let error = timeout(PATIENCE, mute.client.next()).await.unwrap().unwrap_err();
    assert!(matches!(error, ClientError::Wire(WireError::Closed)), "{error}");
}

/// A raw connection to the agent.
fn raw(agent: &Agent) -> Connection {
    Connection::new(UnixStream::from_std(seqpacket::connect(&agent.path).unwrap()).unwrap())
}

#[track_caller]
fn closed(received: Result<(WorkloadRequest, Option<OwnedFd>), WireError>, what: &str) {
    assert!(matches!(received, Err(WireError::Closed)), "{what}: {received:?}");
}

#[tokio::test]
async fn proxies_that_break_the_protocol_are_disconnected() {
    let agent = Agent::start();
    let hello = ZdsHello { version: 1 };
    let ack = || {
        let payload = Some(workload_response::Payload::Ack(Ack::default()));
        WorkloadResponse { payload }
    };

    let other = raw(&agent);
    other.send(&ZdsHello { version: 7 }, None).await.unwrap();
    closed(other.receive().await, "another version");

    let gift = raw(&agent);
    gift.send(&hello, Some(own_netns().0.as_fd())).await.unwrap();
    closed(gift.receive().await, "a descriptor with hello");

    let empty = raw(&agent);
    empty.send(&hello, None).await.unwrap();
    empty.receive::<WorkloadRequest>().await.unwrap();
    empty.send(&WorkloadResponse { payload: None }, None).await.unwrap();
    closed(empty.receive().await, "an answer that says nothing");

    let eager = raw(&agent);
    eager.send(&hello, None).await.unwrap();
    eager.receive::<WorkloadRequest>().await.unwrap();
    eager.send(&ack(), None).await.unwrap();
    eager.send(&ack(), None).await.unwrap();
    closed(eager.receive().await, "an answer to nothing");

    // None of them is in the way of one that keeps to it.
    assert_eq!(agent.proxy().await.told().await, "snapshot");
}

#[tokio::test]
async fn many_proxies_that_never_say_hello_do_not_grow_without_bound() {
    let agent = Agent::start();
    let mute: Vec<_> = (0..12).map(|_| raw(&agent)).collect();
    let refused = mute.last().unwrap().receive::<WorkloadRequest>();
    closed(timeout(PATIENCE, refused).await.unwrap(), "one too many");
    assert_eq!(agent.pods.proxies(), 0);
}

#[tokio::test]
async fn an_agent_takes_the_place_of_one_that_is_gone_and_of_no_other() {
    let agent = Agent::start();
    let taken = Server::bind(&agent.path).unwrap_err();
    assert!(matches!(taken, BindError::Taken { .. }), "{taken}");
    let left = agent.folder.path().join("left.sock");
    drop(seqpacket::listen(&left).unwrap());
    assert!(left.symlink_metadata().unwrap().file_type().is_socket());
    let server = Server::bind(&left).unwrap();
    assert_eq!(left.metadata().unwrap().mode() & 0o777, 0o600);
    drop(server);
    assert!(!left.exists());
}

/// An agent that says what it is told to, to one proxy.
async fn scripted(payload: Option<Payload>, netns: bool) -> (Connection, Client, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ztunnel.sock");
    let listener = tokio::net::UnixListener::from_std(seqpacket::listen(&path).unwrap()).unwrap();
    let client = Client::connect(&path).await.unwrap();
    let agent = Connection::new(listener.accept().await.unwrap().0);
    let (hello, _) = agent.receive::<ZdsHello>().await.unwrap();
    assert_eq!(hello.version, 1);
    let (file, _) = own_netns();
    let netns = netns.then(|| file.as_fd());
    agent.send(&WorkloadRequest { payload }, netns).await.unwrap();
    (agent, client, folder)
}

#[tokio::test]
async fn agents_that_break_the_protocol_are_told_so() {
    let info = || Some(WorkloadInfo { name: "a".into(), ..WorkloadInfo::default() });
    let uid = || "u".to_owned();
    let add = |workload_info| Payload::Add(AddWorkload { uid: uid(), workload_info });
    let nameless = Payload::Add(AddWorkload { uid: String::new(), workload_info: info() });
    for (payload, netns, want) in [
        (Some(add(info())), false, "without its network namespace"),
        (Some(add(None)), true, "without its name"),
        (Some(nameless), true, "named no pod"),
        (Some(Payload::Keep(KeepWorkload { uid: uid() })), true, "takes none"),
        (Some(Payload::Keep(KeepWorkload::default())), false, "named no pod"),
    ] {
        let (agent, mut client, _folder) = scripted(payload, netns).await;
        let error = client.next().await.unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
        let (response, _) = agent.receive::<WorkloadResponse>().await.unwrap();
        let Some(workload_response::Payload::Ack(ack)) = response.payload else {
            panic!("{want}: no answer")
        };
        assert_eq!(ack.error, error);
    }
}

#[tokio::test]
async fn what_belongs_into_a_snapshot_is_refused_after_it() {
    for late in [
        Payload::SnapshotSent(SnapshotSent {}),
        Payload::Keep(KeepWorkload { uid: "u".to_owned() }),
    ] {
        let (agent, mut client, _folder) =
            scripted(Some(Payload::SnapshotSent(SnapshotSent {})), false).await;
        assert_eq!(brief(&client.next().await.unwrap()), "snapshot");
        client.answer(Ok(())).await.unwrap();
        agent.send(&WorkloadRequest { payload: Some(late) }, None).await.unwrap();
        let error = client.next().await.unwrap_err();
        assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    }
}

#[test]
fn reasons_are_cut_between_characters() {
    let long = "ä".repeat(1000);
    assert_eq!(short(&long), "ä".repeat(256));
    assert_eq!(short("short"), "short");
}

#[test]
fn bytes_that_are_no_message_are_errors_and_nothing_worse() {
    let request = WorkloadRequest {
        payload: Some(Payload::Add(AddWorkload {
            uid: "4e5d".into(),
            workload_info: Some(WorkloadInfo {
                name: "web-0".into(),
                namespace: "shop".into(),
                service_account: "web".into(),
            }),
        })),
    };
    let good = request.encode_to_vec();
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed & 0xffff_ffff).unwrap()
    };
    let mut refused = 0;
    for _ in 0..100_000 {
        let mut bytes = good.clone();
        for _ in 0..=random() % 3 {
            let place = random() % bytes.len();
            bytes[place] = u8::try_from(random() % 256).unwrap();
        }
        bytes.truncate(random() % (bytes.len() + 1));
        refused += usize::from(WorkloadRequest::decode(&*bytes).is_err());
    }
    assert!(refused > 10_000, "only {refused} were refused");
}
