//! Two applications with a mesh between them, in one process: client → pool → TLS → server → application.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http::{HeaderMap, StatusCode};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ClientConfig, RootCertStore, ServerConfig, pki_types::PrivateKeyDer};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinSet,
};

use crate::{
    Timeouts,
    copy::{self, End, Meter},
    hbone::{
        Connect, OpenError, Pool, PoolOptions, Tunnel,
        client::{self, ConnectError},
        server::{self, Incoming, Phase},
    },
};

pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Configurations that trust each other for 127.0.0.1, and one of a client without a certificate.
pub(crate) struct Tls {
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) anonymous: Arc<ClientConfig>,
}

pub(crate) fn tls() -> Tls {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &ca).unwrap();
    let chain = vec![leaf.der().clone()];
    let key = || PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).unwrap();
    let roots = Arc::new(roots);
    let verifier = rustls::server::WebPkiClientVerifier::builder(Arc::clone(&roots));
    let mut server = ServerConfig::builder()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(chain.clone(), key())
        .unwrap();
    let trusting = || ClientConfig::builder().with_root_certificates(Arc::clone(&roots));
    let mut client = trusting().with_client_auth_cert(chain, key()).unwrap();
    let anonymous = Arc::new(trusting().with_no_client_auth());
    server.alpn_protocols = vec![b"h2".to_vec()];
    client.alpn_protocols = vec![b"h2".to_vec()];
    Tls { server: Arc::new(server), client: Arc::new(client), anonymous }
}

pub(crate) fn listen() -> (TcpListener, SocketAddr) {
    let socket = socket().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1024).unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

pub(crate) async fn dial(addr: SocketAddr) -> io::Result<TcpStream> {
    socket()?.connect(addr).await
}

/// With buffers so small that the proxy's own show.
fn socket() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_send_buffer_size(64 << 10)?;
    socket.set_recv_buffer_size(64 << 10)?;
    Ok(socket)
}

/// Both ends of one TCP connection.
pub(crate) async fn pair() -> (TcpStream, TcpStream) {
    let (listener, addr) = listen();
    let (near, far) = tokio::join!(dial(addr), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

/// Counts what is copied.
#[derive(Default)]
pub(crate) struct Count {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
}

impl Meter for Count {
    fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    fn received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A server end that delivers each CONNECT to its authority, and a client end with a pool.
pub(crate) struct Mesh {
    pub(crate) pool: Pool<u32>,
    pub(crate) peer: SocketAddr,
    _phase: watch::Sender<Phase>,
    client: Arc<ClientConfig>,
    copies: JoinSet<()>,
    _server: JoinSet<()>,
}

impl Mesh {
    pub(crate) fn new(options: PoolOptions) -> Self {
        let Tls { server, client, .. } = tls();
        let (listener, peer) = listen();
        let (phase, phases) = watch::channel(Phase::Serving);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, server, phases));
        let pool = Pool::new(options, |_| true);
        Self { pool, peer, _phase: phase, client, copies: JoinSet::new(), _server: tasks }
    }

    /// Opens a tunnel to `authority`.
    pub(crate) async fn open(&self, authority: &str) -> Result<Tunnel, OpenError> {
        let (peer, tls) = (self.peer, Arc::clone(&self.client));
        let connect = || async move {
            let tcp = dial(peer).await.map_err(ConnectError::Tls)?;
            client::connect(tcp, tls, &Timeouts::default()).await
        };
        let authority = authority.parse().unwrap();
        self.pool.open(1, connect, Connect { authority, headers: HeaderMap::new() }).await
    }

    /// An application's connection through the mesh: the client's end and the server's.
    pub(crate) async fn connect(&mut self) -> (TcpStream, TcpStream) {
        let (listener, addr) = listen();
        let (client, captured) = pair().await;
        let authority = addr.to_string();
        let opened = tokio::join!(self.open(&authority), listener.accept());
        let (tunnel, (server, _)) = (opened.0.unwrap(), opened.1.unwrap());
        self.copies.spawn(async move {
            copy::tunnel(captured, tunnel, &Count::default(), &Timeouts::default()).await;
        });
        (client, server)
    }

    /// Gives up all copies of the client end.
    pub(crate) fn abandon(&mut self) {
        self.copies.abort_all();
    }
}

async fn accept(listener: TcpListener, tls: Arc<ServerConfig>, phase: watch::Receiver<Phase>) {
    let mut connections = JoinSet::new();
    loop {
        let (tcp, _) = listener.accept().await.unwrap();
        let (tls, phase) = (Arc::clone(&tls), phase.clone());
        connections.spawn(async move {
            let timeouts = Timeouts::default();
            if let Ok(secured) = server::handshake(tcp, tls, &timeouts).await {
                let end = secured.serve(phase, &timeouts, |incoming| async {
                    deliver(incoming).await;
                });
                drop(end.await);
            }
        });
    }
}

async fn deliver(incoming: Incoming) -> Option<End> {
    let Some(Ok(authority)) = incoming.authority.map(|text| text.parse()) else {
        incoming.respond.refuse(StatusCode::BAD_REQUEST);
        return None;
    };
    let Ok(app) = dial(authority).await else {
        incoming.respond.refuse(StatusCode::SERVICE_UNAVAILABLE);
        return None;
    };
    let tunnel = incoming.respond.accept(HeaderMap::new()).ok()?;
    Some(copy::tunnel(app, tunnel, &Count::default(), &Timeouts::default()).await)
}

/// Reads to the end: what came, and the error if a reset ended it.
pub(crate) async fn read_all(stream: &mut TcpStream) -> (Vec<u8>, Option<io::ErrorKind>) {
    let mut data = Vec::new();
    let end = tokio::time::timeout(LONG, stream.read_to_end(&mut data)).await.unwrap();
    (data, end.err().map(|error| error.kind()))
}
