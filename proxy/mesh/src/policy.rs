//! Authorization policies, and the verdict over a connection to a workload.
//! Closing connections whose verdict changes is left to the caller.

mod index;
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

use self::index::Group;
pub(crate) use self::index::PolicyIndex;
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
/// what it says may well be "nothing but ...". Allocates nothing.
pub fn evaluate(snapshot: &Snapshot, workload: &Workload, connection: &Connection) -> Verdict {
    let groups = || snapshot.policy_index().groups(workload.namespace());
    let enforced = |action| {
        let here =
            move |p: &&Arc<Policy>| p.action == action && p.enforcement == Enforcement::Enforced;
        named(snapshot, workload).filter(here)
    };
    let find = |action| {
        let candidates = groups().flat_map(move |group| group.candidates(action, connection));
        candidates.chain(enforced(action)).find(|policy| policy.matches(connection))
    };
    if let Some(policy) = find(Action::Deny) {
        return Verdict::Denied { reason: Denial::Policy(Arc::clone(&policy.key)) };
    }
    if find(Action::Allow).is_some() {
        return Verdict::Allowed;
    }
    let allow = Action::Allow;
    if groups().any(|group| group.has(allow)) || enforced(allow).next().is_some() {
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
    let groups = snapshot.policy_index().groups(workload.namespace());
    groups
        .flat_map(Group::on_trial)
        .chain(named(snapshot, workload).filter(|p| p.enforcement == Enforcement::DryRun))
        .filter(|p| p.matches(connection))
}

/// The policies that apply to `workload` only because it names them.
fn named<'a>(
    snapshot: &'a Snapshot,
    workload: &'a Workload,
) -> impl Iterator<Item = &'a Arc<Policy>> {
    let namespace = workload.namespace();
    let applies_anyway = move |p: &Policy| match p.scope {
        Scope::Global => true,
        Scope::Namespace => *p.namespace == *namespace,
        Scope::WorkloadSelector => false,
    };
    let known = workload.policies.iter().filter_map(|key| snapshot.find_policy(key));
    known.filter(move |p| !applies_anyway(p))
}

/// All that policy says of one workload. While two are equal, so is every verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    namespace: Arc<str>,
    revisions: (u64, u64),
    /// In the order in which the workload names them.
    named: Vec<(Arc<str>, Option<Arc<Policy>>)>,
}

/// The terms of `workload`. Comparing them with earlier ones tells whether connections to it have
/// to be looked at again.
pub fn terms(snapshot: &Snapshot, workload: &Workload) -> Terms {
    let namespace = workload.namespace();
    let named = |key: &Arc<str>| (Arc::clone(key), snapshot.find_policy(key).cloned());
    Terms {
        namespace: namespace.into(),
        revisions: snapshot.policy_index().revisions(namespace),
        named: workload.policies.iter().map(named).collect(),
    }
}
