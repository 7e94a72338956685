//! The whole: a server on loopback, spoken to over TLS as a node speaks.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    task::{Context, Poll},
};

use culvert_proto::{
    envoy::service::discovery::v3::{
        DeltaDiscoveryRequest, DeltaDiscoveryResponse,
        aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
    },
    istio::v1::auth::{
        IstioCertificateRequest, istio_certificate_service_client::IstioCertificateServiceClient,
    },
};
use culvert_test_cluster::ApiServer;
use futures::{FutureExt as _, channel::mpsc, future::BoxFuture};
use http::{Request, Response, Uri};
use hyper::{body::Incoming, client::conn::http2::SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use serde_json::json;
use tokio::{net::TcpSocket, task::JoinSet};
use tokio_rustls::TlsConnector;
use tonic::{Code, Status, body::Body};

use super::*;
use crate::resource::Type;

/// A server, its files, and the tasks of it and of its clients.
struct Scene {
    dir: tempfile::TempDir,
    address: SocketAddr,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

/// A connection that adds what a gRPC request needs beside its path.
#[derive(Clone)]
struct Channel {
    send: SendRequest<Body>,
    token: &'static str,
}

impl tonic::codegen::Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.send.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if !self.token.is_empty() {
            request.headers_mut().insert("authorization", self.token.parse().unwrap());
        }
        self.send.send_request(request).boxed()
    }
}

const TOKEN: &str = "Bearer a-token-of-node-one";
const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop}\nspec: {nodeName: n1, serviceAccountName: web}\nstatus: {podIP: 10.0.0.1}\n";

impl Scene {
    async fn new(mesh: &str) -> Self {
        Self::serving(|dir| {
            fs::write(dir.join("mesh/a.yaml"), mesh).unwrap();
            options(dir)
        })
        .await
    }

    async fn serving(options: impl FnOnce(&std::path::Path) -> Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mesh")).unwrap();
        let tokens = dir.path().join("tokens.yaml");
        fs::write(&tokens, "n1: a-token-of-node-one\n").unwrap();
        fs::set_permissions(&tokens, fs::Permissions::from_mode(0o600)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let control_plane =
            ControlPlane::open(options(dir.path()), &mut Registry::default()).await.unwrap();
        let (mut tasks, stop) = (JoinSet::new(), CancellationToken::new());
        let stopped = stop.clone();
        tasks.spawn(async move {
            Box::pin(control_plane.run(listener, stopped.cancelled())).await;
        });
        Self { dir, address, stop, tasks }
    }

    async fn connect(&mut self, token: &'static str) -> Channel {
        let roots = fs::read(self.dir.path().join("ca/ca.pem")).unwrap();
        let mut store = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(&roots) {
            store.add(root.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(store)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let tcp = TcpSocket::new_v4().unwrap().connect(self.address).await.unwrap();
        let name = "localhost".try_into().unwrap();
        let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        let handshake =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls));
        let (send, connection) = Box::pin(handshake).await.unwrap();
        self.tasks.spawn(async move { drop(connection.await) });
        Channel { send, token }
    }

    fn replace(&self, text: &str) {
        let fresh = self.dir.path().join("fresh");
        fs::write(&fresh, text).unwrap();
        fs::rename(&fresh, self.dir.path().join("mesh/a.yaml")).unwrap();
    }
}

fn options(dir: &std::path::Path) -> Options {
    Options {
        source: Source::Files(dir.join("mesh")),
        mesh: MeshConfig::default(),
        ca_dir: dir.join("ca"),
        names: vec!["localhost".to_owned()],
        callers: CallerOptions {
            node_tokens: Some(dir.join("tokens.yaml")),
            ..CallerOptions::default()
        },
        node_roots: None,
        ttl: Duration::from_hours(24),
        drain: Duration::from_secs(5),
    }
}

fn origin() -> Uri {
    Uri::from_static("https://localhost")
}

/// A discovery stream.
struct Node {
    requests: mpsc::UnboundedSender<DeltaDiscoveryRequest>,
    responses: tonic::Streaming<DeltaDiscoveryResponse>,
}

impl Node {
    async fn open(channel: Channel) -> Result<Self, Status> {
        let (requests, receiver) = mpsc::unbounded();
        let subscribe = DeltaDiscoveryRequest {
            type_url: Type::Address.url().to_owned(),
            ..DeltaDiscoveryRequest::default()
        };
        requests.unbounded_send(subscribe).unwrap();
        let mut client = AggregatedDiscoveryServiceClient::with_origin(channel, origin());
        let responses = client.delta_aggregated_resources(receiver).await?.into_inner();
        Ok(Self { requests, responses })
    }

