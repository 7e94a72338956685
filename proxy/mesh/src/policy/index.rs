//! Policies arranged so that a connection meets only those that can match it.
//!
//! Most policies name whom they are about. Each of those is found by a key (a principal, a service
//! account, a namespace, a port) that every connection which it matches has; only the others are
//! looked at for each connection.

use std::{cmp::Ordering, sync::Arc};

use equivalent::{Comparable, Equivalent};
use imbl::OrdMap;

use super::{Action, Clause, Connection, Enforcement, Match, Policy, Rule, Scope, TextMatch};
use crate::{
    Identity,
    blocks::{Blocks, Keyed},
};

/// The policies of all namespaces that apply without being named.
#[derive(Clone, Debug, Default)]
pub(crate) struct PolicyIndex {
    global: Group,
    namespaces: OrdMap<Arc<str>, Group>,
    /// How often a policy came or went, of whatever scope.
    changes: u64,
}

impl PolicyIndex {
    /// Takes `policy` up. Those that apply to workloads that name them are found by name alone.
    pub(crate) fn insert(&mut self, policy: &Arc<Policy>) {
        self.changes += 1;
        match policy.scope {
            Scope::Global => self.global.insert(policy),
            Scope::Namespace => {
                let namespace = Arc::clone(&policy.namespace);
                self.namespaces.entry(namespace).or_default().insert(policy);
            }
            Scope::WorkloadSelector => {}
        }
    }

    /// Takes `policy` out again.
    pub(crate) fn remove(&mut self, policy: &Policy) {
        self.changes += 1;
        match policy.scope {
            Scope::Global => self.global.remove(policy),
            Scope::Namespace => {
                if let Some(group) = self.namespaces.get_mut(&policy.namespace) {
                    group.remove(policy);
                }
            }
            Scope::WorkloadSelector => {}
        }
    }

    /// A number that differs between versions whose policies do.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The groups that apply to workloads of `namespace`.
    pub(super) fn groups(&self, namespace: &str) -> impl Iterator<Item = &Group> + Clone {
        [Some(&self.global), self.namespaces.get(namespace)].into_iter().flatten()
    }

    /// Numbers that differ whenever one of those groups does.
    pub(super) fn revisions(&self, namespace: &str) -> (u64, u64) {
        let of_namespace = self.namespaces.get(namespace).map_or(0, |group| group.revision);
        (self.global.revision, of_namespace)
    }
}

/// The policies that apply to the same workloads.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    denying: Arranged,
    allowing: Arranged,
    on_trial: Blocks<Arc<Policy>>,
    /// Of each change the next number; a group never goes back to an earlier one, so it is kept
    /// when it is empty.
    revision: u64,
}

impl Group {
    /// The enforced policies of `action` that may match `connection`, some of them twice.
    pub(super) fn candidates<'a>(
        &'a self,
        action: Action,
        connection: &'a Connection,
    ) -> impl Iterator<Item = &'a Arc<Policy>> {
        self.of(action).candidates(connection)
    }

    /// Whether there is an enforced policy of `action`.
    pub(super) fn has(&self, action: Action) -> bool {
        self.of(action).count > 0
    }

    /// The policies on trial.
    pub(super) fn on_trial(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.on_trial.iter()
    }

    fn of(&self, action: Action) -> &Arranged {
        match action {
            Action::Deny => &self.denying,
            Action::Allow => &self.allowing,
        }
    }

    fn insert(&mut self, policy: &Arc<Policy>) {
        self.revision += 1;
        match (policy.enforcement, policy.action) {
            (Enforcement::Enforced, Action::Deny) => self.denying.insert(policy),
            (Enforcement::Enforced, Action::Allow) => self.allowing.insert(policy),
            (Enforcement::DryRun, _) => drop(self.on_trial.insert(Arc::clone(policy))),
        }
    }

    fn remove(&mut self, policy: &Policy) {
        self.revision += 1;
        match (policy.enforcement, policy.action) {
            (Enforcement::Enforced, Action::Deny) => self.denying.remove(policy),
            (Enforcement::Enforced, Action::Allow) => self.allowing.remove(policy),
            (Enforcement::DryRun, _) => drop(self.on_trial.remove(&policy.key)),
        }
    }
}

/// Policies of one kind, by what connections they are about.
#[derive(Clone, Debug, Default)]
struct Arranged {
    count: usize,
    /// Those without keys.
    about_all: Blocks<Arc<Policy>>,
    keyed: OrdMap<Key<Arc<str>>, Blocks<Arc<Policy>>>,
}

impl Arranged {
    fn candidates<'a>(
        &'a self,
        connection: &'a Connection,
    ) -> impl Iterator<Item = &'a Arc<Policy>> {
        let keys = (!self.keyed.is_empty()).then(|| keys_of(connection));
        let keyed = keys.into_iter().flatten().flatten();
        let keyed = keyed.filter_map(|key| self.keyed.get(&key)).flat_map(Blocks::iter);
        self.about_all.iter().chain(keyed)
    }

    fn insert(&mut self, policy: &Arc<Policy>) {
        self.count += 1;
        match keys(policy) {
            None => drop(self.about_all.insert(Arc::clone(policy))),
            Some(keys) => {
                for key in keys {
                    self.keyed.entry(key).or_default().insert(Arc::clone(policy));
                }
            }
        }
    }

    fn remove(&mut self, policy: &Policy) {
        self.count -= 1;
        match keys(policy) {
            None => drop(self.about_all.remove(&policy.key)),
            Some(keys) => {
                for key in keys {
                    let Some(policies) = self.keyed.get_mut(&key) else { continue };
                    policies.remove(&policy.key);
                    if policies.is_empty() {
                        self.keyed.remove(&key);
                    }
                }
            }
        }
    }
}

