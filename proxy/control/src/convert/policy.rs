//! Authorization policies. One that cannot be understood whole is refused: without its odd part it would allow or deny
//! something else than was meant.

use culvert_mesh::policy::{
    Action, Clause, Condition, Enforcement, Match, Policy, Rule, Scope, ServiceAccount, TextMatch,
};
use culvert_proto::istio::security as raw;
use culvert_proto::istio::security::string_match::MatchType;

use super::{ConvertError, ends, known};

pub(super) fn policy(raw: raw::Authorization) -> Result<Policy, ConvertError> {
    for (field, text) in [("name", &raw.name), ("namespace", &raw.namespace)] {
        if text.is_empty() {
            return Err(ConvertError::Empty(field));
        }
    }
    let scope = match known("scope", raw.scope)? {
        raw::Scope::Global => Scope::Global,
        raw::Scope::Namespace => Scope::Namespace,
        raw::Scope::WorkloadSelector => Scope::WorkloadSelector,
    };
    let action = match known("action", raw.action)? {
        raw::Action::Allow => Action::Allow,
        raw::Action::Deny => Action::Deny,
    };
    Ok(Policy {
        key: format!("{}/{}", raw.namespace, raw.name).into(),
        name: raw.name.into(),
        namespace: raw.namespace.into(),
        scope,
        action,
        rules: raw.groups.into_iter().map(rule).collect::<Result<_, _>>()?,
        enforcement: if raw.dry_run { Enforcement::DryRun } else { Enforcement::Enforced },
    })
}

fn rule(raw: raw::Group) -> Result<Rule, ConvertError> {
    let clauses = raw.rules.into_iter().map(|rules| {
        let matches = rules.matches.into_iter().map(one_match).collect::<Result<_, _>>()?;
        Ok(Clause { matches })
    });
    Ok(Rule { clauses: clauses.collect::<Result<_, ConvertError>>()? })
}

fn one_match(raw: raw::Match) -> Result<Match, ConvertError> {
    Ok(Match {
        namespaces: condition(raw.namespaces, raw.not_namespaces, |one| text("namespaces", one))?,
        principals: condition(raw.principals, raw.not_principals, |one| text("principals", one))?,
        service_accounts: condition(raw.service_accounts, raw.not_service_accounts, |one| {
            Ok(ServiceAccount { namespace: one.namespace.into(), name: one.service_account.into() })
        })?,
        source_ips: condition(raw.source_ips, raw.not_source_ips, |one| {
            ends::net("source_ips", &one.address, one.length)
        })?,
        destination_ips: condition(raw.destination_ips, raw.not_destination_ips, |one| {
            ends::net("destination_ips", &one.address, one.length)
        })?,
        destination_ports: condition(raw.destination_ports, raw.not_destination_ports, |one| {
            ends::port("destination_ports", one)
        })?,
    })
}

fn condition<R, T>(
    any: Vec<R>,
    none: Vec<R>,
    one: impl Fn(R) -> Result<T, ConvertError>,
) -> Result<Condition<T>, ConvertError> {
    let all = |raw: Vec<R>| raw.into_iter().map(&one).collect::<Result<Vec<_>, _>>();
    Ok(Condition { any: all(any)?, none: all(none)? })
}

fn text(field: &'static str, raw: raw::StringMatch) -> Result<TextMatch, ConvertError> {
    Ok(match raw.match_type.ok_or(ConvertError::NoMatch(field))? {
        MatchType::Exact(text) => TextMatch::Exact(text.into()),
        MatchType::Prefix(text) => TextMatch::Prefix(text.into()),
        MatchType::Suffix(text) => TextMatch::Suffix(text.into()),
        MatchType::Presence(()) => TextMatch::Presence,
    })
}
