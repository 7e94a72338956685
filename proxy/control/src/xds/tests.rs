//! The client against a scripted control plane: real TLS and gRPC on loopback.

use std::sync::{Arc, Mutex};

use culvert_mesh::{Origin, Snapshot};
use culvert_proto::ADDRESS_TYPE;
use culvert_proto::istio::workload::{
    GatewayAddress, NamespacedHostname, Service, Workload, gateway_address,
};
use prometheus_client::encoding::text::encode;
use tokio::task::JoinSet;

use super::*;
use crate::server::{Roots, Token};
use crate::testing::{
    self, PATIENCE, Pki, Streams, TestServer, addresses, ads, of_service, of_workload, policies,
    policy, resource, response, workload,
};

/// The largest message in these tests.
const LARGEST: usize = 1 << 20;

#[derive(Clone, Default)]
struct Mesh(Arc<Mutex<(Snapshot, usize)>>);

impl Sink for Mesh {
    async fn apply<U>(&mut self, mut updates: U) -> Option<U>
    where
        U: Iterator<Item = Update> + Send + 'static,
    {
        let (mesh, batches) = &mut *self.0.lock().unwrap();
        *mesh = mesh.apply(Origin::ControlPlane, &mut updates);
        *batches += 1;
        Some(updates)
    }
}

impl Mesh {
    fn uids(&self) -> Vec<String> {
        self.0.lock().unwrap().0.workloads().map(|workload| workload.uid.to_string()).collect()
    }

    fn policies(&self) -> Vec<String> {
        self.0.lock().unwrap().0.policies().map(|policy| policy.key.to_string()).collect()
    }
}

/// A control plane, its client, and what that has made of it.
struct World {
    pki: Pki,
    server: Option<TestServer>,
    streams: Streams,
    mesh: Mesh,
    registry: Registry,
    synced: watch::Receiver<bool>,
    on_demand: Option<OnDemand>,
    folder: tempfile::TempDir,
    _client: JoinSet<()>,
}

impl World {
    async fn new(mode: Mode) -> Self {
        let pki = Pki::new();
        let (service, streams) = ads();
        let server =
            TestServer::start(([127, 0, 0, 1], 0).into(), pki.server("localhost"), service).await;
        let folder = tempfile::tempdir().unwrap();
        let (root, token) = (folder.path().join("root.pem"), folder.path().join("token"));
        std::fs::write(&root, pki.root_pem()).unwrap();
        std::fs::write(&token, "first\n").unwrap();
        let to = testing::server(server.address, Roots::File(root), Some(Token::File(token)));
        let mut registry = Registry::default();
        let mut client = Client::new(to, NodeIdentity::default(), mode, &mut registry);
        client.largest = LARGEST;
        let (synced, on_demand, mesh) = (client.synced(), client.on_demand(), Mesh::default());
        let mut tasks = JoinSet::new();
        tasks.spawn(client.run(mesh.clone()));
        Self {
            pki,
            server: Some(server),
            streams,
            mesh,
            registry,
            synced,
            on_demand,
            folder,
            _client: tasks,
        }
    }

    /// The control plane comes back where it was.
    async fn restart(&mut self) {
        let address = self.server.take().unwrap().kill().await;
        let (service, streams) = ads();
        let tls = self.pki.server("localhost");
        self.server = Some(TestServer::start(address, tls, service).await);
        self.streams = streams;
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.folder.path().join(file), text).unwrap();
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        text
    }
}

