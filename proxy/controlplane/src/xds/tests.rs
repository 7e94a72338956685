//! Clients, scripted.

use std::collections::HashMap;

use culvert_proto::google::rpc;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use prometheus_client::{encoding::text, registry::Registry};

use super::*;
use crate::{callers::CallerOptions, placements::Placements, translate::Update};

/// A server with a client.
struct Scene {
    store: Arc<Store>,
    discovery: Discovery,
    registry: Registry,
}

type Requests = UnboundedReceiver<Result<DeltaDiscoveryRequest, Status>>;

struct Script {
    client: Client<Requests>,
    requests: UnboundedSender<Result<DeltaDiscoveryRequest, Status>>,
}

impl Scene {
    fn new() -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let store = Arc::new(Store::new());
        let placements = Arc::new(Placements::default());
        let callers = Arc::new(Callers::new(&CallerOptions::default(), placements).unwrap());
        let draining = CancellationToken::new();
        let discovery = Discovery::new(Arc::clone(&store), callers, metrics, draining);
        Self { store, discovery, registry }
    }

    fn client(&self, node: Option<&str>) -> Script {
        let (requests, receiver) = unbounded();
        Script { client: self.discovery.stream(receiver, node.map(str::to_owned)), requests }
    }

    fn set(&self, resources: &[(&str, &str)]) {
        let changed = resources.iter().map(|(name, version)| resource(name, version)).collect();
        self.store.apply(Update { changed, removed: Vec::new() });
    }

    fn remove(&self, names: &[&str]) {
        let removed = names.iter().map(|name| (kind(name), (*name).into())).collect();
        self.store.apply(Update { changed: Vec::new(), removed });
    }

    fn metric(&self, line: &str) -> bool {
        let mut text = String::new();
        text::encode(&mut text, &self.registry).unwrap();
        text.lines().any(|found| found == line)
    }
}

/// Names that start with `p/` are policies'.
fn kind(name: &str) -> Type {
    if name.starts_with("p/") { Type::Authorization } else { Type::Address }
}

/// `w/...` are workloads of node n1 and endpoints of `s/web`, with an address of their own.
fn resource(name: &str, version: &str) -> Arc<Resource> {
    let is_workload = name.starts_with("w/");
    Arc::new(Resource {
        kind: kind(name),
        name: name.into(),
        version: version.into(),
        body: name.as_bytes().to_vec().into(),
        aliases: vec![format!("net/{name}").into()],
        node: if is_workload { "n1" } else { "" }.into(),
        services: if is_workload { vec!["s/web".into()] } else { Vec::new() },
    })
}

impl Script {
    fn send(&self, request: DeltaDiscoveryRequest) {
        self.requests.unbounded_send(Ok(request)).unwrap();
    }

    fn subscribe(&self, kind: Type, held: &[(&str, &str)]) {
        let held = held.iter().map(|(name, version)| ((*name).to_owned(), (*version).to_owned()));
        self.send(DeltaDiscoveryRequest {
            type_url: kind.url().to_owned(),
            initial_resource_versions: held.collect(),
            ..DeltaDiscoveryRequest::default()
        });
    }

    /// Subscribes to addresses by name alone.
    fn subscribe_to(&self, names: &[&str], unsubscribe: &[&str], held: &[&str]) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        self.send(DeltaDiscoveryRequest {
            type_url: Type::Address.url().to_owned(),
            resource_names_subscribe: owned(names),
            resource_names_unsubscribe: owned(unsubscribe),
            initial_resource_versions: held
                .iter()
                .map(|name| ((*name).to_owned(), String::new()))
                .collect::<HashMap<_, _>>(),
            ..DeltaDiscoveryRequest::default()
        });
    }

    fn answer(&self, response: &DeltaDiscoveryResponse, error: Option<&str>) {
        self.send(DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce.clone(),
            error_detail: error.map(|message| rpc::Status {
                message: message.to_owned(),
                ..rpc::Status::default()
            }),
            ..DeltaDiscoveryRequest::default()
        });
    }

    async fn next(&mut self) -> DeltaDiscoveryResponse {
        self.client.next().await.unwrap().unwrap()
    }

    /// The next response, acknowledged: the names of its resources, sorted, and of those that are gone, with a `-`.
    async fn told(&mut self) -> Vec<String> {
        let response = self.next().await;
        self.answer(&response, None);
        names(&response)
    }

    /// That there is nothing to tell.
    async fn is_quiet(&mut self) -> bool {
        let next = tokio::time::timeout(Duration::from_secs(1), self.client.next());
        next.await.is_err()
    }
}

