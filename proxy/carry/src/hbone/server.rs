//! The accepting end of HBONE: one TLS connection after the other, and the CONNECT requests on it.
//!
//! Who the peer is, whether it may connect and what it reaches is the handler's to decide; it answers each request and
//! copies the tunnel it gets. Listening and limiting connections is the caller's.

use std::{fmt, future::poll_fn, io, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use h2::{
    RecvStream,
    server::{Builder, Connection, SendResponse},
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use rustls::{ServerConfig, pki_types::CertificateDer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    task::{JoinError, JoinSet},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    CONNECTION_WINDOW, FRAME_SIZE, RESET_STREAMS, SEND_BUFFER, STREAM_WINDOW, TLS_BUFFER, Tunnel,
    keepalive, read_ahead::ReadAhead,
};
use crate::Timeouts;

#[cfg(test)]
mod tests;

/// The largest header list we accept in a request.
const HEADER_LIST: u32 = 64 << 10;
/// The streams that a peer may have open at a time.
const STREAMS: u32 = 200;
/// The requests that may be handled at a time.
const HANDLERS: usize = 2 * STREAMS as usize;

/// How far a connection has come to its end; later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// New requests are taken.
    Serving,
    /// `GOAWAY` has been sent; open tunnels go on until they end.
    Draining,
    /// Open tunnels are reset.
    Cut,
}

/// Why there is no TLS connection with a peer.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The handshake failed: one of the two does not trust the other's certificate, or the peer speaks no TLS.
    #[error("TLS handshake with the peer")]
    Tls(#[source] io::Error),
    /// The peer connected and then went silent.
    #[error("TLS handshake with the peer: not done within {}s", .0.as_secs_f32())]
    TlsTimeout(Duration),
}

/// Why a connection has ended, other than by agreement.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The peer sent no HTTP/2 preface.
    #[error("HTTP/2 handshake with the peer: not done within {}s", .0.as_secs_f32())]
    H2Timeout(Duration),
    /// The connection broke, or the peer violated the protocol.
    #[error("HTTP/2 connection with the peer")]
    H2(#[source] h2::Error),
    /// The peer is dead.
    #[error("no answer from the peer to a keepalive PING within {}s", .0.as_secs_f32())]
    Silent(Duration),
}

/// A connection whose TLS handshake is done.
#[derive(Debug)]
pub struct Secured {
    /// Boxed, as TLS state is large and handed on by value.
    stream: Box<TlsStream<ReadAhead>>,
}

/// Does the TLS handshake of an accepted connection, within [`Timeouts::tls_handshake`].
pub async fn handshake(
    tcp: TcpStream,
    tls: Arc<ServerConfig>,
    timeouts: &Timeouts,
) -> Result<Secured, AcceptError> {
    match timeout(timeouts.tls_handshake, TlsAcceptor::from(tls).accept(ReadAhead::new(tcp))).await
    {
        Ok(Ok(mut stream)) => {
            stream.get_mut().1.set_buffer_limit(Some(TLS_BUFFER));
            Ok(Secured { stream: Box::new(stream) })
        }
        Ok(Err(error)) => Err(AcceptError::Tls(error)),
        Err(_elapsed) => Err(AcceptError::TlsTimeout(timeouts.tls_handshake)),
    }
}

impl Secured {
    /// The certificate chain that the peer proved, leaf first.
    pub fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        self.stream.get_ref().1.peer_certificates().unwrap_or_default()
    }

    /// Runs the connection until it has ended, with one task of `handler` for each request.
    ///
    /// A peer may keep a connection without requests for as long as it answers PINGs: it is pooled there. `phase` ends
    /// it earlier; a dropped sender means [`Phase::Cut`]. Dropping this future cuts as well, without a farewell.
    pub async fn serve<H, F>(
        self,
        phase: watch::Receiver<Phase>,
        timeouts: &Timeouts,
        handler: H,
    ) -> Result<(), ServeError>
    where
        H: Fn(Incoming) -> F + Send,
        F: Future<Output = ()> + Send + 'static,
    {
        serve(self.stream, phase, timeouts, handler).await
    }
}

/// One request.
#[derive(Debug)]
pub struct Incoming {
    /// Anything but CONNECT is to be refused with 400.
    pub method: Method,
    /// Where the CONNECT wants to go, unchecked; `None` when the request is not a plain CONNECT: it has no authority,
    /// or is an extended CONNECT (RFC 8441).
    pub authority: Option<String>,
    /// The other headers, unchecked.
    pub headers: HeaderMap,
    /// The answer.
    pub respond: Respond,
}

/// The answer to one request. Dropping it resets the request.
pub struct Respond {
    send: SendResponse<Bytes>,
    recv: RecvStream,
}