impl Keyed for Arc<Policy> {
    fn key(&self) -> &str {
        &self.key
    }
}

/// Something that a connection has, and that a policy may ask for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key<T> {
    /// A whole identity, without its scheme.
    Principal(T),
    /// A namespace and a service account in it.
    Account(T, T),
    /// A service account of whatever namespace.
    AccountName(T),
    Namespace(T),
    Port(u16),
}

impl Key<Arc<str>> {
    fn borrowed(&self) -> Key<&str> {
        match self {
            Self::Principal(text) => Key::Principal(text),
            Self::Account(namespace, name) => Key::Account(namespace, name),
            Self::AccountName(text) => Key::AccountName(text),
            Self::Namespace(text) => Key::Namespace(text),
            Self::Port(port) => Key::Port(*port),
        }
    }
}

impl Equivalent<Key<Arc<str>>> for Key<&str> {
    fn equivalent(&self, key: &Key<Arc<str>>) -> bool {
        *self == key.borrowed()
    }
}

impl Comparable<Key<Arc<str>>> for Key<&str> {
    fn compare(&self, key: &Key<Arc<str>>) -> Ordering {
        self.cmp(&key.borrowed())
    }
}

/// What `connection` has.
fn keys_of(connection: &Connection) -> [Option<Key<&str>>; 5] {
    let identity = connection.identity.as_ref();
    [
        identity.map(|id| Key::Principal(id.principal())),
        identity.map(|id| Key::Account(id.namespace(), id.service_account())),
        identity.map(|id| Key::AccountName(id.service_account())),
        Some(Key::Namespace(identity.map_or("", Identity::namespace))),
        Some(Key::Port(connection.destination.port())),
    ]
}

/// Keys of which every connection that `policy` matches has one. `None`: there are none such.
/// None at all: it matches no connection.
fn keys(policy: &Policy) -> Option<Vec<Key<Arc<str>>>> {
    let mut all = Vec::new();
    for rule in &policy.rules {
        all.extend(of_rule(rule)?);
    }
    all.sort_unstable();
    all.dedup();
    Some(all)
}

/// One of the clauses is enough, since all must match: the one that is found by the most telling
/// keys.
fn of_rule(rule: &Rule) -> Option<Vec<Key<Arc<str>>>> {
    rule.clauses.iter().filter_map(of_clause).min_by_key(|keys| keys.iter().max().map(rank))
}

fn of_clause(clause: &Clause) -> Option<Vec<Key<Arc<str>>>> {
    if clause.matches.is_empty() {
        return None;
    }
    let each = clause.matches.iter().filter(|one| !one.is_empty()).map(of_match);
    Some(each.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// One of the conditions is enough, since all must hold: the most telling one.
fn of_match(one: &Match) -> Option<Vec<Key<Arc<str>>>> {
    let principals = || one.principals.any.iter().map(of_principal).collect::<Option<Vec<_>>>();
    let accounts = || {
        let key = |account: &super::ServiceAccount| {
            Key::Account(Arc::clone(&account.namespace), Arc::clone(&account.name))
        };
        one.service_accounts.any.iter().map(key).collect::<Vec<_>>()
    };
    let ports = || one.destination_ports.any.iter().map(|port| Key::Port(*port)).collect();
    let namespaces = || {
        let key = |text: &TextMatch| match text {
            TextMatch::Exact(text) => Some(Key::Namespace(Arc::clone(text))),
            TextMatch::Prefix(_) | TextMatch::Suffix(_) | TextMatch::Presence => None,
        };
        one.namespaces.any.iter().map(key).collect::<Option<Vec<_>>>()
    };
    let some = |keys: &Vec<_>| !keys.is_empty();
    let of_principals = principals().filter(some);
    of_principals
        .or_else(|| Some(accounts()).filter(some))
        .or_else(|| namespaces().filter(some))
        .or_else(|| Some(ports()).filter(some))
}

/// The most telling key of all principals that `text` matches.
fn of_principal(text: &TextMatch) -> Option<Key<Arc<str>>> {
    match text {
        TextMatch::Exact(principal) => Some(Key::Principal(Arc::clone(principal))),
        // `<trust domain>/ns/<namespace>/...`: no part of an identity holds a slash.
        TextMatch::Prefix(start) => {
            let mut parts = start.split('/').skip(1);
            let ns = parts.next()?;
            let namespace = parts.next()?;
            parts.next().filter(|_| ns == "ns").map(|_| Key::Namespace(namespace.into()))
        }
        // `.../sa/<service account>`.
        TextMatch::Suffix(end) => {
            let mut parts = end.rsplit('/');
            let account = parts.next()?;
            let sa = parts.next()?;
            parts.next().filter(|_| sa == "sa").map(|_| Key::AccountName(account.into()))
        }
        TextMatch::Presence => None,
    }
}

/// The lower, the fewer connections have it.
fn rank(key: &Key<Arc<str>>) -> u8 {
    match key {
        Key::Principal(_) => 0,
        Key::Account(..) => 1,
        Key::AccountName(_) => 2,
        Key::Namespace(_) => 3,
        Key::Port(_) => 4,
    }
}

#[cfg(test)]
mod tests;