fn names(response: &DeltaDiscoveryResponse) -> Vec<String> {
    let mut names: Vec<_> = response.resources.iter().map(|r| r.name.clone()).collect();
    names.sort();
    names.extend(response.removed_resources.iter().map(|name| format!("-{name}")));
    names
}

#[tokio::test(start_paused = true)]
async fn a_new_client_is_told_everything_in_one_response() {
    let scene = Scene::new();
    scene.set(&[("w/a", "1"), ("s/web", "1"), ("p/x", "1")]);
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    let response = client.next().await;
    assert_eq!(names(&response), ["s/web", "w/a"]);
    let workload = response.resources.iter().find(|r| r.name == "w/a").unwrap();
    assert_eq!(
        (workload.version.as_str(), &workload.aliases[..]),
        ("1", &["net/w/a".to_owned()][..])
    );
    let any = workload.resource.as_ref().unwrap();
    assert_eq!((any.type_url.as_str(), &any.value[..]), (Type::Address.url(), b"w/a".as_slice()));
    client.answer(&response, None);
    client.subscribe(Type::Authorization, &[]);
    assert_eq!(client.told().await, ["p/x"]);
    assert!(client.is_quiet().await);
}

#[tokio::test(start_paused = true)]
async fn a_mesh_of_nothing_is_an_answer_too() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    client.subscribe(Type::Authorization, &[]);
    assert!(client.told().await.is_empty());
    assert!(client.told().await.is_empty());
    assert!(client.is_quiet().await);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_comes_back_is_told_the_difference() {
    let scene = Scene::new();
    scene.set(&[("w/a", "1"), ("w/b", "2"), ("w/c", "1")]);
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[("w/a", "1"), ("w/b", "1"), ("w/gone", "1")]);
    assert_eq!(client.told().await, ["w/b", "w/c", "-w/gone"]);
}

#[tokio::test(start_paused = true)]
async fn what_changes_while_a_response_is_on_its_way_is_in_the_next() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    let first = client.next().await;
    scene.set(&[("w/a", "1")]);
    scene.set(&[("w/a", "2"), ("w/b", "1")]);
    scene.remove(&["w/b"]);
    assert!(client.is_quiet().await, "the first is not answered");
    client.answer(&first, None);
    let second = client.next().await;
    assert_eq!(names(&second), ["w/a", "-w/b"]);
    assert_eq!(second.resources[0].version, "2");
    assert_ne!(first.nonce, second.nonce);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_counted_and_not_argued_with() {
    let scene = Scene::new();
    scene.set(&[("w/a", "1")]);
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    let response = client.next().await;
    client.answer(&response, Some("w/a: bad"));
    assert!(client.is_quiet().await);
    assert!(scene.metric("pilot_total_xds_rejects{type=\"wds\"} 1"));
    scene.set(&[("w/b", "1")]);
    assert_eq!(client.told().await, ["w/b"], "what is new is told");
    assert!(scene.metric("pilot_xds_pushes{type=\"wds\"} 2"));
    assert!(scene.metric("pilot_xds 1"));
    drop(client);
    assert!(scene.metric("pilot_xds 0"));
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_an_older_response_is_none_to_the_last() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    let first = client.next().await;
    client.answer(&first, None);
    scene.set(&[("w/a", "1")]);
    client.next().await;
    scene.set(&[("w/b", "1")]);
    client.answer(&first, Some("late"));
    assert!(client.is_quiet().await);
    assert!(scene.metric("pilot_total_xds_rejects{type=\"wds\"} 0"));
}

