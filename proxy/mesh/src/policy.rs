//! Authorization policies, and the verdict over a connection to a workload.
//! Closing connections whose verdict changes is left to the caller.

mod matching;

#[cfg(test)]
mod tests;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use serde::Deserialize;

use crate::{Identity, snapshot::Snapshot, workload::Workload};

/// Rules on who may connect to the workloads they apply to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// `namespace/name`, by which workloads refer to it.
    pub key: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// The workloads it applies to.
    pub scope: Scope,
    /// What becomes of connections that match.
    pub action: Action,
    /// A connection matches if any of these does; so without rules none matches.
    pub rules: Vec<Rule>,
    /// Whether matches are only reported.
    pub enforcement: Enforcement,
}

/// The workloads that a policy applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Scope {
    /// All.
    Global,
    /// Those of its namespace.
    Namespace,
    /// Those that name it.
    WorkloadSelector,
}

/// What a matching policy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Action {
    /// Allows; and everything that no allowing policy matches is denied.
    Allow,
    /// Denies, whatever else allows.
    Deny,
}

/// Whether a policy takes part in verdicts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// It does.
    #[default]
    Enforced,
    /// It does not; its matches are reported, so that it can be tried.
    DryRun,
}

/// Matches if all clauses do; so without clauses it always does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// All must match.
    pub clauses: Vec<Clause>,
}

/// Matches if any of its matches does, or if it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clause {
    /// One must match.
    pub matches: Vec<Match>,
}

/// Conditions that must all hold. One without any condition never matches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The namespace of the peer's identity; empty without one.
    pub namespaces: Condition<TextMatch>,
    /// The peer's identity without `spiffe://`; without one nothing matches.
    pub principals: Condition<TextMatch>,
    /// The peer's service account; without one nothing matches.
    pub service_accounts: Condition<ServiceAccount>,
    /// The address the connection comes from.
    pub source_ips: Condition<IpNet>,
    /// The address it goes to.
    pub destination_ips: Condition<IpNet>,
    /// The port it goes to.
    pub destination_ports: Condition<u16>,
}

/// A condition on one property of a connection: it holds if (`any` is empty or one of it matches)
/// and nothing of `none` matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition<T> {
    /// One of these must match, if there are some.
    pub any: Vec<T>,
    /// None of these may match.
    pub none: Vec<T>,
}

impl<T> Default for Condition<T> {
    fn default() -> Self {
        Self { any: Vec::new(), none: Vec::new() }
    }
}

/// A case-sensitive test of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextMatch {
    /// It is this.
    Exact(Arc<str>),
    /// It starts with this.
    Prefix(Arc<str>),
    /// It ends with this.
    Suffix(Arc<str>),
    /// It is not empty.
    Presence,
}

/// A service account, of whatever trust domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
}

/// What policies see of a connection. Addresses may be IPv4-mapped; they are compared as IPv4.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// Where it comes from: the peer of the tunnel, if it came through one.
    pub source: IpAddr,
    /// Whom the peer's certificate proved it to be; `None` for plaintext.
    pub identity: Option<Identity>,
    /// The workload's own address and the port that the app gets it on.
    pub destination: SocketAddr,
}

/// Whether a connection may reach a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may.
    Allowed,
    /// It may not.
    Denied {
        /// What stands against it.
        reason: Denial,
    },
}

/// What stands against a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The denying policy of this key matches it.
    Policy(Arc<str>),
    /// There are allowing policies and none matches it.
    NoneAllowed,
    /// The workload names a policy of this key that is not known, and no known one allows it.
    Missing(Arc<str>),
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(key) => write!(f, "explicitly denied by: {key}"),
            Self::NoneAllowed => f.write_str("allow policies exist, but none allowed"),
            Self::Missing(key) => {
                write!(f, "policy {key} selects this workload but is not known, and none allowed")
            }
        }
    }
}

/// The verdict of all enforced policies over `connection` to `workload`.
///
/// Denying policies come first; then, if there are allowing ones, one of them has to match. A
/// policy that the workload names and nobody knows counts as an allowing one that does not match:
/// what it says may well be "nothing but ...". Allocates nothing but a denial's key.
pub fn evaluate(snapshot: &Snapshot, workload: &Workload, connection: &Connection) -> Verdict {
    let of = |action| {
        applying(snapshot, workload)
            .filter(move |p| p.action == action && p.enforcement == Enforcement::Enforced)
    };
    if let Some(policy) = of(Action::Deny).find(|p| p.matches(connection)) {
        return Verdict::Denied { reason: Denial::Policy(Arc::clone(&policy.key)) };
    }
    let mut some = false;
    for policy in of(Action::Allow) {
        if policy.matches(connection) {
            return Verdict::Allowed;
        }
        some = true;
    }
    if some {
        return Verdict::Denied { reason: Denial::NoneAllowed };
    }
    match workload.policies.iter().find(|key| snapshot.find_policy(key).is_none()) {
        Some(missing) => Verdict::Denied { reason: Denial::Missing(Arc::clone(missing)) },
        None => Verdict::Allowed,
    }
}

/// The policies on trial that match `connection` to `workload`: what to report, not to enforce.
pub fn dry_run<'a>(
    snapshot: &'a Snapshot,
    workload: &'a Workload,
    connection: &'a Connection,
) -> impl Iterator<Item = &'a Arc<Policy>> {
    applying(snapshot, workload)
        .filter(|p| p.enforcement == Enforcement::DryRun && p.matches(connection))
}

/// The policies that apply to `workload`, each once.
fn applying<'a>(
    snapshot: &'a Snapshot,
    workload: &'a Workload,
) -> impl Iterator<Item = &'a Arc<Policy>> {
    let namespace = workload.namespace();
    let elsewhere = move |p: &&Arc<Policy>| match p.scope {
        Scope::Global => false,
        Scope::Namespace => *p.namespace != *namespace,
        Scope::WorkloadSelector => true,
    };
    let named = workload.policies.iter().filter_map(|key| snapshot.find_policy(key));
    snapshot
        .policies_of_namespace(namespace)
        .chain(snapshot.global_policies())
        .chain(named.filter(elsewhere))
}
