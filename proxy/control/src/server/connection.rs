//! One connection to a server, from its address to a channel for gRPC calls.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::body::Body;
use tower_service::Service;

use super::verify::EitherName;
use super::{CONNECT_DEADLINE, ConnectError, CredentialsError, HANDSHAKE_DEADLINE, Server};

/// The ALPN protocol of gRPC (RFC 9113 §3.1).
const ALPN: &[u8] = b"h2";
/// An idle connection is asked for a sign of life this often, and given up without one within the second.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// What the kernel asks of a silent peer: after, every, how often.
const TCP_KEEPALIVE: (Duration, Duration, u32) =
    (Duration::from_mins(5), Duration::from_secs(75), 9);
/// A whole mesh arrives in one message; a small window would make that slow over a long way.
const WINDOW: u32 = 4 << 20;

static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(aws_lc_rs::default_provider()));

/// Drives a connection; ends with it.
pub(crate) type Connection =
    Pin<Box<http2::Connection<TokioIo<TlsStream<TcpStream>>, Body, TokioExecutor>>>;

/// Sends calls over one connection, each with this node's headers. Clones share the connection; it is never made anew.
#[derive(Clone, Debug)]
pub(crate) struct Channel {
    sender: SendRequest<Body>,
    headers: Arc<[(HeaderName, HeaderValue)]>,
}

impl Server {
    /// Connects. The connection lives as long as the second value is polled.
    ///
    /// # Errors
    /// There is none, or the server did not prove itself, within the deadlines.
    pub(crate) async fn connect(&self) -> Result<(Channel, Connection), ConnectError> {
        let roots = self.roots.load().await;
        self.connect_with(roots.map_err(|source| self.unprepared(source))?).await
    }

    /// Connects to what is proved by `roots`, which are this server's.
    pub(crate) async fn connect_with(
        &self,
        roots: Arc<RootCertStore>,
    ) -> Result<(Channel, Connection), ConnectError> {
        let credentials = |source| self.unprepared(source);
        let headers = self.headers().await.map_err(credentials)?;
        let tls = TlsConnector::from(Arc::new(self.tls(roots).map_err(credentials)?));
        let name = server_name(self.address.host()).map_err(credentials)?;
        let stream = self.within(CONNECT_DEADLINE, "connection", self.dial()).await?;
        let handshake = async {
            let tls = tls
                .connect(name, stream)
                .await
                .map_err(|source| ConnectError::Tls { address: self.address.clone(), source })?;
            let http = Box::pin(http2_builder().handshake(TokioIo::new(tls)));
            http.await
                .map_err(|source| ConnectError::Http { address: self.address.clone(), source })
        };
        let (sender, connection) = self.within(HANDSHAKE_DEADLINE, "handshake", handshake).await?;
        Ok((Channel { sender, headers }, Box::pin(connection)))
    }

    /// `channel` with this node's headers as of now: a token changes while a connection lives.
    pub(crate) async fn refresh(&self, channel: &Channel) -> Result<Channel, CredentialsError> {
        Ok(Channel { sender: channel.sender.clone(), headers: self.headers().await? })
    }

    /// The origin of calls to it.
    pub(crate) fn origin(&self) -> Uri {
        // An address is parsed from a URI, so it is one.
        self.address.to_string().parse().unwrap_or_default()
    }

    fn unprepared(&self, source: CredentialsError) -> ConnectError {
        ConnectError::Credentials { address: self.address.clone(), source }
    }

    async fn within<T>(
        &self,
        deadline: Duration,
        what: &'static str,
        attempt: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let late = || ConnectError::Deadline { address: self.address.clone(), what, deadline };
        timeout(deadline, attempt).await.unwrap_or_else(|_elapsed| Err(late()))
    }

    async fn headers(&self) -> Result<Arc<[(HeaderName, HeaderValue)]>, CredentialsError> {
        let mut headers = self.headers.clone();
        if let Some(token) = &self.token {
            headers.push((AUTHORIZATION, token.header().await?));
        }
        if let Ok(cluster) = HeaderValue::try_from(&self.cluster_id) {
            headers.push((HeaderName::from_static("clusterid"), cluster));
        }
        Ok(headers.into())
    }

    fn tls(&self, roots: Arc<RootCertStore>) -> Result<ClientConfig, CredentialsError> {
        let provider = Arc::clone(&PROVIDER);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(CredentialsError::Verifier)?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(CredentialsError::Tls)?;
        let mut config = match &self.alternative_name {
            None => builder.with_webpki_verifier(verifier).with_no_client_auth(),
            Some(name) => {
                let alternative = server_name(name)?;
                builder
                    .dangerous()
                    .with_custom_certificate_verifier(Arc::new(EitherName {
                        verifier,
                        alternative,
                    }))
                    .with_no_client_auth()
            }
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(config)
    }

    async fn dial(&self) -> Result<TcpStream, ConnectError> {
        let resolve = |source| ConnectError::Resolve { address: self.address.clone(), source };
        let host = (self.address.host(), self.address.port());
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in lookup_host(host).await.map_err(resolve)? {
            match connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(ConnectError::Connect { address: self.address.clone(), source: last })
    }
}

/// One address of several: an unanswered SYN must leave time for the others.
async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    let (after, every, times) = TCP_KEEPALIVE;
    let keepalive = TcpKeepalive::new().with_time(after).with_interval(every).with_retries(times);
    SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
    socket.set_nodelay(true)?;
    let attempt = timeout(CONNECT_DEADLINE / 2, socket.connect(address)).await;
    attempt.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

fn server_name(name: &str) -> Result<ServerName<'static>, CredentialsError> {
    ServerName::try_from(name.to_owned())
        .ok()
        .ok_or_else(|| CredentialsError::Name(name.to_owned()))
}

fn http2_builder() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    let (every, within) = PING;
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(every)
        .keep_alive_timeout(within)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW);
    builder
}

impl Channel {
    /// Whether calls can no more be made over it.
    pub(crate) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.sender.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        for (name, value) in &*self.headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        let mut sender = self.sender.clone();
        Box::pin(async move {
            poll_fn(|cx| sender.poll_ready(cx)).await?;
            sender.send_request(request).await
        })
    }
}