#[tokio::test(start_paused = true)]
async fn policies_come_before_workloads_and_go_after_them() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    client.subscribe(Type::Authorization, &[]);
    client.told().await;
    client.told().await;
    client.is_quiet().await;
    scene.set(&[("w/a", "1"), ("p/x", "1")]);
    assert_eq!([client.told().await, client.told().await], [["p/x"], ["w/a"]]);
    client.is_quiet().await;
    let update = Update {
        changed: vec![resource("w/a", "2")],
        removed: vec![(Type::Authorization, "p/x".into())],
    };
    scene.store.apply(update);
    let workload = client.next().await;
    assert_eq!(names(&workload), ["w/a"]);
    assert!(client.is_quiet().await, "the workload may still name the policy");
    client.answer(&workload, None);
    assert_eq!(client.told().await, ["-p/x"]);
    assert!(client.is_quiet().await);
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_is_back_in_time_was_never_gone() {
    let scene = Scene::new();
    scene.set(&[("p/x", "1")]);
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    client.subscribe(Type::Authorization, &[]);
    client.told().await;
    client.told().await;
    client.is_quiet().await;
    scene.store.apply(Update {
        changed: vec![resource("w/a", "1")],
        removed: vec![(Type::Authorization, "p/x".into())],
    });
    let workload = client.next().await;
    scene.set(&[("p/x", "2")]);
    client.answer(&workload, None);
    assert_eq!(client.told().await, ["p/x"]);
    assert!(client.is_quiet().await);
}

#[tokio::test(start_paused = true)]
async fn a_client_may_ask_for_what_it_needs() {
    let scene = Scene::new();
    scene.set(&[("w/a", "1"), ("w/b", "1"), ("s/web", "1"), ("s/other", "1")]);
    let mut client = scene.client(Some("n2"));
    client.subscribe_to(&["*"], &["*"], &[]);
    assert!(client.told().await.is_empty());
    client.subscribe_to(&["net/w/a"], &[], &[]);
    assert_eq!(client.told().await, ["s/web", "w/a"], "by address, with its service");
    client.subscribe_to(&["net/nobody"], &[], &[]);
    assert_eq!(client.told().await, ["-net/nobody"], "that there is nothing is an answer");
    assert!(client.is_quiet().await);
    scene.set(&[("s/other", "2"), ("w/a", "2")]);
    assert_eq!(client.told().await, ["w/a"], "only what it asked for");
    scene.set(&[("nobody", "1")]);
    assert_eq!(client.told().await, ["nobody"], "what it asked for before it was there");
    client.subscribe_to(&[], &["w/a", "net/w/a"], &[]);
    client.is_quiet().await;
    scene.remove(&["w/a"]);
    assert!(client.is_quiet().await, "it does not want it any more");
}

#[tokio::test(start_paused = true)]
async fn the_workloads_of_a_clients_node_are_told_unasked() {
    let scene = Scene::new();
    scene.set(&[("w/a", "1"), ("s/web", "1")]);
    let mut client = scene.client(Some("n1"));
    client.subscribe_to(&["*"], &["*"], &[]);
    assert_eq!(client.told().await, ["w/a"]);
    scene.set(&[("w/b", "1")]);
    assert_eq!(client.told().await, ["w/b"]);
    scene.remove(&["w/b"]);
    assert_eq!(client.told().await, ["-w/b"]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_comes_back_goes_on_asking_for_what_it_asked() {
    let scene = Scene::new();
    scene.set(&[("w/a", "1"), ("s/web", "1")]);
    let mut client = scene.client(Some("n2"));
    client.subscribe_to(&["*"], &["*"], &["net/w/a", "net/gone"]);
    assert_eq!(client.told().await, ["s/web", "w/a", "-net/gone"]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_answers_is_sent_away() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.subscribe(Type::Address, &[]);
    client.next().await;
    let status = client.client.next().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Aborted);
}

#[tokio::test(start_paused = true)]
async fn names_are_bounded() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.subscribe_to(&["x".repeat(2000).as_str()], &[], &[]);
    let status = client.client.next().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
}

#[tokio::test(start_paused = true)]
async fn other_types_are_not_served_and_disturb_nothing() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    client.send(DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
        ..DeltaDiscoveryRequest::default()
    });
    client.subscribe(Type::Address, &[]);
    assert!(client.told().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn streams_end_with_the_server() {
    let scene = Scene::new();
    let mut client = scene.client(None);
    scene.discovery.draining.cancel();
    let status = client.client.next().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
}
