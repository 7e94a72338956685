//! The delta discovery protocol: what changed, to whom it matters, once.
//!
//! A stream is pulled by its connection: while the client takes nothing, nothing is made for it. Of each type at most one
//! response is on its way; what changes meanwhile is in the next one. Policies go before the workloads that name them,
//! and are taken back after.

mod subscription;

#[cfg(test)]
mod tests;

use std::{pin::Pin, sync::Arc, time::Duration};

use culvert_proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as Wire,
    aggregated_discovery_service_server::AggregatedDiscoveryService,
};
use futures::{Stream, StreamExt as _};
use prost::Message as _;
use prost_types::{Any, Struct, value::Kind as Value};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use self::subscription::{Subscription, TooMuch};
use crate::{
    callers::{Caller, Callers},
    metrics::{Connected, Metrics},
    resource::{Resource, Type},
    store::{Reader, Store},
};

/// How long a client may take to answer a response. One that lost it would never be told anything again.
const ANSWER: Duration = Duration::from_mins(1);
/// Whole meshes that are being sent at once: each is a copy in memory.
const WHOLE: usize = 8;

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct Discovery {
    store: Arc<Store>,
    callers: Arc<Callers>,
    metrics: Metrics,
    whole: Arc<Semaphore>,
    draining: CancellationToken,
}

impl Discovery {
    pub(crate) fn new(
        store: Arc<Store>,
        callers: Arc<Callers>,
        metrics: Metrics,
        draining: CancellationToken,
    ) -> Self {
        Self { store, callers, metrics, whole: Arc::new(Semaphore::new(WHOLE)), draining }
    }

    /// The responses to `requests` of a client on `node`, if that is known.
    pub(crate) fn stream<S>(&self, requests: S, node: Option<String>) -> Client<S>
    where
        S: Stream<Item = Result<DeltaDiscoveryRequest, Status>> + Unpin,
    {
        Client {
            requests,
            changed: self.store.subscribe(),
            reader: self.store.reader(),
            node,
            address: None,
            authorization: None,
            nonce: 0,
            metrics: self.metrics.clone(),
            _connected: self.metrics.connected(),
            whole: Arc::clone(&self.whole),
            permit: None,
            draining: self.draining.clone(),
        }
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Discovery {
    type DeltaAggregatedResourcesStream =
        Pin<Box<dyn Stream<Item = Result<DeltaDiscoveryResponse, Status>> + Send>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<tonic::Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let caller = self.callers.identify(request.metadata(), request.extensions());
        let caller = caller.map_err(|refusal| {
            tracing::warn!(%refusal, "discovery refused");
            Status::unauthenticated(refusal.to_string())
        })?;
        tracing::info!(%caller, "node connected");
        let node = match &caller {
            Caller::Node { node, .. } => Some(node.clone()),
            Caller::Account { .. } => None,
        };
        let client = self.stream(request.into_inner(), node);
        let responses = futures::stream::unfold(Some((client, caller)), |state| async {
            let (mut client, caller) = state?;
            match client.next().await {
                Ok(Some(response)) => Some((Ok(response), Some((client, caller)))),
                Ok(None) => {
                    tracing::info!(%caller, "node disconnected");
                    None
                }
                Err(status) => {
                    tracing::info!(%caller, reason = status.message(), "node disconnected");
                    Some((Err(status), None))
                }
            }
        });
        Ok(Response::new(Box::pin(responses)))
    }
}

/// One client's stream.
pub(crate) struct Client<S> {
    requests: S,
    changed: watch::Receiver<u64>,
    reader: Reader,
    node: Option<String>,
    address: Option<Subscription>,
    authorization: Option<Subscription>,
    nonce: u64,
    metrics: Metrics,
    _connected: Connected,
    whole: Arc<Semaphore>,
    /// Held while a whole mesh is on its way into the connection.
    permit: Option<OwnedSemaphorePermit>,
    draining: CancellationToken,
}

impl<S> Client<S>
where
    S: Stream<Item = Result<DeltaDiscoveryRequest, Status>> + Unpin,
{
    /// The next response; `None` once the client has ended the stream. Not cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Option<DeltaDiscoveryResponse>, Status> {
        // To be asked for the next one means that the last one is with the connection.
        self.permit = None;
        loop {
            // Marked before looking, so that what changes meanwhile wakes it again.
            self.changed.mark_unchanged();
            if self.is_first() {
                let whole = Arc::clone(&self.whole);
                self.permit = whole.acquire_owned().await.ok();
            }
            if let Some(response) = self.response()? {
                return Ok(Some(response));
            }
            self.permit = None;
            let deadline = self.deadline();
            tokio::select! {
                request = self.requests.next() => match request {
                    Some(Ok(request)) => self.handle(request)?,
                    // The client went away, which is not worth a status that nobody reads.
                    Some(Err(_)) | None => return Ok(None),
                },
                changed = self.changed.changed() => if changed.is_err() {
                    return Err(Status::unavailable("the control plane stops"));
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    return Err(Status::aborted("a response was not answered for a minute"));
                }
                () = self.draining.cancelled() => {
                    return Err(Status::unavailable("the control plane stops"));
                }
            }
        }
    }