#[tokio::test]
async fn the_state_follows_what_the_control_plane_says() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, hello) = world.streams.next().await;
    for first in &hello {
        assert!(first.resource_names_subscribe.is_empty(), "the wildcard is implied");
        assert!(first.node.as_ref().is_some_and(|node| node.id.starts_with("ztunnel~")));
        assert!(first.initial_resource_versions.is_empty());
    }
    assert_eq!(stream.metadata.get("authorization").unwrap(), "Bearer first");
    assert_eq!(stream.metadata.get("clusterid").unwrap(), "c1");

    let both = [workload("a", [10, 0, 0, 1]), workload("b", [10, 0, 0, 2])];
    stream.accepted(addresses(both, &[])).await;
    assert_eq!(world.mesh.uids(), ["a", "b"]);
    assert!(!*world.synced.borrow(), "policies are still awaited");
    stream.accepted(policies([policy("p")], &[])).await;
    assert_eq!(world.mesh.policies(), ["ns/p"]);
    timeout(PATIENCE, world.synced.wait_for(|synced| *synced)).await.unwrap().unwrap();

    stream.accepted(addresses([workload("c", [10, 0, 0, 3])], &["a", "never/was"])).await;
    stream.accepted(policies([], &["ns/p"])).await;
    assert_eq!(world.mesh.uids(), ["b", "c"]);
    assert!(world.mesh.policies().is_empty());
    assert_eq!(world.mesh.0.lock().unwrap().1, 4, "each response is applied at once");
    let metrics = world.metrics();
    let url = format!("istio_xds_message_total{{url=\"{ADDRESS_TYPE}\"}} 2");
    assert!(metrics.contains(&url), "{metrics}");
    assert!(metrics.contains("culvert_xds_state_age_seconds 0"), "{metrics}");
}

#[tokio::test]
async fn what_is_good_of_a_response_is_applied_and_the_rest_is_named() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    stream.accepted(addresses([workload("kept", [10, 0, 0, 1])], &[])).await;
    let bad = resource("kept", ADDRESS_TYPE, vec![0xff; 9]);
    let nameless = of_workload(Workload { uid: "nameless".into(), ..Workload::default() });
    let good = workload("good", [10, 0, 0, 2]);
    let answer = stream.tell(addresses([bad, good, nameless], &[])).await;
    let detail = answer.error_detail.unwrap();
    assert_eq!(detail.code, 0);
    let told: Vec<_> = detail.message.split("; ").collect();
    assert_eq!(told.len(), 2, "{}", detail.message);
    assert!(told[0].starts_with("kept: content is malformed: "), "{}", told[0]);
    assert_eq!(told[1], "nameless: identity is impossible: identity has an empty namespace");
    assert_eq!(world.mesh.uids(), ["good", "kept"], "a good version outlives a bad one");
    stream.end(Status::unknown("over")).await;

    let (mut stream, [hello, _]) = world.streams.next().await;
    let mut held: Vec<_> = hello.initial_resource_versions.into_keys().collect();
    held.sort();
    assert_eq!(held, ["good", "kept"]);
    stream.accepted(policies([], &[])).await;
    stream.accepted(addresses([], &["kept"])).await;
    assert_eq!(world.mesh.uids(), ["good"], "what went meanwhile is gone");
}

#[tokio::test]
async fn a_first_state_with_a_bad_resource_does_not_make_ready() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    stream.accepted(policies([], &[])).await;
    let bad = resource("bad", ADDRESS_TYPE, vec![0xff]);
    assert!(stream.tell(addresses([bad], &[])).await.error_detail.is_some());
    assert!(!*world.synced.borrow());
    stream.accepted(addresses([], &[])).await;
    timeout(PATIENCE, world.synced.wait_for(|synced| *synced)).await.unwrap().unwrap();
}

#[tokio::test]
async fn types_that_were_not_asked_for_are_refused() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    let answer =
        stream.tell(response("type.googleapis.com/x.Y", [workload("a", [10, 0, 0, 1])], &[])).await;
    assert_eq!(
        answer.error_detail.unwrap().message,
        "type.googleapis.com/x.Y: type is not subscribed to"
    );
    assert!(world.mesh.uids().is_empty());
    assert!(world.metrics().contains("istio_xds_message_total{url=\"other\"} 1"));
}

