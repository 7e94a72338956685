//! gRPC over TLS: accepts, proves itself by a certificate of the mesh's own authority, and hands requests to the services.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use culvert_proto::{
    envoy::service::discovery::v3::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer,
    istio::v1::auth::istio_certificate_service_server::IstioCertificateServiceServer,
};
use culvert_tls::Issued;
use http::{Request, Response, StatusCode};
use hyper::{body::Incoming, rt::Executor, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::CryptoProvider,
    server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier},
    sign::CertifiedKey,
};
use rustls_pki_types::{CertificateDer, pem::PemObject as _};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{future::FutureExt as _, sync::CancellationToken, task::TaskTracker};
use tonic::{body::Body, codegen::Service as _};

use crate::{ca::Certificates, callers::Proven, xds::Discovery};

/// Connections at once: two for each node of a very large mesh.
const CONNECTIONS: usize = 16 * 1024;
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A peer that does not answer pings is gone.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_LIMIT: Duration = Duration::from_secs(10);
/// Requests of one connection at once: one stream, and a certificate for each identity that starts at the same time.
const STREAMS: u32 = 256;
/// What a node holds, name and version of each, in its first request.
const MAX_REQUEST: usize = 64 << 20;
/// Pause after accept(2) failed.
const BACK_OFF: Duration = Duration::from_millis(100);
const DISCOVERY: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/";
const CERTIFICATES: &str = "/istio.v1.auth.IstioCertificateService/";

/// Why TLS cannot be spoken.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The roots of nodes' certificates cannot be read.
    #[error("{} holds no root that clients' certificates could chain to; it must be PEM", .0.display())]
    NodeRoots(std::path::PathBuf),
    /// What was given does not make a server.
    #[error("set up the TLS server")]
    Server(#[source] rustls::Error),
}

/// The certificate that the server presents, which changes while it runs.
#[derive(Debug)]
pub(crate) struct Presented {
    current: RwLock<Arc<CertifiedKey>>,
}

impl Presented {
    pub(crate) fn new(issued: Issued) -> Result<Self, TlsError> {
        Ok(Self { current: RwLock::new(Arc::new(certified(issued)?)) })
    }

    pub(crate) fn replace(&self, issued: Issued) -> Result<(), TlsError> {
        let fresh = Arc::new(certified(issued)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }
}

impl ResolvesServerCert for Presented {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn certified(issued: Issued) -> Result<CertifiedKey, TlsError> {
    CertifiedKey::from_der(issued.chain, issued.key, &provider()).map_err(TlsError::Server)
}

/// A server's TLS; clients may prove themselves by a certificate that chains to `node_roots`.
pub(crate) fn tls(
    presented: Arc<Presented>,
    node_roots: Option<&std::path::Path>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(TlsError::Server)?;
    let builder = match node_roots {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let bad = || TlsError::NodeRoots(path.to_owned());
            let bytes = std::fs::read(path).ok().ok_or_else(bad)?;
            let mut roots = RootCertStore::empty();
            for root in CertificateDer::pem_slice_iter(&bytes) {
                roots.add(root.ok().ok_or_else(bad)?).ok().ok_or_else(bad)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
                .allow_unauthenticated()
                .build()
                .ok()
                .ok_or_else(bad)?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_cert_resolver(presented);
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// The services behind one listener.
#[derive(Clone)]
pub(crate) struct Services {
    pub(crate) discovery: Discovery,
    pub(crate) certificates: Certificates,
}

/// Accepts until `draining` fires, then waits up to `deadline` for what is open.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    services: Services,
    draining: CancellationToken,
    deadline: Duration,
) {
    let acceptor = TlsAcceptor::from(tls);
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    let cut = CancellationToken::new();
    let tasks = TaskTracker::new();
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = draining.cancelled() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let connection = Connection {
                    peer,
                    acceptor: acceptor.clone(),
                    services: services.clone(),
                    draining: draining.clone(),
                    spawner: Spawner { tasks: tasks.clone(), cut: cut.clone() },
                };
                connection.spawner.clone().execute(connection.run(stream, permit));
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                sleep(BACK_OFF).await;
            }
        }
    }
    tasks.close();
    if timeout(deadline, tasks.wait()).await.is_err() {
        cut.cancel();
        tasks.wait().await;
    }
}

/// Runs what belongs to a connection, until it ends or is cut.
#[derive(Clone)]
struct Spawner {
    tasks: TaskTracker,
    cut: CancellationToken,
}

impl<F> Executor<F> for Spawner
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        let task = task.with_cancellation_token_owned(self.cut.clone());
        drop(self.tasks.spawn(async move { drop(task.await) }));
    }
}

struct Connection {
    peer: SocketAddr,
    acceptor: TlsAcceptor,
    services: Services,
    draining: CancellationToken,
    spawner: Spawner,
}

impl Connection {
    async fn run(self, stream: TcpStream, _permit: OwnedSemaphorePermit) {
        let Self { peer, acceptor, services, draining, spawner } = self;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, %peer, "no TCP_NODELAY");
        }
        let stream = match timeout(HANDSHAKE, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return log_handshake(peer, &error),
            Err(_elapsed) => return tracing::debug!(%peer, "no TLS handshake in 10 s"),
        };
        let proven = stream.get_ref().1.peer_certificates().map(|chain| Proven(chain.into()));
        let service = service_fn(|mut request: Request<Incoming>| {
            let services = services.clone();
            if let Some(proven) = &proven {
                request.extensions_mut().insert(proven.clone());
            }
            async move { Ok::<_, Infallible>(route(services, request).await) }
        });
        let connection = http2::Builder::new(spawner)
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_LIMIT)
            .max_concurrent_streams(STREAMS)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let end = tokio::select! {
            end = connection.as_mut() => end,
            () = draining.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = end {
            tracing::debug!(%error, %peer, "connection ended early");
        }
    }
}

fn log_handshake(peer: SocketAddr, error: &io::Error) {
    tracing::debug!(%error, %peer, "TLS handshake failed");
}

async fn route(services: Services, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path();
    let response = if path.starts_with(DISCOVERY) {
        AggregatedDiscoveryServiceServer::new(services.discovery)
            .max_decoding_message_size(MAX_REQUEST)
            .call(request)
            .await
    } else if path.starts_with(CERTIFICATES) {
        IstioCertificateServiceServer::new(services.certificates).call(request).await
    } else {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::OK;
        // UNIMPLEMENTED, as gRPC says it in a response without a body.
        response.headers_mut().insert("grpc-status", http::HeaderValue::from_static("12"));
        response
            .headers_mut()
            .insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
        Ok(response)
    };
    response.unwrap_or_else(|never: Infallible| match never {})
}
