//! HBONE connections, shared: streams to the same peer under the same identities go over one connection.
//!
//! For each key at most one dial is in flight, and all who wait for it get its outcome. A connection takes streams up
//! to its limit and takes more as streams end; beyond that another one is dialled. What the key holds, and how to dial
//! for it, is the caller's.
//!
//! The life of a connection: dialled → in rotation → out of rotation (`GOAWAY`, failure, idle, or retired) → ended, once
//! its last stream has, or cut. Its task belongs to the pool: dropping the pool ends connections and tunnels.

use std::{
    hash::Hash,
    net::IpAddr,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderMap, Method, Request, StatusCode, uri::Authority};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use self::table::{Checkout, Dialing, Pooled, Table};
use super::{
    Tunnel,
    client::{ConnectError, Established, Lost},
};
use crate::Timeouts;

mod slots;
mod table;
#[cfg(test)]
mod tests;

pub(super) use slots::Slot;

/// How often a request goes to another connection because the one it was on had gone away.
const RETRIES: usize = 3;
/// How often it is looked at, while a request waits for its answer, whether its connection's address has gone.
const STALE_CHECK: Duration = Duration::from_millis(250);

/// The limits of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// Streams on one connection: 100, or fewer where the peer says so.
    pub streams: usize,
    /// Connections altogether: 4096.
    pub connections: usize,
    /// The deadlines.
    pub timeouts: Timeouts,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { streams: 100, connections: 4096, timeouts: Timeouts::default() }
    }
}

