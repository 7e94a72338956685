//! How policies, rules, clauses and matches look at a connection.
//! What follows from a match is left to the parent module.

use super::{Clause, Condition, Connection, Match, Policy, Rule, ServiceAccount, TextMatch};
use crate::Identity;

impl Policy {
    /// Whether one of its rules matches.
    pub(super) fn matches(&self, connection: &Connection) -> bool {
        self.rules.iter().any(|rule| rule.matches(connection))
    }
}

impl Rule {
    fn matches(&self, connection: &Connection) -> bool {
        self.clauses.iter().all(|clause| clause.matches(connection))
    }
}

impl Clause {
    fn matches(&self, connection: &Connection) -> bool {
        self.matches.is_empty() || self.matches.iter().any(|one| one.matches(connection))
    }
}

impl Match {
    /// Whether it holds no condition at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
            && self.principals.is_empty()
            && self.service_accounts.is_empty()
            && self.source_ips.is_empty()
            && self.destination_ips.is_empty()
            && self.destination_ports.is_empty()
    }

    fn matches(&self, connection: &Connection) -> bool {
        let identity = connection.identity.as_ref();
        let namespace = identity.map_or("", Identity::namespace);
        let source = connection.source.to_canonical();
        let destination = connection.destination.ip().to_canonical();
        let port = connection.destination.port();
        !self.is_empty()
            && self.destination_ports.holds(|&p| p == port)
            && self.source_ips.holds(|net| net.contains(&source))
            && self.destination_ips.holds(|net| net.contains(&destination))
            && self.namespaces.holds(|text| text.matches(namespace))
            && self.principals.holds(|text| identity.is_some_and(|i| text.matches(i.principal())))
            && self.service_accounts.holds(|account| identity.is_some_and(|i| account.matches(i)))
    }
}

impl<T> Condition<T> {
    fn is_empty(&self) -> bool {
        self.any.is_empty() && self.none.is_empty()
    }

    fn holds(&self, matches: impl Fn(&T) -> bool) -> bool {
        (self.any.is_empty() || self.any.iter().any(&matches)) && !self.none.iter().any(&matches)
    }
}

impl TextMatch {
    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(want) => *text == **want,
            Self::Prefix(want) => text.starts_with(&**want),
            Self::Suffix(want) => text.ends_with(&**want),
            Self::Presence => !text.is_empty(),
        }
    }
}

impl ServiceAccount {
    fn matches(&self, identity: &Identity) -> bool {
        *identity.namespace() == *self.namespace && *identity.service_account() == *self.name
    }
}
