//! The metric families of connections, and the counters of each open flow.
//!
//! Contract: names and labels of the `istio_` families are those that Istio's dashboards query.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use culvert_mesh::reason::ResponseFlag;
use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use self::labels::{Traffic, label};
use crate::claims::Shown;
use crate::denial::Denial;
use crate::flow::{Direction, Flow};
use crate::sharded::Sharded;
use crate::transferred::Transferred;

pub(crate) mod dns;
mod labels;

/// Every family, and the flows that are open.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// `istio_tcp_connections_opened_total`: flows decided, whether or not a connection came of it.
    opened: Family<Traffic, Counter>,
    /// `istio_tcp_connections_closed_total`: flows ended, with the flag they ended with.
    closed: Family<Traffic, Counter>,
    /// `istio_tcp_connections_failed_total`: flows ended with a flag.
    failed: Family<Traffic, Counter>,
    /// `istio_tcp_received_bytes_total`: from the end that opened the connection.
    received: Family<Traffic, Counter>,
    /// `istio_tcp_sent_bytes_total`: to the end that opened the connection.
    sent: Family<Traffic, Counter>,
    /// `istio_tcp_sockets_open`: accepted sockets; two samples.
    sockets: Family<Reporter, Gauge>,
    /// `culvert_connections_denied_early_total`: one sample a [`Denial`].
    denied: Family<DenialLabel, Counter>,
    live: Arc<Sharded<Arc<Meter>>>,
    shown: Shown,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry, tag: &str) -> Self {
        let metrics = Self {
            opened: Family::default(),
            closed: Family::default(),
            failed: Family::default(),
            received: Family::default(),
            sent: Family::default(),
            sockets: Family::default(),
            denied: Family::default(),
            live: Arc::default(),
            shown: Shown::default(),
        };
        let istio = registry.sub_registry_with_prefix("istio");
        let mut traffic = |name: &str, help: &str, family: &Family<Traffic, Counter>| {
            istio.register(name, help, family.clone());
        };
        traffic(
            "tcp_connections_opened",
            "The total number of TCP connections opened",
            &metrics.opened,
        );
        traffic(
            "tcp_connections_closed",
            "The total number of TCP connections closed",
            &metrics.closed,
        );
        traffic(
            "tcp_connections_failed",
            "The total number of TCP connections that failed",
            &metrics.failed,
        );
        traffic(
            "tcp_received_bytes",
            "The size of total bytes received during request",
            &metrics.received,
        );
        traffic("tcp_sent_bytes", "The size of total bytes sent during response", &metrics.sent);
        istio.register(
            "tcp_sockets_open",
            "The number of accepted TCP sockets open",
            metrics.sockets.clone(),
        );
        let build = Family::<Build, Gauge>::default();
        build.get_or_create(&Build { tag: tag.to_owned() }).set(1);
        istio.register("build", "Which build this is", build);
        registry.sub_registry_with_prefix("culvert").register(
            "connections_denied_early",
            "The total number of connections refused before anything but their addresses was known",
            metrics.denied.clone(),
        );
        metrics
    }

    /// The gauge of accepted sockets.
    pub(crate) fn sockets(&self, direction: Direction) -> Gauge {
        self.sockets.get_or_create_owned(&Reporter(direction))
    }

    /// Counts an early refusal.
    pub(crate) fn deny(&self, reason: Denial) {
        self.denied.get_or_create(&DenialLabel(reason)).inc();
    }

    /// Counts a flow as opened; its bytes are counted as `transferred` says, until it is closed.
    pub(crate) fn open(
        &self,
        direction: Direction,
        flow: &Flow,
        transferred: Arc<Transferred>,
    ) -> OpenFlow {
        let labels = Traffic::of(direction, flow, &self.shown);
        self.opened.get_or_create(&labels).inc();
        let meter = Arc::new(Meter {
            transferred,
            received: self.received.get_or_create_owned(&labels),
            sent: self.sent.get_or_create_owned(&labels),
            settled: Mutex::default(),
        });
        let key = self.live.insert(Arc::clone(&meter));
        OpenFlow {
            labels,
            closed: self.closed.clone(),
            failed: self.failed.clone(),
            live: Arc::clone(&self.live),
            key,
            meter,
        }
    }

    /// Brings the byte counters up to date with what open flows have carried.
    pub(crate) fn settle(&self) {
        self.live.for_each(|meter| meter.settle());
    }
}

/// A flow that counts as open.
pub(crate) struct OpenFlow {
    labels: Traffic,
    closed: Family<Traffic, Counter>,
    failed: Family<Traffic, Counter>,
    live: Arc<Sharded<Arc<Meter>>>,
    key: u64,
    meter: Arc<Meter>,
}

impl OpenFlow {
    /// Counts the flow's end. Called once, when its bytes are all counted.
    pub(crate) fn close(&mut self, flag: ResponseFlag) {
        self.live.remove(self.key);
        self.meter.settle();
        self.labels.flag = flag;
        self.closed.get_or_create(&self.labels).inc();
        if flag != ResponseFlag::None {
            self.failed.get_or_create(&self.labels).inc();
        }
    }
}

impl fmt::Debug for OpenFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFlow").field("labels", &self.labels).finish_non_exhaustive()
    }
}

/// Moves a flow's bytes into the counters it shares with its like: at scrapes and at its end, so that carrying them
/// costs no more than the flow's own count, and none is lost or counted twice.
#[derive(Debug)]
struct Meter {
    transferred: Arc<Transferred>,
    received: Counter,
    sent: Counter,
    /// What the counters have already: request and response bytes.
    settled: Mutex<(u64, u64)>,
}

impl Meter {
    fn settle(&self) {
        let mut settled = self.settled.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (self.transferred.request(), self.transferred.response());
        self.received.inc_by(now.0 - settled.0);
        self.sent.inc_by(now.1 - settled.1);
        *settled = now;
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Reporter(Direction);

impl EncodeLabelSet for Reporter {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        label(encoder, "reporter", self.0.reporter())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct DenialLabel(Denial);

impl EncodeLabelSet for DenialLabel {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        label(encoder, "reason", self.0.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Build {
    tag: String,
}

impl EncodeLabelSet for Build {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        // Dashboards find node proxies by this component, whoever made them.
        label(encoder, "component", "ztunnel")?;
        label(encoder, "tag", &self.tag)
    }
}

#[cfg(test)]
mod tests;
