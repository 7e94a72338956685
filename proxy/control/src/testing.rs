//! Servers for tests: real sockets, TLS and gRPC; what they say is the test's script.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use culvert_proto::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use culvert_proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use culvert_proto::istio::security::Authorization;
use culvert_proto::istio::workload::{Address, Service, Workload, address};
use culvert_proto::{ADDRESS_TYPE, AUTHORIZATION_TYPE};
use futures::SinkExt as _;
use futures::channel::mpsc;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use prost::Message as _;
use prost_types::Any;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::net::TcpListener;
use tokio::sync::mpsc as queue;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use tower_service::Service as TowerService;

use crate::server::{Roots, Server, Token};

/// Longer than anything here takes; a test that runs into it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A root and what it signs.
pub(crate) struct Pki(pub(crate) CertifiedIssuer<'static, KeyPair>);

impl Pki {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn root_pem(&self) -> String {
        self.0.pem()
    }

    /// TLS of a server called `name`.
    pub(crate) fn server(&self, name: &str) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let leaf = params.signed_by(&key, &self.0).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![leaf.into()],
                PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            )
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config)
    }
}

/// A gRPC server; dropping it cuts its connections and gives its port free.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Arc<ArcSwap<ServerConfig>>,
    /// TCP connections that were accepted.
    pub(crate) accepted: Arc<AtomicUsize>,
    tasks: JoinSet<()>,
}

impl TestServer {
    /// Serves `service` on `address`; port 0 is any.
    pub(crate) async fn start<S>(address: SocketAddr, tls: Arc<ServerConfig>, service: S) -> Self
    where
        S: TowerService<
                http::Request<hyper::body::Incoming>,
                Response = http::Response<tonic::body::Body>,
                Error = std::convert::Infallible,
            > + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let tls = Arc::new(ArcSwap::new(tls));
        let accepted = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        let (config, count) = (Arc::clone(&tls), Arc::clone(&accepted));
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let acceptor = TlsAcceptor::from(config.load_full());
                let service = TowerToHyperService::new(service.clone());
                connections.spawn(async move {
                    let Ok(stream) = acceptor.accept(tcp).await else { return };
                    let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    // A cut connection is no failure of the test.
                    let _ended = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, tls, accepted, tasks }
    }

    /// Ends it at once, and gives the address at which another one may take its place.
    pub(crate) async fn kill(mut self) -> SocketAddr {
        self.tasks.shutdown().await;
        self.address
    }

    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// `address` as a client sees it: proved by `roots` as `localhost`.
pub(crate) fn server(address: SocketAddr, roots: Roots, token: Option<Token>) -> Server {
    Server {
        address: format!("https://{address}").parse().unwrap(),
        roots,
        alternative_name: Some("localhost".to_owned()),
        token,
        cluster_id: "c1".to_owned(),
        headers: Vec::new(),
    }
}

/// The streams that clients open to a control plane.
#[derive(Debug)]
pub(crate) struct Streams(queue::UnboundedReceiver<Stream>);

#[derive(Clone)]
pub(crate) struct Ads(queue::UnboundedSender<Stream>);

/// One stream, as the control plane's side of it.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) metadata: MetadataMap,
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    nonce: usize,
}

pub(crate) fn ads() -> (AggregatedDiscoveryServiceServer<Ads>, Streams) {
    let (sender, receiver) = queue::unbounded_channel();
    (AggregatedDiscoveryServiceServer::new(Ads(sender)), Streams(receiver))
}

impl Streams {
    /// The next stream, and the first request of each type.
    pub(crate) async fn next(&mut self) -> (Stream, [DeltaDiscoveryRequest; 2]) {
        let mut stream = timeout(PATIENCE, self.0.recv()).await.unwrap().unwrap();
        let hello = [stream.request().await, stream.request().await];
        assert_eq!([&*hello[0].type_url, &*hello[1].type_url], [ADDRESS_TYPE, AUTHORIZATION_TYPE]);
        (stream, hello)
    }
}

