//! What capture counts, as metrics.

use std::sync::Arc;

use culvert_capture::Node;
use culvert_observe::{BpfOutcomes, Kinds};
use prometheus_client::registry::Registry;

/// Registers what the programs and the upkeep of `node` count.
pub(super) fn register(registry: &mut Registry, node: &Arc<Node>) {
    register_outcomes(registry, node);
    register_upkeep(registry, node);
}

fn register_outcomes(registry: &mut Registry, node: &Arc<Node>) {
    let node = Arc::downgrade(node);
    let read = move || {
        let Some(node) = node.upgrade() else { return Vec::new() };
        node.outcomes().unwrap_or_else(|error| {
            tracing::warn!(error = crate::error::chain(&error), "BPF counters not read");
            Vec::new()
        })
    };
    registry.register_collector(Box::new(BpfOutcomes::new(read)));
}

fn register_upkeep(registry: &mut Registry, node: &Arc<Node>) {
    let read = |kinds: fn(&Node) -> Vec<(&'static str, u64)>| {
        let node = Arc::downgrade(node);
        move || node.upgrade().map(|node| kinds(&node)).unwrap_or_default()
    };
    registry.register_collector(Box::new(Kinds::new(
        "culvert_steering_repairs",
        "What was put back that somebody had removed or changed in a pod.",
        read(Node::repairs),
    )));
    registry.register_collector(Box::new(Kinds::new(
        "culvert_steering_failures",
        "What could not be kept up in a pod.",
        read(Node::failures),
    )));
}
