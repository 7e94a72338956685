//! The dialling end of an HBONE connection: TLS, the HTTP/2 handshake, and what keeps the connection alive.
//!
//! Sharing connections and opening streams is [`super::Pool`]'s; which certificate to show and whom to expect is in the
//! TLS configuration that the caller brings.

use std::{
    fmt,
    future::{Future as _, poll_fn},
    io,
    net::{IpAddr, Ipv4Addr},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use h2::client::{Builder, Connection, SendRequest};
use rustls::{
    ClientConfig,
    pki_types::{CertificateDer, ServerName},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::{
    CONNECTION_WINDOW, FRAME_SIZE, OpenError, RESET_STREAMS, SEND_BUFFER, STREAM_WINDOW,
    TLS_BUFFER, Tunnel, keepalive, nested::TunnelStream, read_ahead::ReadAhead,
};
use crate::{Timeouts, dial::DialError};

/// The largest header list we accept in a response: baggage only.
const HEADER_LIST: u32 = 16 << 10;
/// Streams to open before the peer's SETTINGS arrive.
const INITIAL_STREAMS: usize = 100;

/// Why there is no HBONE connection to a peer.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No TCP connection.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// No tunnel to the peer's network, within which the connection was to be.
    #[error("no tunnel through the network's gateway")]
    Gateway(#[source] Box<OpenError>),
    /// The TLS handshake failed: one of the two does not trust the other's certificate, or the peer speaks no TLS.
    #[error("TLS handshake with the peer")]
    Tls(#[source] io::Error),
    /// The peer took the connection and then went silent.
    #[error("TLS handshake with the peer: not done within {}s", .0.as_secs_f32())]
    TlsTimeout(Duration),
    /// The connection broke before HTTP/2 was up.
    #[error("HTTP/2 handshake with the peer")]
    H2(#[source] h2::Error),
    /// The peer does not read.
    #[error("HTTP/2 handshake with the peer: not done within {}s", .0.as_secs_f32())]
    H2Timeout(Duration),
}

/// Why a connection that was up has ended, other than by agreement.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error("HTTP/2 connection failed")]
    H2(#[source] h2::Error),
    #[error("no answer to a keepalive PING")]
    Silent,
}

type Driver = Pin<Box<dyn Future<Output = Result<(), Lost>> + Send>>;

/// A moment in the life of a connection.
pub(super) type Moment = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection that is up, for [`super::Pool`] to drive and share.
pub struct Established {
    pub(super) send: SendRequest<Bytes>,
    pub(super) driver: Driver,
    /// The address that it was dialled from.
    pub(super) local: Option<IpAddr>,
    pub(super) peer: Vec<CertificateDer<'static>>,
    pub(super) retire: Moment,
    pub(super) cut: Moment,
}

impl Established {
    /// The certificate chain that the peer proved, leaf first.
    pub fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        &self.peer
    }

    /// No new tunnel is opened on the connection once `retire` has ended, and none is left on it once `cut` has.
    #[must_use]
    pub fn until(
        self,
        retire: impl Future<Output = ()> + Send + 'static,
        cut: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        Self { retire: Box::pin(retire), cut: Box::pin(cut), ..self }
    }
}

impl fmt::Debug for Established {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Established").finish_non_exhaustive()
    }
}

/// Makes an HBONE connection of a TCP connection.
///
/// No server name is sent: the peer is known by its certificate's SPIFFE ID, which the verifier in `tls` checks.
pub async fn connect(
    tcp: TcpStream,
    tls: Arc<ClientConfig>,
    timeouts: &Timeouts,
) -> Result<Established, ConnectError> {
    let name = tcp.peer_addr().map_err(ConnectError::Tls)?.ip();
    let local = tcp.local_addr().map_err(ConnectError::Tls)?.ip();
    secure(ReadAhead::new(tcp), name, Some(local), tls, timeouts).await
}

/// Makes an HBONE connection within `tunnel`, to what is at its far end. It is stale when the tunnel's connection is.
pub async fn connect_through(
    tunnel: Tunnel,
    tls: Arc<ClientConfig>,
    timeouts: &Timeouts,
) -> Result<Established, ConnectError> {
    let local = tunnel.local();
    // What is there has no address that we know.
    secure(TunnelStream::new(tunnel), Ipv4Addr::UNSPECIFIED.into(), local, tls, timeouts).await
}

async fn secure<IO>(
    io: IO,
    name: IpAddr,
    local: Option<IpAddr>,
    tls: Arc<ClientConfig>,
    timeouts: &Timeouts,
) -> Result<Established, ConnectError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // TLS has no SNI for addresses, so none is sent even where the configuration forgot to turn it off.
    let connecting = TlsConnector::from(tls).connect(ServerName::from(name), io);
    let mut stream = match timeout(timeouts.tls_handshake, connecting).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(ConnectError::Tls(error)),
        Err(_elapsed) => return Err(ConnectError::TlsTimeout(timeouts.tls_handshake)),
    };
    let session = stream.get_mut().1;
    session.set_buffer_limit(Some(TLS_BUFFER));
    let peer = session.peer_certificates().map(<[_]>::to_vec).unwrap_or_default();
    Ok(Established { local, peer, ..handshake(Box::new(stream), timeouts).await? })
}

pub(crate) async fn handshake<IO>(io: IO, timeouts: &Timeouts) -> Result<Established, ConnectError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut builder = Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .initial_max_send_streams(INITIAL_STREAMS)
        .enable_push(false);
    let (send, connection) = match timeout(timeouts.h2_handshake, builder.handshake(io)).await {
        Ok(Ok(pair)) => pair,
        Ok(Err(error)) => return Err(ConnectError::H2(error)),
        Err(_elapsed) => return Err(ConnectError::H2Timeout(timeouts.h2_handshake)),
    };
    let driver = Box::pin(drive(connection, timeouts.ping_interval, timeouts.ping_timeout));
    let never = || Box::pin(std::future::pending());
    Ok(Established { send, driver, local: None, peer: Vec::new(), retire: never(), cut: never() })
}

/// Runs the connection until it has ended. Its streams fail when this future is dropped.
async fn drive<IO>(
    mut connection: Connection<IO, Bytes>,
    interval: Duration,
    patience: Duration,
) -> Result<(), Lost>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin,
{
    let mut dead = pin!(keepalive::dead(connection.ping_pong(), interval, patience));
    poll_fn(move |cx| match Pin::new(&mut connection).poll(cx) {
        Poll::Ready(end) => Poll::Ready(end.map_err(Lost::H2)),
        Poll::Pending => dead.as_mut().poll(cx).map(|()| Err(Lost::Silent)),
    })
    .await
}
