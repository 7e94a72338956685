//! Asks the name server that the pod has asked, from where the pod stands.
//!
//! A question and its answer pass byte for byte but for the identifier, so that whatever two ends know of DNS that this
//! does not (options, types, signatures) works as without it. So does retrying: a lost datagram is asked for again by the
//! client, and one that was cut short is asked for again by TCP, which is carried by TCP.

use std::{
    io::{self, Read as _},
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncWrite, Interest},
    net::UdpSocket,
    time::{Instant, timeout},
};

use crate::{
    cache::{Cache, Key},
    host::{Asked, Event, Host},
    stream,
    wire::{self, Request, Transport},
};

/// How long a name server may take. Clients wait for as long by default (resolv.conf(5)).
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Room for an answer, also one that is longer than the client has said it takes.
const SHORTEST_ROOM: usize = 4096;

/// Why a name server's answer is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    /// It did not answer in time.
    #[error("ask name server {server}: no answer within {PATIENCE:?}")]
    Silent {
        /// The server.
        server: SocketAddr,
    },
    /// It cannot be reached.
    #[error("ask name server {server}")]
    Unreachable {
        /// The server.
        server: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It answered something else by a stream, which it cannot be asked again.
    #[error("ask name server {server}: it answers another question")]
    Mismatch {
        /// The server.
        server: SocketAddr,
    },
}

/// Asks for one pod.
#[derive(Debug)]
pub(crate) struct Forwarder {
    cache: Mutex<Cache>,
}

impl Forwarder {
    pub(crate) fn new() -> Self {
        Self { cache: Mutex::new(Cache::new()) }
    }

    /// What `server` says, or said not long ago.
    pub(crate) async fn ask<H: Host>(
        &self,
        host: &H,
        server: SocketAddr,
        request: &Request,
        asked: Asked<'_>,
    ) -> Result<Vec<u8>, ForwardError> {
        let limit = usize::from(request.limit(asked.transport));
        let key = request.cache_key().map(|question| (server, question));
        if let Some(mut answer) = key.as_ref().and_then(|key| self.kept(key, limit)) {
            request.adopt(&mut answer);
            return Ok(answer);
        }
        host.observe(Event::Upstream(asked));
        let start = Instant::now();
        let asking = async {
            match asked.transport {
                Transport::Udp => by_udp(host, server, request).await,
                Transport::Tcp => by_tcp(host, server, request).await,
            }
        };
        let answer = match timeout(PATIENCE, asking).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(ForwardError::Silent { server }),
        };
        let answer = answer.inspect_err(|_| host.observe(Event::UpstreamFailed(asked)))?;
        host.observe(Event::UpstreamAnswered(asked, start.elapsed()));
        if let Some((key, life)) = key.zip(wire::life(&answer)) {
            self.cache.lock().unwrap_or_else(PoisonError::into_inner).put(key, &answer, life);
        }
        Ok(answer)
    }

    fn kept(&self, key: &Key, limit: usize) -> Option<Vec<u8>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(key, limit)
    }
}

/// One datagram there, one back. Others are passed over: they may be guesses of somebody who would like to answer.
async fn by_udp<H: Host>(
    host: &H,
    server: SocketAddr,
    request: &Request,
) -> Result<Vec<u8>, ForwardError> {
    let unreachable = |source| ForwardError::Unreachable { server, source };
    // A port and an identifier of its own (RFC 5452 §9.2).
    let id = rand::random();
    let socket = host.dial_udp(server).and_then(UdpSocket::from_std).map_err(unreachable)?;
    socket.send(&request.with_id(id)).await.map_err(unreachable)?;
    // Only what has come needs room. An error is waited for, too: that nothing listens there, for one.
    let room = usize::from(request.limit(Transport::Udp)).max(SHORTEST_ROOM);
    let receive = || {
        let mut answer = vec![0; room];
        let len = (&*SockRef::from(&socket)).read(&mut answer)?;
        answer.truncate(len);
        Ok(answer)
    };
    loop {
        let news = Interest::READABLE | Interest::ERROR;
        let mut answer = socket.async_io(news, receive).await.map_err(unreachable)?;
        if wire::accepts(request, id, &answer) {
            request.adopt_id(&mut answer);
            return Ok(answer);
        }
    }
}

async fn by_tcp<H: Host>(
    host: &H,
    server: SocketAddr,
    request: &Request,
) -> Result<Vec<u8>, ForwardError> {
    let unreachable = |source| ForwardError::Unreachable { server, source };
    let id = rand::random();
    let mut connection = host.dial_tcp(server).await.map_err(unreachable)?;
    stream::write(&mut connection, &request.with_id(id)).await.map_err(unreachable)?;
    let mut frames = stream::Frames::default();
    let answer = frames.next(&mut connection).await.map_err(unreachable)?;
    let closed = || unreachable(io::ErrorKind::UnexpectedEof.into());
    let mut answer = answer.ok_or_else(closed)?;
    if !wire::accepts(request, id, &answer) {
        return Err(ForwardError::Mismatch { server });
    }
    request.adopt_id(&mut answer);
    Ok(answer)
}

/// A transfer of a zone (RFC 5936): the one question whose answer is many messages. They pass until the server has said
/// nothing for a while, or either end is gone.
pub(crate) async fn transfer<H: Host>(
    host: &H,
    server: SocketAddr,
    request: &Request,
    client: &mut (impl AsyncWrite + Unpin),
) -> Result<(), ForwardError> {
    let unreachable = |source| ForwardError::Unreachable { server, source };
    let mut connection = host.dial_tcp(server).await.map_err(unreachable)?;
    stream::write(&mut connection, request.bytes()).await.map_err(unreachable)?;
    let mut frames = stream::Frames::default();
    while let Ok(message) = timeout(PATIENCE, frames.next(&mut connection)).await {
        let Some(message) = message.map_err(unreachable)? else { return Ok(()) };
        stream::write(client, &message).await.map_err(unreachable)?;
    }
    Ok(())
}