/// What to ask of a peer.
#[derive(Clone, Debug)]
pub struct Connect {
    /// `:authority`: the address or the host name with port to reach.
    pub authority: Authority,
    /// The other headers.
    pub headers: HeaderMap,
}

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no connection to the peer. Everyone who waited for the dial gets the same error.
    #[error("no HBONE connection to the peer")]
    Connect(#[source] Arc<ConnectError>),
    /// The peer refused the CONNECT: 400 not for it, 401 denied by its policy, 503 its application unreachable.
    #[error("the peer answered the CONNECT with HTTP status {}", .0.as_u16())]
    Refused(StatusCode),
    /// The peer did not answer the CONNECT.
    #[error("no answer to the CONNECT within {}s", .0.as_secs_f32())]
    Timeout(Duration),
    /// The connection or the stream broke before the answer.
    #[error("the connection to the peer broke before it answered the CONNECT")]
    Broken(#[source] h2::Error),
    /// The address that the connection was dialled from has gone, so that no answer can arrive.
    #[error("the address that the connection to the peer was dialled from has gone")]
    Stale,
    /// All connections are in use.
    #[error("{0} HBONE connections are open and in use; no other fits")]
    Full(usize),
    /// The pool has been dropped, or the dial panicked.
    #[error("the dial was abandoned")]
    Abandoned,
}

/// What connections are shared by: the peer's address and all that tells whether two callers may share.
pub trait Key: Clone + Eq + Hash + Send + Sync + 'static {}

impl<K: Clone + Eq + Hash + Send + Sync + 'static> Key for K {}

/// Connections by key; see the module's documentation.
#[derive(Debug)]
pub struct Pool<K> {
    table: Arc<Table<K>>,
    tasks: Mutex<JoinSet<()>>,
}

impl<K: Key> Pool<K> {
    /// An empty pool. A connection whose local address `owns` denies is not used again; its streams are left to its
    /// keepalive, as the address may come back.
    pub fn new(
        options: PoolOptions,
        owns: impl Fn(IpAddr) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { table: Arc::new(Table::new(options, Box::new(owns))), tasks: Mutex::default() }
    }

    /// The connections that are up or being dialled.
    pub fn connections(&self) -> usize {
        self.table.connections()
    }

    /// Opens a tunnel to the peer behind `key`, over a new connection from `connect` if none has room.
    ///
    /// `connect` runs in a task of the pool: a caller that gives up leaves the connection to those who wait with it.
    /// Only a connection taken from the pool that turns out to be gone is replaced; what the peer itself answers is
    /// final. Dropping the future gives the request up (`CANCEL`).
    pub async fn open<C, F>(
        &self,
        key: K,
        connect: C,
        request: Connect,
    ) -> Result<Tunnel, OpenError>
    where
        C: FnOnce() -> F + Send,
        F: Future<Output = Result<Established, ConnectError>> + Send + 'static,
    {
        let mut connect = Some(connect);
        let mut retries = RETRIES;
        loop {
            let (pooled, slot) = self.checkout(&key, &mut connect).await?;
            let error = match self.request(&pooled, slot, &request).await {
                Ok(tunnel) => return Ok(tunnel),
                Err(error) => error,
            };
            if matches!(error, OpenError::Timeout(_)) {
                // Whatever the peer is busy with, or gone for: the next request shall not wait behind it.
                self.table.evict(&key, &pooled.slots);
            }
            if is_gone(&error) {
                self.table.evict(&key, &pooled.slots);
                if connect.is_some() && retries > 0 {
                    retries -= 1;
                    continue;
                }
            }
            return Err(error);
        }
    }

    /// A connection with room for one more stream.
    async fn checkout<C, F>(
        &self,
        key: &K,
        connect: &mut Option<C>,
    ) -> Result<(Arc<Pooled>, Slot), OpenError>
    where
        C: FnOnce() -> F + Send,
        F: Future<Output = Result<Established, ConnectError>> + Send + 'static,
    {
        loop {
            match self.table.checkout(key) {
                Checkout::Ready(pooled, slot) => return Ok((pooled, slot)),
                Checkout::Wait(mut dial) => {
                    let outcome = dial.wait_for(Option::is_some).await;
                    let failure = match outcome.as_deref() {
                        Ok(Some(Err(error))) => Some(OpenError::Connect(Arc::clone(error))),
                        Ok(_) => None,
                        Err(_dropped) => Some(OpenError::Abandoned),
                    };
                    drop(outcome);
                    if let Some(error) = failure {
                        return Err(error);
                    }
                }
                Checkout::Dial(dialing) => {
                    let Some(connect) = connect.take() else { return Err(OpenError::Abandoned) };
                    return self.dial(dialing, connect()).await;
                }
                Checkout::Full(connections) => return Err(OpenError::Full(connections)),
            }
        }
    }

    async fn dial<F>(
        &self,
        dialing: Dialing<K>,
        connect: F,
    ) -> Result<(Arc<Pooled>, Slot), OpenError>
    where
        F: Future<Output = Result<Established, ConnectError>> + Send + 'static,
    {
        let (first, outcome) = oneshot::channel();
        self.spawn(run(dialing, connect, first, self.table.options().timeouts));
        match outcome.await {
            Ok(outcome) => outcome.map_err(OpenError::Connect),
            Err(_dropped) => Err(OpenError::Abandoned),
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    async fn request(
        &self,
        pooled: &Pooled,
        slot: Slot,
        request: &Connect,
    ) -> Result<Tunnel, OpenError> {
        let mut message = Request::new(());
        *message.method_mut() = Method::CONNECT;
        *message.uri_mut() = request.authority.clone().into();
        *message.headers_mut() = request.headers.clone();
        let exchange = async {
            let mut send = pooled.send.clone().ready().await?;
            let (response, stream) = send.send_request(message, false)?;
            Ok((response.await?, stream))
        };
        let after = self.table.options().timeouts.connect_response;
        let (response, stream) = tokio::select! {
            result = timeout(after, exchange) => match result {
                Ok(result) => result.map_err(OpenError::Broken)?,
                Err(_elapsed) => return Err(OpenError::Timeout(after)),
            },
            () = self.stale(pooled) => return Err(OpenError::Stale),
        };
        if response.status() != StatusCode::OK {
            return Err(OpenError::Refused(response.status()));
        }
        Ok(Tunnel::client(stream, response.into_body(), pooled.local, slot))
    }

    /// Ends when the connection has become stale.
    async fn stale(&self, pooled: &Pooled) {
        loop {
            sleep(STALE_CHECK).await;
            if self.table.is_stale(pooled) {
                return;
            }
        }
    }
}

/// Whether the connection is of no use for new streams, and the request has not been processed (RFC 9113 §8.7), or
/// nothing but a CONNECT without data can have been.
fn is_gone(error: &OpenError) -> bool {
    match error {
        OpenError::Broken(error) => {
            !error.is_reset() || error.reason() == Some(h2::Reason::REFUSED_STREAM)
        }
        OpenError::Stale => true,
        OpenError::Connect(_)
        | OpenError::Refused(_)
        | OpenError::Timeout(_)
        | OpenError::Full(_)
        | OpenError::Abandoned => false,
    }
}

/// The task of one connection.
async fn run<K, F>(
    dialing: Dialing<K>,
    connect: F,
    first: oneshot::Sender<First>,
    timeouts: Timeouts,
) where
    K: Key,
    F: Future<Output = Result<Established, ConnectError>> + Send,
{
    let Established { send, driver, local, retire, mut cut, .. } = match connect.await {
        Ok(established) => established,
        Err(error) => {
            let error = Arc::new(error);
            dialing.failed(&error);
            // The caller may have given up, and then nobody is left to be told.
            drop(first.send(Err(error)));
            return;
        }
    };
    let (rotation, pooled, slot) = dialing.succeeded(send, local);
    drop(first.send(Ok((pooled, slot))));
    let mut driver = pin!(driver);
    let left = tokio::select! {
        end = &mut driver => Left::Ended(end),
        () = rotation.idle(timeouts.idle) => Left::Idle,
        () = retire => Left::Retired,
        () = &mut cut => Left::Cut,
    };
    drop(rotation);
    // Out of rotation nobody holds the sender any more, which makes HTTP/2 close the connection after its last stream.
    match left {
        Left::Ended(end) => tracing::debug!(?end, "an HBONE connection ended"),
        Left::Idle => {
            let closed = timeout(timeouts.close, driver).await;
            tracing::debug!(?closed, "an idle HBONE connection was released");
        }
        Left::Retired => tokio::select! {
            end = &mut driver => tracing::debug!(?end, "a retired HBONE connection ended"),
            () = cut => tracing::debug!("a retired HBONE connection was cut"),
        },
        Left::Cut => tracing::debug!("an HBONE connection was cut"),
    }
}

/// How a connection left rotation.
enum Left {
    Ended(Result<(), Lost>),
    Idle,
    Retired,
    Cut,
}

/// The outcome of a dial, for the caller whose it is.
type First = Result<(Arc<Pooled>, Slot), Arc<ConnectError>>;

/// The outcome of a dial, for those who wait for it; `None` while it lasts.
type Outcome = watch::Receiver<Option<Result<(), Arc<ConnectError>>>>;
