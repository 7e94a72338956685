//! The dependency edges between this workspace's crates, as a closed list: a new arrow is a reviewed line here.

use serde_json::Value;

use crate::workspace::{items, text};

/// Who may depend on each crate. Arrows point to vocabulary (`abi`, `sys`, `mesh`), never along a connection's way.
const ALLOWED: &[(&str, &[&str])] = &[
    ("culvert-abi", &["culvert-ebpf", "culvert-capture", "culvert-observe", "culvert"]),
    ("culvert-sys", &["culvert-agent", "culvert-capture", "culvert-carry", "culvert"]),
    (
        "culvert-mesh",
        &[
            "culvert-agent",
            "culvert-tls",
            "culvert-carry",
            "culvert-observe",
            "culvert-dns",
            "culvert-control",
            "culvert-controlplane",
            "culvert",
        ],
    ),
    ("culvert-tls", &["culvert-carry", "culvert-control", "culvert-controlplane", "culvert"]),
    ("culvert-proto", &["culvert-agent", "culvert-control", "culvert-controlplane"]),
    ("culvert-agent", &["culvert"]),
    ("culvert-control", &["culvert"]),
    ("culvert-controlplane", &["culvert"]),
    ("culvert-capture", &["culvert"]),
    ("culvert-carry", &["culvert"]),
    ("culvert-observe", &["culvert"]),
    ("culvert-dns", &["culvert"]),
    // A server that their tests watch.
    ("culvert-test-cluster", &["culvert-agent", "culvert-controlplane"]),
];

/// The one crate that may depend on any: scenarios look at culvert from every side.
const MAY_ALL: &str = "culvert-tests";

/// Every edge in the output of `cargo metadata --no-deps` that is not on the list, as a sentence.
pub(super) fn problems(metadata: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    for package in items(metadata, "packages") {
        let from = text(package, "name").unwrap_or_default();
        for dependency in
            items(package, "dependencies").filter(|dependency| dependency.get("path").is_some())
        {
            let to = text(dependency, "name").unwrap_or_default();
            if !may_depend(from, to) {
                problems.push(format!(
                    "{from} -> {to}: not among the edges of xtask/src/lint/edges.rs"
                ));
            }
        }
    }
    problems
}

fn may_depend(from: &str, to: &str) -> bool {
    from == MAY_ALL
        || ALLOWED.iter().any(|(crate_name, by)| *crate_name == to && by.contains(&from))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(from: &str, to: Value) -> usize {
        problems(&json!({ "packages": [{ "name": from, "dependencies": [to] }] })).len()
    }

    #[test]
    fn listed_edges_are_allowed() {
        for (from, to) in [
            ("culvert-capture", "culvert-abi"),
            ("culvert", "culvert-carry"),
            ("culvert-tests", "xtask"),
        ] {
            assert_eq!(found(from, json!({ "name": to, "path": "/x" })), 0, "{from} -> {to}");
        }
    }

    #[test]
    fn other_edges_are_refused() {
        for (from, to) in [
            ("culvert-mesh", "culvert-tls"),
            ("culvert-carry", "culvert-capture"),
            ("xtask", "culvert-abi"),
            ("culvert-sys", "culvert"),
            ("culvert", "culvert-tests"),
        ] {
            assert_eq!(found(from, json!({ "name": to, "path": "/x" })), 1, "{from} -> {to}");
        }
    }

    #[test]
    fn crates_from_elsewhere_are_no_edges() {
        assert_eq!(found("culvert-mesh", json!({ "name": "serde" })), 0);
    }
}
