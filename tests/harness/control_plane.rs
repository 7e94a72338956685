//! A control plane inside a node's namespace: tells over delta xDS what it is given. It sends each client what that does not
//! hold yet and keeps it in step; whom it speaks to does not matter to it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    thread::JoinHandle,
};

use anyhow::{Context as _, Result};
use culvert_proto::{
    ADDRESS_TYPE, AUTHORIZATION_TYPE,
    envoy::service::discovery::v3::{
        DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
        aggregated_discovery_service_server::{
            AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
        },
    },
    istio::{
        security::{Action, Authorization, Group, Match, Rules, Scope, StringMatch, string_match},
        workload::{Address, TunnelProtocol, Workload, address},
    },
};
use futures::{SinkExt as _, channel::mpsc};
use hyper::server::conn::http2;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    service::TowerToHyperService,
};
use prost::Message as _;
use prost_types::Any;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    ca::Ca,
    netns::Netns,
    topology::{Family, Node, Pod},
};

/// Its name in its certificate.
pub const NAME: &str = "istiod";

/// By type and name.
type Resources = BTreeMap<(&'static str, String), Vec<u8>>;

/// What a control plane tells.
#[derive(Clone, Debug, Default)]
pub struct Records(Resources);

impl Records {
    /// Adds a pod of the mesh.
    #[must_use]
    pub fn pod(mut self, pod: &Pod, node: &Node) -> Self {
        let uid = format!("Kubernetes//Pod/{}/{}", pod.namespace, pod.name);
        let bytes = |family| match pod.ip(family) {
            std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
            std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let workload = Workload {
            uid: uid.clone(),
            name: pod.name.to_owned(),
            namespace: pod.namespace.to_owned(),
            service_account: pod.service_account.to_owned(),
            addresses: Family::BOTH.map(bytes).to_vec(),
            tunnel_protocol: TunnelProtocol::Hbone.into(),
            node: node.name.clone(),
            ..Workload::default()
        };
        let address = Address { r#type: Some(address::Type::Workload(workload)) };
        self.0.insert((ADDRESS_TYPE, uid), address.encode_to_vec());
        self
    }

    /// Adds a policy that denies the pods of `namespace` to `from`.
    #[must_use]
    pub fn deny(mut self, namespace: &str, from: &Pod) -> Self {
        let principal = from.identity().replace("spiffe://", "");
        let exact = StringMatch { match_type: Some(string_match::MatchType::Exact(principal)) };
        let matches = vec![Match { principals: vec![exact], ..Match::default() }];
        let policy = Authorization {
            name: "deny".to_owned(),
            namespace: namespace.to_owned(),
            scope: Scope::Namespace.into(),
            action: Action::Deny.into(),
            groups: vec![Group { rules: vec![Rules { matches }] }],
            ..Authorization::default()
        };
        self.0.insert((AUTHORIZATION_TYPE, format!("{namespace}/deny")), policy.encode_to_vec());
        self
    }
}

/// A running control plane; dropping it cuts all its connections.
#[derive(Debug)]
pub struct ControlPlane {
    records: watch::Sender<Records>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ControlPlane {
    /// Listens on `port` of loopback in `netns`, with a certificate of `ca` for [`NAME`].
    pub fn start(netns: &Netns, port: u16, ca: &Ca, records: Records) -> Result<Self> {
        let leaf = ca.issue_server(NAME)?;
        let mut tls = ServerConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(leaf.cert.as_bytes())?],
            PrivateKeyDer::from_pem_slice(leaf.key.as_bytes())?,
        )?;
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let listener = netns.run(|| {
            let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&at.into())?;
            socket.listen(64)?;
            std::io::Result::Ok(std::net::TcpListener::from(socket))
        });
        let listener = listener.with_context(|| format!("listen on {port}"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let records = watch::Sender::new(records);
        let told = Told(records.clone());
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, TlsAcceptor::from(Arc::new(tls)), told) => {}
                    _ = stopped => {}
                }
            });
        });
        Ok(Self { records, stop: Some(stop), thread: Some(thread) })
    }

    /// Tells this from now on.
    pub fn set(&self, records: Records) {
        self.records.send_replace(records);
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("the control plane panicked");
        }
    }
}