impl Stream {
    pub(crate) async fn request(&mut self) -> DeltaDiscoveryRequest {
        timeout(PATIENCE, self.requests.message()).await.unwrap().unwrap().unwrap()
    }

    pub(crate) async fn send(&mut self, response: DeltaDiscoveryResponse) {
        timeout(PATIENCE, self.responses.send(Ok(response))).await.unwrap().unwrap();
    }

    /// Sends and waits for the answer to it.
    pub(crate) async fn tell(
        &mut self,
        mut response: DeltaDiscoveryResponse,
    ) -> DeltaDiscoveryRequest {
        self.nonce += 1;
        response.nonce = self.nonce.to_string();
        let url = response.type_url.clone();
        self.send(response).await;
        let answer = self.request().await;
        assert_eq!((&answer.response_nonce, &answer.type_url), (&self.nonce.to_string(), &url));
        answer
    }

    /// The same, for a response that is accepted whole.
    pub(crate) async fn accepted(&mut self, response: DeltaDiscoveryResponse) {
        let answer = self.tell(response).await;
        assert_eq!(answer.error_detail, None);
    }

    pub(crate) async fn end(mut self, status: Status) {
        // The client may have gone already.
        let _gone = self.responses.send(Err(status)).await;
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Ads {
    type DeltaAggregatedResourcesStream = mpsc::Receiver<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let (metadata, _, requests) = request.into_parts();
        let (responses, outgoing) = mpsc::channel(1);
        let stream = Stream { metadata, requests, responses, nonce: 0 };
        self.0.send(stream).map_err(|_gone| Status::unavailable("no test waits for a stream"))?;
        Ok(Response::new(outgoing))
    }
}

pub(crate) fn response(
    type_url: &str,
    resources: impl IntoIterator<Item = Resource>,
    removed: &[&str],
) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        type_url: type_url.to_owned(),
        resources: resources.into_iter().collect(),
        removed_resources: removed.iter().map(ToString::to_string).collect(),
        ..DeltaDiscoveryResponse::default()
    }
}

pub(crate) fn addresses(
    resources: impl IntoIterator<Item = Resource>,
    removed: &[&str],
) -> DeltaDiscoveryResponse {
    response(ADDRESS_TYPE, resources, removed)
}

pub(crate) fn policies(
    resources: impl IntoIterator<Item = Resource>,
    removed: &[&str],
) -> DeltaDiscoveryResponse {
    response(AUTHORIZATION_TYPE, resources, removed)
}

pub(crate) fn resource(name: &str, type_url: &str, value: Vec<u8>) -> Resource {
    Resource {
        name: name.to_owned(),
        version: "1".to_owned(),
        resource: Some(Any { type_url: type_url.to_owned(), value }),
        ..Resource::default()
    }
}

/// A workload with one address in the default network.
pub(crate) fn workload(uid: &str, ip: [u8; 4]) -> Resource {
    let workload = Workload {
        uid: uid.to_owned(),
        name: uid.to_owned(),
        namespace: "ns".to_owned(),
        addresses: vec![ip.to_vec()],
        ..Workload::default()
    };
    of_workload(workload)
}

pub(crate) fn of_workload(workload: Workload) -> Resource {
    let name = workload.uid.clone();
    let address = Address { r#type: Some(address::Type::Workload(workload)) };
    resource(&name, ADDRESS_TYPE, address.encode_to_vec())
}

pub(crate) fn of_service(service: Service) -> Resource {
    let name = format!("{}/{}", service.namespace, service.hostname);
    let address = Address { r#type: Some(address::Type::Service(service)) };
    resource(&name, ADDRESS_TYPE, address.encode_to_vec())
}

pub(crate) fn policy(name: &str) -> Resource {
    let policy = Authorization {
        name: name.to_owned(),
        namespace: "ns".to_owned(),
        ..Authorization::default()
    };
    resource(&format!("ns/{name}"), AUTHORIZATION_TYPE, policy.encode_to_vec())
}
