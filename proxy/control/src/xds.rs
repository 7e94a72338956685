//! The client of the incremental aggregated discovery protocol (xDS, delta variant): keeps the mesh's records in step
//! with a control plane.
//!
//! One stream carries both types of records. Whatever ends it, the records stay, and the next stream begins with what is
//! held, so that the control plane sends only what changed, and says what is gone. Where the records go is the
//! [`Sink`]'s business; on what they mean see [`convert`](crate::convert).

mod backoff;
mod demand;
mod metrics;
mod node;
mod response;
mod session;

#[cfg(test)]
mod tests;

use std::time::Duration;

use culvert_mesh::Update;
use culvert_mesh::error::chain;
use culvert_proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use futures::channel::mpsc;
use futures::{SinkExt as _, future};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::Status;

use self::backoff::{Backoff, End, end_by};
pub use self::demand::{DEMAND_DEADLINE, DemandError, Key, OnDemand};
use self::metrics::Metrics;
pub use self::node::NodeIdentity;
use self::session::{Intake, Kind, Session};
use crate::server::{Channel, ConnectError, Server};

/// The largest response: a mesh of some hundred thousand workloads in one.
const MAX_MESSAGE: usize = 200 << 20;
/// A server that has nothing to say on a new stream by then is left for another one.
const FIRST_ANSWER: Duration = Duration::from_mins(1);
/// A server that does not take in what it is told for so long is given up.
const SEND_DEADLINE: Duration = Duration::from_secs(30);
/// Requests on their way to a server that does not read them.
const UNREAD: usize = 16;

/// Takes in what the control plane says.
pub trait Sink: Send {
    /// Applies `updates`, all of one response, in their order, and gives back what made them; that is of any size and
    /// makes each as it is taken. The control plane is told when it has returned.
    ///
    /// `None`: they are lost, and how many of them are applied is not known. The control plane is asked for everything
    /// again.
    fn apply<U>(&mut self, updates: U) -> impl Future<Output = Option<U>> + Send
    where
        U: Iterator<Item = Update> + Send + 'static;
}

/// Which records the control plane is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All, unasked.
    Whole,
    /// All policies, but workloads and services only on demand.
    OnDemand,
}

/// The client. Nothing happens unless [`Client::run`] runs.
#[derive(Debug)]
pub struct Client {
    server: Server,
    node: NodeIdentity,
    session: Session,
    on_demand: Option<OnDemand>,
    synced: watch::Sender<bool>,
    metrics: Metrics,
    backoff: Backoff,
    /// The largest response that is read, in bytes.
    largest: usize,
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the control plane ended the stream: {} ({})", .0.message(), .0.code())]
    Status(Box<Status>),
    #[error("the control plane said nothing within {} s", FIRST_ANSWER.as_secs())]
    Silent,
    #[error("the control plane took in nothing within {} s", SEND_DEADLINE.as_secs())]
    Deaf,
    #[error("the control plane ended the stream")]
    Complete,
    #[error("a response was not applied; everything is asked for again")]
    Lost,
}

impl StreamError {
    fn end(&self) -> End {
        match self {
            Self::Connect(_) => End::Unconnected,
            // A status with a cause is not the server's own word: the connection broke.
            Self::Status(status) if std::error::Error::source(&**status).is_some() => End::Routine,
            Self::Status(status) => end_by(status.code(), status.message()),
            Self::Silent | Self::Deaf | Self::Lost => End::Failed,
            Self::Complete => End::Complete,
        }
    }
}

impl From<Status> for StreamError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl Client {
    /// A client of `server` for this `node`; what it counts is added to `registry`.
    pub fn new(server: Server, node: NodeIdentity, mode: Mode, registry: &mut Registry) -> Self {
        let on_demand = match mode {
            Mode::Whole => None,
            Mode::OnDemand => Some(OnDemand::default()),
        };
        Self {
            server,
            node,
            session: Session::new(on_demand.clone()),
            on_demand,
            synced: watch::Sender::new(false),
            metrics: Metrics::register(registry),
            backoff: Backoff::new(),
            largest: MAX_MESSAGE,
        }
    }

    /// Asks for records one by one; `None` where the control plane sends all of them.
    pub fn on_demand(&self) -> Option<OnDemand> {
        self.on_demand.clone()
    }