#[tokio::test]
async fn a_control_plane_that_was_killed_is_told_what_is_held() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    stream
        .accepted(addresses([workload("a", [10, 0, 0, 1]), workload("b", [10, 0, 0, 2])], &[]))
        .await;
    stream.accepted(policies([policy("p")], &[])).await;
    drop(stream);
    world.restart().await;
    let (mut stream, [of_addresses, of_policies]) = world.streams.next().await;
    assert_eq!(world.mesh.uids(), ["a", "b"], "the state outlives its control plane");
    let mut held: Vec<_> = of_addresses.initial_resource_versions.into_iter().collect();
    held.sort();
    assert_eq!(held, [("a".into(), "1".into()), ("b".into(), "1".into())]);
    assert_eq!(of_policies.initial_resource_versions.len(), 1);
    stream.accepted(addresses([workload("c", [10, 0, 0, 3])], &["a"])).await;
    assert_eq!(world.mesh.uids(), ["b", "c"]);
    let metrics = world.metrics();
    assert!(
        metrics.contains("istio_xds_connection_terminations_total{reason=\"Reconnect\"} 1"),
        "{metrics}"
    );
}

#[tokio::test]
async fn tokens_and_roots_are_read_again_for_each_stream() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    stream.accepted(policies([], &[])).await;
    world.write("token", "second");
    world.pki = Pki::new();
    world.write("root.pem", &world.pki.root_pem());
    let server = world.server.as_ref().unwrap();
    server.tls.store(world.pki.server("localhost"));
    stream.end(Status::unknown("over")).await;
    let (stream, _) = world.streams.next().await;
    assert_eq!(stream.metadata.get("authorization").unwrap(), "Bearer second");
}

