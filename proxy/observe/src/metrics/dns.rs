//! The metric families of pods' DNS questions. Contract: those of `istio_` have ztunnel's names and labels.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::labels::label;

/// Upper bounds of the histogram's buckets, in seconds.
const BUCKETS: [f64; 6] = [0.0005, 0.001, 0.01, 0.1, 1.0, 5.0];

/// Counts questions of all pods. Clones count together.
#[derive(Clone, Debug)]
pub struct Dns {
    requests: Family<DnsQuestion, Counter>,
    upstream_requests: Family<DnsQuestion, Counter>,
    upstream_failures: Family<DnsQuestion, Counter>,
    upstream_duration: Family<DnsQuestion, Histogram, fn() -> Histogram>,
    dropped: Family<Reason, Counter>,
}

/// What questions are told apart by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DnsQuestion {
    /// The type of the records asked for, in capitals.
    pub record_type: &'static str,
    /// `udp` or `tcp`.
    pub transport: &'static str,
    /// Canonical service and revision of the pod that asks; empty if they are not known.
    pub source: (Arc<str>, Arc<str>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Reason(&'static str);

impl Dns {
    /// Adds the families to `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let new: fn() -> Histogram = || Histogram::new(BUCKETS);
        let dns = Self {
            requests: Family::default(),
            upstream_requests: Family::default(),
            upstream_failures: Family::default(),
            upstream_duration: Family::new_with_constructor(new),
            dropped: Family::default(),
        };
        let istio = registry.sub_registry_with_prefix("istio");
        let mut counter = |name: &str, help: &str, family: &Family<DnsQuestion, Counter>| {
            istio.register(name, help, family.clone());
        };
        counter("dns_requests", "The total number of DNS requests", &dns.requests);
        counter(
            "dns_upstream_requests",
            "The total number of DNS requests forwarded to a name server",
            &dns.upstream_requests,
        );
        counter(
            "dns_upstream_failures",
            "The total number of DNS requests that no name server answered",
            &dns.upstream_failures,
        );
        istio.register_with_unit(
            "dns_upstream_request_duration",
            "How long name servers took to answer",
            Unit::Seconds,
            dns.upstream_duration.clone(),
        );
        registry.sub_registry_with_prefix("culvert").register(
            "dns_dropped",
            "The total number of DNS messages that were not answered as questions",
            dns.dropped.clone(),
        );
        dns
    }

    /// A question came.
    pub fn request(&self, question: &DnsQuestion) {
        self.requests.get_or_create(question).inc();
    }

    /// It is forwarded.
    pub fn upstream_request(&self, question: &DnsQuestion) {
        self.upstream_requests.get_or_create(question).inc();
    }

    /// The name server did not answer.
    pub fn upstream_failure(&self, question: &DnsQuestion) {
        self.upstream_failures.get_or_create(question).inc();
    }

    /// The name server has answered.
    pub fn upstream_answer(&self, question: &DnsQuestion, took: Duration) {
        self.upstream_duration.get_or_create(question).observe(took.as_secs_f64());
    }

    /// Something was not answered as a question.
    pub fn dropped(&self, reason: &'static str) {
        self.dropped.get_or_create(&Reason(reason)).inc();
    }
}

// Contract.
impl EncodeLabelSet for DnsQuestion {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        label(encoder, "request_query_type", &self.record_type.to_ascii_lowercase())?;
        label(encoder, "request_protocol", self.transport)?;
        label(encoder, "source_canonical_service", &self.source.0)?;
        label(encoder, "source_canonical_revision", &self.source.1)
    }
}

impl EncodeLabelSet for Reason {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        label(encoder, "reason", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_named_and_labelled_as_dashboards_expect() {
        let mut registry = Registry::default();
        let dns = Dns::register(&mut registry);
        let source = ("reviews".into(), Arc::default());
        let question = DnsQuestion { record_type: "AAAA", transport: "udp", source };
        dns.request(&question);
        dns.upstream_request(&question);
        dns.upstream_failure(&question);
        dns.upstream_answer(&question, Duration::from_millis(20));
        dns.dropped("busy");
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let labels = "request_query_type=\"aaaa\",request_protocol=\"udp\",\
                      source_canonical_service=\"reviews\",source_canonical_revision=\"unknown\"";
        for sample in [
            format!("istio_dns_requests_total{{{labels}}} 1\n"),
            format!("istio_dns_upstream_requests_total{{{labels}}} 1\n"),
            format!("istio_dns_upstream_failures_total{{{labels}}} 1\n"),
            format!("istio_dns_upstream_request_duration_seconds_count{{{labels}}} 1\n"),
            format!(
                "istio_dns_upstream_request_duration_seconds_bucket{{le=\"0.1\",{labels}}} 1\n"
            ),
            "culvert_dns_dropped_total{reason=\"busy\"} 1\n".to_owned(),
        ] {
            assert!(text.contains(&sample), "{sample}\n{text}");
        }
    }
}
