//! The record of one flow: begun when accepted, opened when its two ends are known, ended when dropped.
//!
//! ```text
//! begin ─▶ Pending ──open──▶ FlowRecord ──finish / fail / drop──▶ closed
//!             └──refuse / drop──▶ denied
//! ```

use std::error::Error;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_mesh::Identity;
use culvert_mesh::error::chain;
use culvert_mesh::reason::ResponseFlag;
use culvert_mesh::service::Service;
use culvert_mesh::workload::Workload;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::access_log;
use crate::claims::Claims;
use crate::denial::Denial;
use crate::metrics::{Metrics, OpenFlow};
use crate::transferred::Transferred;

/// Which way a connection goes, as its pod sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the mesh to the pod.
    Inbound,
    /// From the pod to the mesh.
    Outbound,
}

impl Direction {
    /// As the access log spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
        }
    }

    /// As the `reporter` label spells it: which end of the connection reports.
    pub(crate) const fn reporter(self) -> &'static str {
        match self {
            Self::Inbound => "destination",
            Self::Outbound => "source",
        }
    }
}

/// How the connection to the mesh is secured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SecurityPolicy {
    /// Both ends proved who they are.
    MutualTls,
    /// Plaintext, as far as the proxy knows.
    Unknown,
}

/// One end of a flow.
#[derive(Clone, Debug, Default)]
pub struct Party {
    /// What the mesh knows of it.
    pub workload: Option<Arc<Workload>>,
    /// Who it is: proved by TLS, or our own pod.
    pub identity: Option<Identity>,
    /// What it says of itself, where the mesh knows nothing of it.
    pub claims: Option<Arc<Claims>>,
}

/// What is known of a flow once it is decided.
#[derive(Clone, Debug)]
pub struct Flow {
    /// What is connected to, or what the peer connected to (port 15008 of HBONE).
    pub dst: SocketAddr,
    /// The authority of the CONNECT, with HBONE.
    pub hbone_authority: Option<Arc<str>>,
    /// Who opened the connection.
    pub source: Party,
    /// Whom it is for.
    pub destination: Party,
    /// The service it is for.
    pub service: Option<Arc<Service>>,
    /// How it is secured.
    pub security: SecurityPolicy,
    /// The trace that both ends log it under (W3C Trace Context, `trace-id`).
    pub trace_id: Option<u128>,
}

/// Begins records. Clones share everything.
#[derive(Clone, Debug)]
pub struct Observe {
    metrics: Arc<Metrics>,
}

impl Observe {
    /// Registers the metric families; `tag` is this build's version, shown by `istio_build`.
    pub fn register(registry: &mut Registry, tag: &str) -> Self {
        Self { metrics: Arc::new(Metrics::register(registry, tag)) }
    }

    /// Counts an accepted socket as open until the guard is dropped. One carries many flows with HBONE.
    pub fn socket(&self, direction: Direction) -> OpenSocket {
        let gauge = self.metrics.sockets(direction);
        gauge.inc();
        OpenSocket(gauge)
    }

    /// Begins the record of a connection, or of a CONNECT, from `src` to what it was sent to.
    pub fn begin(&self, direction: Direction, src: SocketAddr, dst: SocketAddr) -> Pending {
        Pending {
            metrics: Arc::clone(&self.metrics),
            direction,
            src,
            dst,
            began: Instant::now(),
            refused: None,
        }
    }

    /// The exposition of `registry` in `OpenMetrics` text, with the bytes of open flows as of now.
    pub fn encode(&self, registry: &Registry) -> Result<String, fmt::Error> {
        self.settle();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry)?;
        Ok(text)
    }

    /// Brings the byte counters up to date with what open flows have carried; [`Self::encode`] does so itself.
    pub fn settle(&self) {
        self.metrics.settle();
    }
}

/// An accepted socket, counted while it is held.
#[derive(Debug)]
pub struct OpenSocket(prometheus_client::metrics::gauge::Gauge);

impl Drop for OpenSocket {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A connection of which nothing is known yet but its addresses. Dropped, it was refused.
#[derive(Debug)]
#[must_use = "dropping it records a refusal"]
pub struct Pending {
    metrics: Arc<Metrics>,
    direction: Direction,
    src: SocketAddr,
    dst: SocketAddr,
    began: Instant,
    refused: Option<Refused>,
}

#[derive(Debug)]
enum Refused {
    /// Became a [`FlowRecord`].
    Not,
    Because(Denial, String),
}

impl Pending {
    /// The flow is decided and about to be carried, or denied with a flag: it counts as opened.
    pub fn open(mut self, flow: Flow) -> FlowRecord {
        self.refused = Some(Refused::Not);
        let transferred = Arc::new(Transferred::default());
        let opened = self.metrics.open(self.direction, &flow, Arc::clone(&transferred));
        let record = FlowRecord {
            direction: self.direction,
            src: self.src,
            flow,
            began: self.began,
            transferred,
            end: End::Aborted,
            opened,
        };
        access_log::opened(&record);
        record
    }

    /// The connection is refused for `error`.
    pub fn refuse(mut self, reason: Denial, error: &(dyn Error + 'static)) {
        self.refused = Some(Refused::Because(reason, chain(error)));
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let abandoned =
            || Refused::Because(Denial::Abandoned, "ended before it was decided".to_owned());
        if let Refused::Because(reason, error) = self.refused.take().unwrap_or_else(abandoned) {
            self.metrics.deny(reason);
            access_log::denied(self.direction, self.src, self.dst, &error);
        }
    }
}

/// An open flow. Dropped, it is closed: without [`Self::finish`] or [`Self::fail`] as one that was cut.
#[derive(Debug)]
#[must_use = "dropping it records the end of the flow"]
pub struct FlowRecord {
    pub(crate) direction: Direction,
    pub(crate) src: SocketAddr,
    pub(crate) flow: Flow,
    began: Instant,
    transferred: Arc<Transferred>,
    end: End,
    opened: OpenFlow,
}

#[derive(Debug)]
enum End {
    Complete,
    Failed(ResponseFlag, String),
    Aborted,
}

impl FlowRecord {
    /// The flow's byte counts, for whoever copies its bytes. Bytes counted after the record's end are lost.
    pub fn transferred(&self) -> Arc<Transferred> {
        Arc::clone(&self.transferred)
    }

    /// Both ends are done.
    pub fn finish(mut self) {
        self.end = End::Complete;
    }

    /// The flow ends here because of `error`, which `flag` classifies.
    pub fn fail(mut self, flag: ResponseFlag, error: &(dyn Error + 'static)) {
        self.end = End::Failed(flag, chain(error));
    }

    /// Bytes that the proxy's pod sent and received.
    pub(crate) fn sent_and_received(&self) -> (u64, u64) {
        let (request, response) = (self.transferred.request(), self.transferred.response());
        match self.direction {
            Direction::Outbound => (request, response),
            Direction::Inbound => (response, request),
        }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

impl Drop for FlowRecord {
    fn drop(&mut self) {
        let (flag, error) = match &self.end {
            End::Complete => (ResponseFlag::None, None),
            End::Failed(flag, error) => (*flag, Some(error.as_str())),
            End::Aborted => (ResponseFlag::None, Some("connection cut before its end")),
        };
        self.opened.close(flag);
        access_log::closed(self, flag, error);
    }
}

#[cfg(test)]
mod tests;