impl Respond {
    /// Ends when the peer has given the request up, so that a dial on its behalf can be given up too. Cancel safe.
    pub async fn withdrawn(&mut self) {
        let reset = poll_fn(|cx| self.send.poll_reset(cx)).await;
        tracing::trace!(?reset, "request given up");
    }

    /// Answers with `status` and nothing else. It has no effect on a request that the peer has given up.
    pub fn refuse(mut self, status: StatusCode) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        if let Err(error) = self.send.send_response(response, true) {
            tracing::debug!(%error, %status, "the peer gave the request up before its refusal");
        }
    }

    /// Answers with 200 and `headers`. Fails when the peer has given the request up.
    pub fn accept(mut self, headers: HeaderMap) -> Result<Tunnel, h2::Error> {
        let mut response = Response::new(());
        *response.headers_mut() = headers;
        let send = self.send.send_response(response, false)?;
        Ok(Tunnel::server(send, self.recv))
    }
}

impl fmt::Debug for Respond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Respond").field("stream", &self.send.stream_id()).finish_non_exhaustive()
    }
}

pub(crate) async fn serve<IO, H, F>(
    io: IO,
    mut phase: watch::Receiver<Phase>,
    timeouts: &Timeouts,
    handler: H,
) -> Result<(), ServeError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send,
    H: Fn(Incoming) -> F + Send,
    F: Future<Output = ()> + Send + 'static,
{
    let mut builder = Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .max_concurrent_streams(STREAMS);
    let mut connection = match timeout(timeouts.h2_handshake, builder.handshake(io)).await {
        Ok(result) => result.map_err(ServeError::H2)?,
        Err(_elapsed) => return Err(ServeError::H2Timeout(timeouts.h2_handshake)),
    };
    let pings = connection.ping_pong();
    let mut dead = pin!(keepalive::dead(pings, timeouts.ping_interval, timeouts.ping_timeout));
    let mut tasks = JoinSet::new();
    let mut told = Phase::Serving;
    let end = loop {
        tokio::select! {
            // The signal to end comes first: a busy peer must not postpone it.
            biased;
            now = moved_on(&mut phase, told) => {
                told = now;
                match told {
                    Phase::Serving => {}
                    Phase::Draining => connection.graceful_shutdown(),
                    Phase::Cut => break Ok(()),
                }
            }
            request = connection.accept() => match request {
                // Requests that were reset no longer count as streams, but their handlers still run.
                Some(Ok((_, mut send))) if tasks.len() >= HANDLERS => {
                    send.send_reset(h2::Reason::REFUSED_STREAM);
                }
                Some(Ok((request, send))) => {
                    tasks.spawn(handler(Incoming::new(request, send)));
                }
                Some(Err(error)) => break Err(ServeError::H2(error)),
                None => break Ok(()),
            },
            Some(ended) = tasks.join_next() => report(ended),
            () = &mut dead => break Err(ServeError::Silent(timeouts.ping_timeout)),
        }
    };
    if told == Phase::Cut {
        tasks.shutdown().await;
        farewell(&mut connection, timeouts.close).await;
    }
    drop(connection);
    // Streams that were open have failed now. Others have ended, yet what they brought may still be on its way to a
    // slow application.
    while !tasks.is_empty() {
        tokio::select! {
            biased;
            () = cut(&mut phase) => tasks.shutdown().await,
            Some(ended) = tasks.join_next() => report(ended),
        }
    }
    end
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "the handler of a request panicked");
    }
}

/// Waits until `phase` differs from what was last `told`.
async fn moved_on(phase: &mut watch::Receiver<Phase>, told: Phase) -> Phase {
    phase.wait_for(|now| *now != told).await.map_or(Phase::Cut, |now| *now)
}

/// Waits for [`Phase::Cut`].
async fn cut(phase: &mut watch::Receiver<Phase>) {
    // A dropped sender is a cut as well.
    drop(phase.wait_for(|now| *now == Phase::Cut).await);
}

/// Sends the resets of the streams that were cut, and `GOAWAY`, as far as the peer takes them.
async fn farewell<IO: AsyncRead + AsyncWrite + Unpin>(
    connection: &mut Connection<IO, Bytes>,
    patience: Duration,
) {
    connection.graceful_shutdown();
    let closed = timeout(patience, poll_fn(|cx| connection.poll_closed(cx))).await;
    tracing::debug!(?closed, "cut a connection");
}

impl Incoming {
    fn new(request: Request<RecvStream>, send: SendResponse<Bytes>) -> Self {
        let (parts, recv) = request.into_parts();
        let extended = parts.extensions.get::<h2::ext::Protocol>().is_some();
        let authority = parts.uri.authority().filter(|_| !extended).map(ToString::to_string);
        Self {
            method: parts.method,
            authority,
            headers: parts.headers,
            respond: Respond { send, recv },
        }
    }
}
