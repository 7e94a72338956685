//! Authorization policies, as far as a node can decide on them: by layer 4.
//!
//! What only a waypoint can see makes a policy stricter, never laxer: a rule that allows by it allows nothing, a rule
//! that denies by it denies without it.

use std::collections::BTreeSet;

use culvert_proto::istio::security::{
    Action, Address, Authorization as Wire, Group, Match, Rules, Scope, ServiceAccountMatch,
    StringMatch, string_match::MatchType,
};
use ipnet::IpNet;

use super::{Output, fault, service::octets};
use crate::{
    objects::{
        Authorization, AuthorizationAction, Kind, Net, Operation, Port, Rule, Source, When,
        parse_net, parse_port,
    },
    resource::Resource,
    world::{MeshConfig, Space},
};

const DRY_RUN: &str = "istio.io/dry-run";

/// A policy, and what is to be said about it.
pub(super) struct Translated {
    /// `None`: it is none of a node's business.
    pub(super) policy: Option<Wire>,
    warning: Option<String>,
}

pub(super) fn all(namespace: &str, space: &Space, config: &MeshConfig, output: &mut Output) {
    for (name, object) in &space.policies {
        let Translated { policy, warning } = translate(namespace, name, object, config);
        if let Some(policy) = policy {
            output.add(Resource::authorization(&policy));
        }
        if let Some(what) = warning {
            let key = Kind::AuthorizationPolicy;
            output.faults.push(fault(key, namespace, name, "spec", what));
        }
    }
}

pub(super) fn translate(
    namespace: &str,
    name: &str,
    object: &Authorization,
    config: &MeshConfig,
) -> Translated {
    let spec = &object.spec;
    if spec.has_target() {
        return Translated { policy: None, warning: None };
    }
    let action = match spec.action {
        AuthorizationAction::Allow => Action::Allow,
        AuthorizationAction::Deny => Action::Deny,
        AuthorizationAction::Audit | AuthorizationAction::Custom => {
            let what = "actions AUDIT and CUSTOM need a waypoint, so nodes ignore the policy; add a targetRef";
            return Translated { policy: None, warning: Some(what.to_owned()) };
        }
    };
    let scope = match &spec.selector {
        Some(_) => Scope::WorkloadSelector,
        None if namespace == config.root_namespace => Scope::Global,
        None => Scope::Namespace,
    };
    let mut unseen = BTreeSet::new();
    let groups = spec.rules.iter().filter_map(|rule| group(action, rule, namespace, &mut unseen));
    let policy = Wire {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        scope: scope.into(),
        action: action.into(),
        groups: groups.collect(),
        dry_run: object.metadata.annotation(DRY_RUN) == Some("true"),
        ..Wire::default()
    };
    let warning = (!unseen.is_empty()).then(|| {
        let unseen = unseen.into_iter().collect::<Vec<_>>().join(", ");
        let effect = match action {
            Action::Allow => "rules with them allow nothing",
            Action::Deny => "rules with them deny without them",
        };
        format!(
            "nodes do not see {unseen}, so {effect}; bind the policy to a waypoint by a targetRef"
        )
    });
    Translated { policy: Some(policy), warning }
}

/// One rule. `None`: it allows by what a node cannot see, and so nothing.
fn group(
    action: Action,
    rule: &Rule,
    namespace: &str,
    unseen: &mut BTreeSet<String>,
) -> Option<Group> {
    let before = unseen.len();
    let to = rule.to.iter().map(|to| operation(&to.operation, unseen)).collect();
    let from = rule.from.iter().map(|from| source(&from.source, namespace, unseen)).collect();
    let mut clauses = vec![to, from];
    clauses.extend(rule.when.iter().map(|when| vec![condition(when, unseen)]));
    let found = unseen.len() > before || sees_less(rule);
    if action == Action::Allow && found {
        return None;
    }
    let is_any = |matches: &Vec<Match>| {
        // A match without a condition never matches; in a rule that denies it stands for what is not seen.
        action == Action::Deny && matches.contains(&Match::default())
    };
    let clauses = clauses.into_iter().filter(|matches| !matches.is_empty() && !is_any(matches));
    Some(Group { rules: clauses.map(|matches| Rules { matches }).collect() })
}

/// Whether the rule has a condition that a node cannot see, whoever has named it before.
fn sees_less(rule: &Rule) -> bool {
    let mut unseen = BTreeSet::new();
    for to in &rule.to {
        operation(&to.operation, &mut unseen);
    }
    for from in &rule.from {
        source(&from.source, "", &mut unseen);
    }
    for when in &rule.when {
        condition(when, &mut unseen);
    }
    !unseen.is_empty()
}

