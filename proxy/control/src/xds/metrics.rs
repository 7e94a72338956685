//! What is counted about the feed. Names and labels of the `istio_` families are those that Istio's dashboards query.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::backoff::End;
use super::session::Kind;

#[derive(Clone, Debug)]
pub(super) struct Metrics {
    /// `istio_xds_connection_terminations_total`.
    terminations: Family<Reason, Counter>,
    /// `istio_xds_message_total`: responses.
    messages: Family<Url, Counter>,
    /// `istio_xds_message_bytes_total`: their size.
    bytes: Family<Url, Counter>,
    /// `culvert_xds_refused_resources_total`.
    refused: Counter,
    liveness: Liveness,
}

/// Whether there is a stream, or since when there is none.
#[derive(Clone, Debug)]
struct Liveness(Arc<Mutex<Option<Instant>>>);

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            terminations: Family::default(),
            messages: Family::default(),
            bytes: Family::default(),
            refused: Counter::default(),
            liveness: Liveness(Arc::new(Mutex::new(Some(Instant::now())))),
        };
        let istio = registry.sub_registry_with_prefix("istio");
        istio.register(
            "xds_connection_terminations",
            "The total number of terminated connections to the xds server",
            metrics.terminations.clone(),
        );
        istio.register(
            "xds_message",
            "The total number of messages received from the xds server",
            metrics.messages.clone(),
        );
        istio.register(
            "xds_message_bytes",
            "The total number of bytes in messages received from the xds server",
            metrics.bytes.clone(),
        );
        registry.sub_registry_with_prefix("culvert").register(
            "xds_refused_resources",
            "The total number of resources of the control plane that were refused",
            metrics.refused.clone(),
        );
        registry.register_collector(Box::new(metrics.liveness.clone()));
        metrics
    }

    pub(super) fn received(&self, kind: Option<Kind>, bytes: usize, refused: usize) {
        // The server's own text would be a label without bound.
        let url = Url { url: kind.map_or("other", Kind::url) };
        self.messages.get_or_create(&url).inc();
        self.bytes.get_or_create(&url).inc_by(bytes as u64);
        self.refused.inc_by(refused as u64);
    }

    pub(super) fn connected(&self) {
        *self.liveness.lock() = None;
    }

    pub(super) fn ended(&self, end: End) {
        self.terminations.get_or_create(&Reason { reason: end.reason() }).inc();
        self.liveness.lock().get_or_insert_with(Instant::now);
    }
}

impl Liveness {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Liveness {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let lost = *self.lock();
        let age = lost.map_or(0.0, |lost| lost.elapsed().as_secs_f64());
        let family = encoder.encode_descriptor(
            "culvert_xds_state_age_seconds",
            "For how long the control plane has told nothing, because there is no stream; 0 with one",
            None,
            MetricType::Gauge,
        )?;
        ConstGauge::new(age).encode(family)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Url {
    url: &'static str,
}