#[tokio::test]
async fn a_server_that_another_root_proves_is_not_told_the_token() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    stream.accepted(policies([], &[])).await;
    let server = world.server.as_ref().unwrap();
    server.tls.store(Pki::new().server("localhost"));
    let before = server.accepted();
    stream.end(Status::unknown("over")).await;
    timeout(PATIENCE, async {
        while !world.metrics().contains("reason=\"ConnectionError\"} 2") {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    let server = world.server.as_ref().unwrap();
    assert!(server.accepted() > before);
    server.tls.store(world.pki.server("localhost"));
    world.streams.next().await;
}

#[tokio::test]
async fn hostile_responses_cost_a_stream_or_a_refusal_and_nothing_else() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    stream.accepted(addresses([workload("a", [10, 0, 0, 1])], &[])).await;
    // One that is only a long name, ones without number, and one that is everything at once.
    let long = workload(&"x".repeat(5000), [10, 0, 0, 1]);
    let answer = stream.tell(addresses([long], &["", "/", "//"])).await;
    assert!(answer.error_detail.unwrap().message.ends_with("name is too long"));
    let many = (0..1000).map(|i| resource(&format!("bad{i}"), ADDRESS_TYPE, vec![0xff]));
    let answer = stream.tell(addresses(many, &[])).await;
    assert!(answer.error_detail.unwrap().message.ends_with("; and 936 more"));
    for round in 0..200 {
        stream
            .accepted(addresses([workload(&format!("w{}", round % 7), [10, 0, 0, 3])], &[]))
            .await;
    }
    assert_eq!(world.mesh.uids().len(), 8);
    // Larger than any message may be: the stream ends, and the state stays.
    let giant = resource("giant", ADDRESS_TYPE, vec![0; LARGEST]);
    stream.send(addresses([giant], &[])).await;
    let (_stream, [hello, _]) = world.streams.next().await;
    assert_eq!(hello.initial_resource_versions.len(), 8);
    assert!(world.metrics().contains("reason=\"Error\"} 1"), "{}", world.metrics());
}

#[tokio::test]
async fn records_that_name_each_other_in_a_circle_are_taken_in() {
    let mut world = World::new(Mode::Whole).await;
    let (mut stream, _) = world.streams.next().await;
    let circle = |host: &str, next: &str| {
        let name = NamespacedHostname { namespace: "ns".into(), hostname: next.into() };
        of_service(Service {
            namespace: "ns".into(),
            hostname: host.into(),
            waypoint: Some(GatewayAddress {
                destination: Some(gateway_address::Destination::Hostname(name)),
                hbone_mtls_port: 15008,
            }),
            ..Service::default()
        })
    };
    stream.accepted(addresses([circle("a", "b"), circle("b", "a"), circle("c", "c")], &[])).await;
    assert_eq!(world.mesh.0.lock().unwrap().0.services().len(), 3);
}

#[tokio::test]
async fn records_are_asked_for_on_demand_and_kept() {
    let mut world = World::new(Mode::OnDemand).await;
    let on_demand = world.on_demand.clone().unwrap();
    let (mut stream, [hello, of_policies]) = world.streams.next().await;
    assert_eq!(hello.resource_names_subscribe, ["*"]);
    assert_eq!(hello.resource_names_unsubscribe, ["*"], "both at once subscribe to nothing");
    assert!(of_policies.resource_names_subscribe.is_empty(), "policies are never on demand");
    stream.accepted(policies([], &[])).await;
    timeout(PATIENCE, world.synced.wait_for(|synced| *synced)).await.unwrap().unwrap();

    let key = Key::address(&"".into(), [10, 0, 0, 1].into());
    let answer = async {
        let asked = stream.request().await;
        assert_eq!(asked.resource_names_subscribe, ["/10.0.0.1"]);
        assert_eq!(asked.response_nonce, "");
        let mut found = workload("a", [10, 0, 0, 1]);
        found.aliases = vec!["/10.0.0.1".to_owned()];
        stream.accepted(addresses([found], &[])).await;
    };
    let (fetched, other, ()) = tokio::join!(on_demand.fetch(&key), on_demand.fetch(&key), answer);
    assert_eq!((fetched, other), (Ok(()), Ok(())), "one question is answered to all who wait");
    assert_eq!(world.mesh.uids(), ["a"]);

    let absent = Key::Service(culvert_mesh::workload::ServiceName {
        namespace: "ns".into(),
        hostname: "h".into(),
    });
    let answer = async {
        assert_eq!(stream.request().await.resource_names_subscribe, ["ns/h"]);
        stream.accepted(addresses([], &["ns/h"])).await;
    };
    let (fetched, ()) = tokio::join!(on_demand.fetch(&absent), answer);
    assert_eq!(fetched, Ok(()));

    // Without a control plane, what was asked for before is answered from what is known.
    drop(stream);
    world.server.take().unwrap().kill().await;
    assert_eq!(on_demand.fetch(&key).await, Ok(()));
    assert_eq!(on_demand.fetch(&absent).await, Ok(()));
    assert_eq!(world.mesh.uids(), ["a"]);
}

#[tokio::test]
async fn a_new_stream_asks_again_for_what_is_wanted_on_demand() {
    let mut world = World::new(Mode::OnDemand).await;
    let on_demand = world.on_demand.clone().unwrap();
    let (mut stream, _) = world.streams.next().await;
    stream.accepted(policies([], &[])).await;
    let key = Key::Workload("a".into());
    let server = async {
        assert_eq!(stream.request().await.resource_names_subscribe, ["a"]);
        // It dies before it answers.
        drop(stream);
        world.restart().await;
        let (mut stream, [hello, _]) = world.streams.next().await;
        assert_eq!(hello.resource_names_subscribe, ["*", "a"]);
        assert_eq!(hello.resource_names_unsubscribe, ["*"]);
        stream.accepted(addresses([workload("a", [10, 0, 0, 1])], &[])).await;
        stream
    };
    let (fetched, _stream) = tokio::join!(on_demand.fetch(&key), server);
    assert_eq!(fetched, Ok(()));
    assert_eq!(world.mesh.uids(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_not_there_is_tried_ever_more_rarely() {
    let pki = Pki::new();
    // Bound, but nobody listens: a connect is refused at once.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let to = testing::server(socket.local_addr().unwrap(), Roots::Pem(pki.root_pem()), None);
    let mut registry = Registry::default();
    let client = Client::new(to, NodeIdentity::default(), Mode::Whole, &mut registry);
    let hour = timeout(Duration::from_hours(1), Box::pin(client.run(Mesh::default()))).await;
    assert!(hour.is_err());
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let count: u32 = text
        .lines()
        .find_map(|line| {
            line.strip_prefix(
                "istio_xds_connection_terminations_total{reason=\"ConnectionError\"} ",
            )
        })
        .unwrap()
        .parse()
        .unwrap();
    // Between 7.5 s and 15 s apart, after the first eleven.
    assert!((240..=500).contains(&count), "{count}");
    assert!(text.contains("culvert_xds_state_age_seconds 3600"), "{text}");
}