async fn serve(listener: std::net::TcpListener, tls: TlsAcceptor, told: Told) {
    let listener = TcpListener::from_std(listener).expect("a runtime runs this");
    let service = AggregatedDiscoveryServiceServer::new(told);
    let mut connections = JoinSet::new();
    loop {
        let Ok((tcp, _)) = listener.accept().await else { continue };
        let (tls, service) = (tls.clone(), TowerToHyperService::new(service.clone()));
        connections.spawn(async move {
            let Ok(stream) = tls.accept(tcp).await else { return };
            let http = http2::Builder::new(TokioExecutor::new());
            if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
                eprintln!("control plane: {error}");
            }
        });
    }
}

#[derive(Clone)]
struct Told(watch::Sender<Records>);

type Outgoing = mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Told {
    type DeltaAggregatedResourcesStream = mpsc::Receiver<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let (outgoing, receiver) = mpsc::channel(4);
        let stream = Stream {
            requests: request.into_inner(),
            outgoing,
            wanted: BTreeSet::new(),
            held: Resources::new(),
        };
        let records = self.0.subscribe();
        let mut tasks = JoinSet::new();
        tasks.spawn(stream.run(records));
        // It ends with its client.
        tasks.detach_all();
        Ok(Response::new(receiver))
    }
}

/// One client.
struct Stream {
    requests: Streaming<DeltaDiscoveryRequest>,
    outgoing: Outgoing,
    wanted: BTreeSet<&'static str>,
    /// What it was told, and what it said to hold, with a content that nothing has.
    held: Resources,
}

impl Stream {
    async fn run(mut self, mut records: watch::Receiver<Records>) {
        loop {
            tokio::select! {
                request = self.requests.message() => {
                    let Ok(Some(request)) = request else { return };
                    if let Some(detail) = request.error_detail {
                        eprintln!("control plane: refused: {}", detail.message);
                    }
                    let types = [ADDRESS_TYPE, AUTHORIZATION_TYPE];
                    let Some(url) = types.into_iter().find(|url| *url == request.type_url) else {
                        continue;
                    };
                    if !self.wanted.insert(url) {
                        continue;
                    }
                    let held = request.initial_resource_versions.into_keys();
                    self.held.extend(held.map(|name| ((url, name), Vec::new())));
                    let now = records.borrow_and_update().clone();
                    if !self.tell(url, &now).await {
                        return;
                    }
                }
                changed = records.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let now = records.borrow_and_update().clone();
                    for url in self.wanted.clone() {
                        if !self.tell(url, &now).await {
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Whether the client is still there.
    async fn tell(&mut self, url: &'static str, records: &Records) -> bool {
        let new = records
            .0
            .iter()
            .filter(|(key, value)| key.0 == url && self.held.get(*key) != Some(*value));
        let resources = new.map(|((_, name), value)| Resource {
            name: name.clone(),
            version: "1".to_owned(),
            resource: Some(Any { type_url: url.to_owned(), value: value.clone() }),
            ..Resource::default()
        });
        let gone = self.held.keys().filter(|key| key.0 == url && !records.0.contains_key(*key));
        let response = DeltaDiscoveryResponse {
            type_url: url.to_owned(),
            nonce: "n".to_owned(),
            resources: resources.collect(),
            removed_resources: gone.map(|(_, name)| name.clone()).collect(),
            ..DeltaDiscoveryResponse::default()
        };
        self.held.retain(|key, _| key.0 != url);
        let now = records.0.iter().filter(|(key, _)| key.0 == url);
        self.held.extend(now.map(|(key, value)| (key.clone(), value.clone())));
        self.outgoing.send(Ok(response)).await.is_ok()
    }
}
