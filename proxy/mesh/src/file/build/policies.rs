//! Policies from the file as written.

use std::{collections::HashMap, sync::Arc};

use super::{Fault, fault, raw};
use crate::{
    file::text::Text,
    policy::{Clause, Condition, Enforcement, Match, Policy, Rule, ServiceAccount, TextMatch},
};

pub(super) fn policies(raw: Vec<raw::Policy>) -> Result<Vec<Policy>, Fault> {
    let mut keys: HashMap<Arc<str>, usize> = HashMap::new();
    let mut policies = Vec::with_capacity(raw.len());
    for (index, raw) in raw.into_iter().enumerate() {
        let line = raw.name.referenced.line();
        let (name, namespace) = (raw.name.value.0.0, raw.namespace.0.0);
        let key: Arc<str> = format!("{namespace}/{name}").into();
        if let Some(first) = keys.insert(Arc::clone(&key), index) {
            let what = format!("policy {key} is also policies[{first}]; make it unique");
            return Err(fault(line, format!("policies[{index}].name"), what));
        }
        let enforcement = if raw.dry_run { Enforcement::DryRun } else { Enforcement::Enforced };
        policies.push(Policy {
            key,
            name,
            namespace,
            scope: raw.scope,
            action: raw.action,
            rules: raw.rules.into_iter().map(rule).collect(),
            enforcement,
        });
    }
    Ok(policies)
}

fn rule(clauses: Vec<Vec<raw::Match>>) -> Rule {
    let clause =
        |matches: Vec<raw::Match>| Clause { matches: matches.into_iter().map(one_match).collect() };
    Rule { clauses: clauses.into_iter().map(clause).collect() }
}

fn one_match(raw: raw::Match) -> Match {
    Match {
        namespaces: texts(raw.namespaces, raw.not_namespaces),
        principals: texts(raw.principals, raw.not_principals),
        service_accounts: Condition {
            any: raw.service_accounts.into_iter().map(service_account).collect(),
            none: raw.not_service_accounts.into_iter().map(service_account).collect(),
        },
        source_ips: values(raw.source_ips, raw.not_source_ips),
        destination_ips: values(raw.destination_ips, raw.not_destination_ips),
        destination_ports: Condition {
            any: raw.destination_ports.into_iter().map(|port| port.0.0).collect(),
            none: raw.not_destination_ports.into_iter().map(|port| port.0.0).collect(),
        },
    }
}

fn values<T>(any: Vec<Text<T>>, none: Vec<Text<T>>) -> Condition<T> {
    let plain = |values: Vec<Text<T>>| values.into_iter().map(|value| value.0).collect();
    Condition { any: plain(any), none: plain(none) }
}

fn texts(any: Vec<raw::TextMatch>, none: Vec<raw::TextMatch>) -> Condition<TextMatch> {
    let plain = |texts: Vec<raw::TextMatch>| texts.into_iter().map(text_match).collect();
    Condition { any: plain(any), none: plain(none) }
}

fn text_match(raw: raw::TextMatch) -> TextMatch {
    match raw {
        raw::TextMatch::Exact(text) => TextMatch::Exact(text.0.0),
        raw::TextMatch::Prefix(text) => TextMatch::Prefix(text.0.0),
        raw::TextMatch::Suffix(text) => TextMatch::Suffix(text.0.0),
        raw::TextMatch::Presence(_) => TextMatch::Presence,
    }
}

fn service_account(raw: raw::ServiceAccount) -> ServiceAccount {
    ServiceAccount { namespace: raw.namespace.0.0, name: raw.service_account.0.0 }
}