fn note(unseen: &mut BTreeSet<String>, fields: &[(&str, &[String])]) {
    let written = fields.iter().filter(|(_, values)| !values.is_empty());
    unseen.extend(written.map(|(name, _)| (*name).to_owned()));
}

fn operation(operation: &Operation, unseen: &mut BTreeSet<String>) -> Match {
    let Operation { hosts, not_hosts, ports, not_ports, methods, not_methods, paths, not_paths } =
        operation;
    note(
        unseen,
        &[
            ("hosts", hosts),
            ("notHosts", not_hosts),
            ("methods", methods),
            ("notMethods", not_methods),
            ("paths", paths),
            ("notPaths", not_paths),
        ],
    );
    let numbers = |ports: &[Port]| ports.iter().map(|port| port.0.into()).collect();
    Match {
        destination_ports: numbers(ports),
        not_destination_ports: numbers(not_ports),
        ..Match::default()
    }
}

fn source(source: &Source, namespace: &str, unseen: &mut BTreeSet<String>) -> Match {
    note(
        unseen,
        &[
            ("requestPrincipals", &source.request_principals),
            ("notRequestPrincipals", &source.not_request_principals),
            ("remoteIpBlocks", &source.remote_ip_blocks),
            ("notRemoteIpBlocks", &source.not_remote_ip_blocks),
        ],
    );
    let nets = |nets: &[Net]| nets.iter().map(|net| address(net.0)).collect();
    Match {
        principals: texts(&source.principals),
        not_principals: texts(&source.not_principals),
        namespaces: texts(&source.namespaces),
        not_namespaces: texts(&source.not_namespaces),
        service_accounts: accounts(&source.service_accounts, namespace),
        not_service_accounts: accounts(&source.not_service_accounts, namespace),
        source_ips: nets(&source.ip_blocks),
        not_source_ips: nets(&source.not_ip_blocks),
        ..Match::default()
    }
}

fn condition(when: &When, unseen: &mut BTreeSet<String>) -> Match {
    let When { key, values, not_values } = when;
    let mut found = Match::default();
    match key.as_str() {
        "source.namespace" => {
            (found.namespaces, found.not_namespaces) = (texts(values), texts(not_values));
        }
        "source.principal" => {
            (found.principals, found.not_principals) = (texts(values), texts(not_values));
        }
        "source.ip" => (found.source_ips, found.not_source_ips) = (nets(values), nets(not_values)),
        "destination.ip" => {
            (found.destination_ips, found.not_destination_ips) = (nets(values), nets(not_values));
        }
        "destination.port" => {
            (found.destination_ports, found.not_destination_ports) =
                (ports(values), ports(not_values));
        }
        _ => drop(unseen.insert(key.clone())),
    }
    found
}

/// `*` is anything, a `*` at one end anything there.
fn texts(texts: &[String]) -> Vec<StringMatch> {
    let text = |text: &String| {
        let kind = match (text.strip_prefix('*'), text.strip_suffix('*')) {
            (Some(""), _) => MatchType::Presence(()),
            (Some(suffix), _) => MatchType::Suffix(suffix.to_owned()),
            (None, Some(prefix)) => MatchType::Prefix(prefix.to_owned()),
            (None, None) => MatchType::Exact(text.clone()),
        };
        StringMatch { match_type: Some(kind) }
    };
    texts.iter().map(text).collect()
}

/// `namespace/account`, or an account of the policy's namespace.
fn accounts(accounts: &[String], namespace: &str) -> Vec<ServiceAccountMatch> {
    let account = |text: &String| {
        let (namespace, account) = text.split_once('/').unwrap_or((namespace, text));
        ServiceAccountMatch { namespace: namespace.to_owned(), service_account: account.to_owned() }
    };
    accounts.iter().map(account).collect()
}

// What cannot be parsed was refused when the object was read.
fn nets(texts: &[String]) -> Vec<Address> {
    texts.iter().filter_map(|text| parse_net(text).ok()).map(address).collect()
}

fn ports(texts: &[String]) -> Vec<u32> {
    texts.iter().filter_map(|text| parse_port(text).ok()).map(u32::from).collect()
}

fn address(net: IpNet) -> Address {
    Address { address: octets(net.addr()), length: net.prefix_len().into() }
}