    fn handle(&mut self, request: DeltaDiscoveryRequest) -> Result<(), Status> {
        if self.node.is_none() {
            let metadata = request.node.as_ref().and_then(|node| node.metadata.as_ref());
            self.node = metadata.and_then(node_name);
        }
        let Some(kind) = Type::of_url(&request.type_url) else {
            tracing::debug!(type_url = request.type_url, "asked for what is not served");
            return Ok(());
        };
        let slot = match kind {
            Type::Address => &mut self.address,
            Type::Authorization => &mut self.authorization,
        };
        let subscription = slot.get_or_insert_with(|| Subscription::new(kind));
        if let Some(answered) = subscription.answer(&request.response_nonce) {
            self.metrics.answered(answered);
            if let Some(error) = &request.error_detail {
                self.metrics.rejected(kind);
                tracing::warn!(
                    kind = kind.url(),
                    node = self.node,
                    error = shown(&error.message),
                    "node refused resources"
                );
            }
        }
        subscription
            .update(
                request.resource_names_subscribe,
                request.resource_names_unsubscribe,
                request.initial_resource_versions,
            )
            .map_err(|TooMuch| {
                Status::resource_exhausted(
                    "too many resources are asked for by name; subscribe to all",
                )
            })
    }

    /// Whether a response to a first request, and so maybe the whole mesh, is due.
    fn is_first(&self) -> bool {
        let subscriptions = [&self.address, &self.authorization];
        subscriptions.into_iter().flatten().any(Subscription::is_first)
    }

    /// When the client has to have answered what is on its way.
    fn deadline(&self) -> Option<Instant> {
        let subscriptions = [&self.address, &self.authorization];
        let sent = subscriptions.into_iter().flatten().filter_map(Subscription::sent);
        sent.min().map(|sent| sent + ANSWER)
    }

    /// What is to be told now, if anything is.
    fn response(&mut self) -> Result<Option<DeltaDiscoveryResponse>, Status> {
        let started = Instant::now();
        let view = self.reader.store().read();
        let node = self.node.as_deref();
        // Nobody names a policy before it is there.
        let later = self.address.as_ref().is_some_and(|address| address.lags(&view));
        let mut told = None;
        for subscription in [&mut self.authorization, &mut self.address].into_iter().flatten() {
            let delta = subscription.next(&view, node, later).map_err(|_forgotten| {
                self.metrics.failed();
                Status::aborted("too far behind; connect again")
            })?;
            if let Some(delta) = delta {
                self.reader.told(subscription.kind(), view.last());
                told = Some((subscription, delta));
                break;
            }
        }
        drop(view);
        let Some((subscription, delta)) = told else { return Ok(None) };
        self.nonce += 1;
        let kind = subscription.kind();
        let nonce = self.nonce.to_string();
        let response = DeltaDiscoveryResponse {
            system_version_info: delta.number.to_string(),
            resources: delta.resources.iter().map(|resource| wire(resource)).collect(),
            type_url: kind.url().to_owned(),
            nonce: nonce.clone(),
            removed_resources: delta.removed.iter().map(ToString::to_string).collect(),
            control_plane: None,
        };
        subscription.send(nonce);
        self.metrics.pushed(kind, response.encoded_len(), started.elapsed());
        tracing::debug!(
            kind = kind.url(),
            node = self.node,
            resources = delta.resources.len(),
            removed = delta.removed.len(),
            "pushed"
        );
        Ok(Some(response))
    }
}

fn wire(resource: &Resource) -> Wire {
    Wire {
        version: resource.version.to_string(),
        resource: Some(Any {
            type_url: resource.kind.url().to_owned(),
            value: resource.body.to_vec(),
        }),
        name: resource.name.to_string(),
        aliases: resource.aliases.iter().map(ToString::to_string).collect(),
        ttl: None,
    }
}

fn node_name(metadata: &Struct) -> Option<String> {
    match metadata.fields.get("NODE_NAME")?.kind.as_ref()? {
        Value::StringValue(name) if !name.is_empty() => Some(name.clone()),
        _ => None,
    }
}

/// What a client wrote, fit for one line of a log.
fn shown(text: &str) -> String {
    text.chars().take(400).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