    async fn told(&mut self) -> Result<Vec<String>, Status> {
        let next = tokio::time::timeout(Duration::from_secs(30), self.responses.message());
        let response = next.await.expect("a response").map(Option::unwrap_or_default)?;
        let answer = DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce,
            ..DeltaDiscoveryRequest::default()
        };
        self.requests.unbounded_send(answer).unwrap();
        let names = response.resources.into_iter().map(|resource| resource.name);
        Ok(names.chain(response.removed_resources.iter().map(|name| format!("-{name}"))).collect())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_told_of_changes_of_files() {
    let mut scene = Scene::new(POD).await;
    let channel = scene.connect(TOKEN).await;
    let mut node = Node::open(channel).await.unwrap();
    assert_eq!(node.told().await.unwrap(), ["Kubernetes//Pod/shop/web"]);
    scene.replace(&POD.replace("name: web,", "name: cart,"));
    assert_eq!(
        node.told().await.unwrap(),
        ["Kubernetes//Pod/shop/cart", "-Kubernetes//Pod/shop/web"]
    );
    scene.stop.cancel();
    assert_eq!(node.told().await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_told_anything_who_does_not_prove_to_be_a_node() {
    let mut scene = Scene::new(POD).await;
    for token in ["", "Bearer another-long-token"] {
        let channel = scene.connect(token).await;
        let Err(status) = Node::open(channel).await else { panic!("{token:?} is told") };
        assert_eq!(status.code(), Code::Unauthenticated);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_for_what_runs_on_the_node() {
    let mut scene = Scene::new(POD).await;
    let channel = scene.connect(TOKEN).await;
    for (account, code) in [("web", Code::Ok), ("ledger", Code::PermissionDenied)] {
        assert_eq!(certificate(&channel, account).await, code, "{account}");
    }
}

/// What comes of asking for a certificate of an account of namespace `shop`.
async fn certificate(channel: &Channel, account: &str) -> Code {
    let mut client = IstioCertificateServiceClient::with_origin(channel.clone(), origin());
    let key = rcgen::KeyPair::generate().unwrap();
    let request = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    let identity = format!("spiffe://cluster.local/ns/shop/sa/{account}");
    let value = prost_types::Value { kind: Some(prost_types::value::Kind::StringValue(identity)) };
    let fields = [("ImpersonatedIdentity".to_owned(), value)].into();
    let answer = client
        .create_certificate(IstioCertificateRequest {
            csr: request.pem().unwrap(),
            validity_duration: 3600,
            metadata: Some(prost_types::Struct { fields }),
        })
        .await;
    answer.err().map_or(Code::Ok, |status| status.code())
}

#[tokio::test]
async fn a_mesh_whose_policies_cannot_be_understood_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("mesh")).unwrap();
    let text = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: p}\nspec: {acton: DENY}\n";
    fs::write(dir.path().join("mesh/a.yaml"), text).unwrap();
    let error =
        ControlPlane::open(options(dir.path()), &mut Registry::default()).await.err().unwrap();
    let text = error.to_string();
    assert!(text.contains("a.yaml:1: document 1: AuthorizationPolicy default/p: spec"), "{text}");
    assert!(!dir.path().join("ca").exists(), "nothing was made before that was known");
}

#[tokio::test]
async fn a_control_plane_that_knows_no_caller_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { callers: CallerOptions::default(), ..options(dir.path()) };
    let error = ControlPlane::open(options, &mut Registry::default()).await.err().unwrap();
    assert!(matches!(error, ControlPlaneError::NoCallers));
}

/// A control plane of a cluster's objects, with the files of `dir`.
fn of_cluster(dir: &std::path::Path, api: &ApiServer) -> Options {
    let url = format!("http://{}", api.address).parse().unwrap();
    let client = kube::Client::try_from(kube::Config::new(url)).unwrap();
    Options { source: Source::Kubernetes(client), ..options(dir) }
}

fn pod(name: &str) -> serde_json::Value {
    json!({"metadata": {"name": name, "namespace": "shop"}, "status": {"podIP": "10.0.0.1"},
        "spec": {"nodeName": "n1", "serviceAccountName": "web"}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_told_of_changes_in_a_cluster_and_gets_certificates_for_its_pods_there() {
    let api = ApiServer::start().await;
    api.put("pods", pod("web"));
    let mut scene = Scene::serving(|dir| of_cluster(dir, &api)).await;
    let channel = scene.connect(TOKEN).await;
    let mut node = Node::open(channel.clone()).await.unwrap();
    assert_eq!(node.told().await.unwrap(), ["Kubernetes//Pod/shop/web"]);
    assert_eq!(certificate(&channel, "web").await, Code::Ok);
    api.put("pods", pod("cart"));
    assert_eq!(node.told().await.unwrap(), ["Kubernetes//Pod/shop/cart"]);
    api.delete("pods", "shop/cart");
    assert_eq!(node.told().await.unwrap(), ["-Kubernetes//Pod/shop/cart"]);
    api.delete("pods", "shop/web");
    assert_eq!(node.told().await.unwrap(), ["-Kubernetes//Pod/shop/web"]);
    assert_eq!(certificate(&channel, "web").await, Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_of_the_root_namespace_that_cannot_be_understood_keep_a_cluster_from_being_served()
{
    let api = ApiServer::start().await;
    let policy = |namespace: &str| json!({"metadata": {"name": "p", "namespace": namespace}, "spec": {"acton": "DENY"}});
    api.put("authorizationpolicies", policy("shop"));
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokens.yaml"), "n1: a-token-of-node-one\n").unwrap();
    let mode = fs::Permissions::from_mode(0o600);
    fs::set_permissions(dir.path().join("tokens.yaml"), mode).unwrap();
    let open = ControlPlane::open(of_cluster(dir.path(), &api), &mut Registry::default()).await;
    assert!(open.is_ok());
    api.put("authorizationpolicies", policy("istio-system"));
    let open = ControlPlane::open(of_cluster(dir.path(), &api), &mut Registry::default()).await;
    let text = open.err().unwrap().to_string();
    assert!(text.starts_with("AuthorizationPolicy istio-system/p: spec"), "{text}");
}