    /// Becomes `true`, for good, once everything that the control plane sends unasked is in the sink: a response of each
    /// type was accepted whole.
    pub fn synced(&self) -> watch::Receiver<bool> {
        self.synced.subscribe()
    }

    /// Keeps `sink` in step with the control plane, until dropped.
    pub async fn run(mut self, mut sink: impl Sink) {
        loop {
            let mut answered = false;
            let Err(error) = self.stream(&mut sink, &mut answered).await;
            let end = error.end();
            self.metrics.ended(end);
            let wait = self.backoff.after(end, answered);
            let (error, reason) = (chain(&error), end.reason());
            match end {
                End::Routine | End::Complete if answered => {
                    tracing::info!(error, reason, ?wait, "xDS stream ended; connecting again");
                }
                _ => {
                    tracing::warn!(error, reason, ?wait, "no xDS stream; the state stays as it is");
                }
            }
            sleep(wait).await;
        }
    }

    /// One stream from its connection to its end.
    async fn stream(
        &mut self,
        sink: &mut impl Sink,
        answered: &mut bool,
    ) -> Result<std::convert::Infallible, StreamError> {
        let (channel, connection) = self.server.connect().await?;
        let drive = async {
            // The conversation learns by itself that it is over, once it has read what had come before.
            let _ended = connection.await;
            future::pending().await
        };
        tokio::select! {
            ended = self.converse(channel, sink, answered) => ended,
            never = drive => never,
        }
    }

    async fn converse(
        &mut self,
        channel: Channel,
        sink: &mut impl Sink,
        answered: &mut bool,
    ) -> Result<std::convert::Infallible, StreamError> {
        let (mut requests, outgoing) = mpsc::channel(UNREAD);
        for request in self.session.hello(&self.node.message()) {
            send(&mut requests, request).await?;
        }
        let call = response::stream(channel, self.server.origin(), self.largest, outgoing);
        let mut responses =
            timeout(FIRST_ANSWER, call).await.map_err(|_elapsed| StreamError::Silent)??;
        tracing::info!(server = %self.server.address, "xDS stream open");
        loop {
            let message = async {
                if *answered {
                    return Ok::<_, StreamError>(responses.message().await?);
                }
                let first = timeout(FIRST_ANSWER, responses.message()).await;
                Ok(first.map_err(|_elapsed| StreamError::Silent)??)
            };
            let response = tokio::select! {
                message = message => message?.ok_or(StreamError::Complete)?,
                change = changed(self.on_demand.as_ref()) => {
                    send(&mut requests, Session::subscription(change)).await?;
                    continue;
                }
            };
            if !*answered {
                *answered = true;
                self.metrics.connected();
            }
            let (kind, size) = (Kind::of(&response.type_url), response.size());
            // What is lost with it is asked for again.
            let fresh = Session::new(self.on_demand.clone());
            let intake = Intake::new(std::mem::replace(&mut self.session, fresh), response);
            let (session, received) = sink.apply(intake).await.ok_or(StreamError::Lost)?.finish();
            self.session = session;
            self.metrics.received(kind, size, received.refused);
            if let Some(detail) = &received.reply.error_detail {
                let refused = received.refused;
                tracing::warn!(
                    refused,
                    what = detail.message,
                    "resources of the control plane refused"
                );
            }
            if let Some(on_demand) = &self.on_demand {
                on_demand.answered(&received.answered);
            }
            send(&mut requests, received.reply).await?;
            if self.session.is_synced() {
                self.synced.send_if_modified(|synced| !std::mem::replace(synced, true));
            }
        }
    }
}

/// Waits for a change of what is asked for on demand.
async fn changed(on_demand: Option<&OnDemand>) -> demand::Change {
    match on_demand {
        Some(on_demand) => on_demand.changed().await,
        None => future::pending().await,
    }
}

async fn send(
    requests: &mut mpsc::Sender<DeltaDiscoveryRequest>,
    request: DeltaDiscoveryRequest,
) -> Result<(), StreamError> {
    match timeout(SEND_DEADLINE, requests.send(request)).await {
        // Without its receiver the call is over; the next response says why.
        Ok(Ok(()) | Err(_)) => Ok(()),
        Err(_elapsed) => Err(StreamError::Deaf),
    }
}
