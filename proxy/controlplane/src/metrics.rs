//! What the control plane tells of itself.
//!
//! Contract: names and labels are istiod's, for its dashboards. That server counts without the suffix `_total`, which
//! OpenMetrics demands of counters; so these are exposed as gauges that only rise.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{objects::Kind, resource::Type};

/// All families. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    connections: Gauge,
    pushes: Family<TypeLabel, Gauge>,
    push_time: Family<TypeLabel, Histogram, fn() -> Histogram>,
    send_time: Histogram,
    config_size: Family<TypeLabel, Histogram, fn() -> Histogram>,
    rejects: Family<TypeLabel, Gauge>,
    internal_errors: Gauge,
    triggers: Family<TypeLabel, Gauge>,
    registry_events: Family<EventLabel, Gauge>,
    config_events: Family<EventLabel, Gauge>,
    csr: Gauge,
    issued: Gauge,
    refused: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TypeLabel {
    r#type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabel {
    r#type: &'static str,
    event: &'static str,
}

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Set,
    Removed,
}

impl Metrics {
    /// Registers all families.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let sizes: fn() -> Histogram = || Histogram::new([1.0, 1e4, 1e6, 4e6, 1e7, 4e7, 1e8]);
        let times: fn() -> Histogram =
            || Histogram::new([0.01, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0]);
        let metrics = Self {
            connections: Gauge::default(),
            pushes: Family::default(),
            push_time: Family::new_with_constructor(times),
            send_time: times(),
            config_size: Family::new_with_constructor(sizes),
            rejects: Family::default(),
            internal_errors: Gauge::default(),
            triggers: Family::default(),
            registry_events: Family::default(),
            config_events: Family::default(),
            csr: Gauge::default(),
            issued: Gauge::default(),
            refused: Gauge::default(),
        };
        for kind in Type::ALL {
            drop(metrics.pushes.get_or_create(&label(kind)));
            drop(metrics.rejects.get_or_create(&label(kind)));
        }
        let m = &metrics;
        registry.register("pilot_xds", "Nodes that are connected", m.connections.clone());
        registry.register("pilot_xds_pushes", "Responses sent", m.pushes.clone());
        registry.register(
            "pilot_xds_push_time",
            "Seconds that it takes to build a response",
            m.push_time.clone(),
        );
        registry.register(
            "pilot_xds_send_time",
            "Seconds until a node has acknowledged a response",
            m.send_time.clone(),
        );
        registry.register(
            "pilot_xds_config_size_bytes",
            "Size of responses",
            m.config_size.clone(),
        );
        registry.register(
            "pilot_total_xds_rejects",
            "Responses that a node refused, in part or whole",
            m.rejects.clone(),
        );
        registry.register(
            "pilot_total_xds_internal_errors",
            "Streams that ended by the server's fault",
            m.internal_errors.clone(),
        );
        registry.register(
            "pilot_push_triggers",
            "What responses were caused by",
            m.triggers.clone(),
        );
        registry.register(
            "pilot_k8s_reg_events",
            "Changes of pods, services, nodes and namespaces",
            m.registry_events.clone(),
        );
        registry.register(
            "pilot_k8s_cfg_events",
            "Changes of policies, entries and gateways",
            m.config_events.clone(),
        );
        registry.register("citadel_server_csr_count", "Certificates asked for", m.csr.clone());
        registry.register(
            "citadel_server_success_cert_issuance_count",
            "Certificates issued",
            m.issued.clone(),
        );
        registry.register(
            "citadel_server_authentication_failure_count",
            "Certificates refused",
            m.refused.clone(),
        );
        metrics
    }

    /// Counts a connection until it is dropped.
    pub(crate) fn connected(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }

    pub(crate) fn pushed(&self, kind: Type, bytes: usize, took: Duration) {
        self.pushes.get_or_create(&label(kind)).inc();
        self.push_time.get_or_create(&label(kind)).observe(took.as_secs_f64());
        // Sizes are far below what a float holds exactly.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.config_size.get_or_create(&label(kind)).observe(bytes.into());
    }

    pub(crate) fn answered(&self, took: Duration) {
        self.send_time.observe(took.as_secs_f64());
    }

    pub(crate) fn rejected(&self, kind: Type) {
        self.rejects.get_or_create(&label(kind)).inc();
    }

    pub(crate) fn failed(&self) {
        self.internal_errors.inc();
    }

    pub(crate) fn changed(&self, kind: Kind, event: Event) {
        let registry = matches!(
            kind,
            Kind::Pod | Kind::Service | Kind::EndpointSlice | Kind::Node | Kind::Namespace
        );
        let families = if registry { &self.registry_events } else { &self.config_events };
        let event = match event {
            Event::Set => "update",
            Event::Removed => "delete",
        };
        families.get_or_create(&EventLabel { r#type: kind.name(), event }).inc();
    }

    pub(crate) fn triggered(&self, by: &'static str) {
        self.triggers.get_or_create(&TypeLabel { r#type: by }).inc();
    }

    pub(crate) fn asked(&self) {
        self.csr.inc();
    }

    pub(crate) fn issued(&self) {
        self.issued.inc();
    }

    pub(crate) fn refused(&self) {
        self.refused.inc();
    }
}

fn label(kind: Type) -> TypeLabel {
    let r#type = match kind {
        Type::Address => "wds",
        Type::Authorization => "wads",
    };
    TypeLabel { r#type }
}

/// A connection, counted.
#[derive(Debug)]
pub(crate) struct Connected(Gauge);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}
