//! Policies.

use culvert_mesh::policy::{Action, Enforcement, Scope, TextMatch};
use culvert_proto::istio::security::{Group, Rules, StringMatch, string_match};

use super::*;

pub(super) fn text(match_type: Option<string_match::MatchType>) -> StringMatch {
    StringMatch { match_type }
}

pub(super) fn matching(one: Match) -> Authorization {
    let rules = vec![Rules { matches: vec![one] }];
    Authorization { groups: vec![Group { rules }], ..raw_policy() }
}

#[test]
fn every_field_of_a_policy_is_kept() {
    use string_match::MatchType;
    let ip = |address: &[u8], length| security::Address { address: address.into(), length };
    let one = Match {
        namespaces: vec![text(Some(MatchType::Exact("a".into())))],
        not_namespaces: vec![text(Some(MatchType::Prefix("b".into())))],
        principals: vec![text(Some(MatchType::Suffix("c".into())))],
        not_principals: vec![text(Some(MatchType::Presence(())))],
        source_ips: vec![ip(&[10, 0, 0, 1], 8)],
        not_source_ips: vec![ip(&[10, 0, 0, 1], 32)],
        destination_ips: vec![ip(&[0; 16], 0)],
        destination_ports: vec![80],
        not_destination_ports: vec![81],
        service_accounts: vec![security::ServiceAccountMatch {
            namespace: "n".into(),
            service_account: "s".into(),
        }],
        ..Match::default()
    };
    let policy =
        policy_of(Authorization { scope: 2, action: 1, dry_run: true, ..matching(one) }).unwrap();
    assert_eq!(&*policy.key, "ns/p");
    assert_eq!((policy.scope, policy.action), (Scope::WorkloadSelector, Action::Deny));
    assert_eq!(policy.enforcement, Enforcement::DryRun);
    let one = &policy.rules[0].clauses[0].matches[0];
    assert_eq!(one.namespaces.any, [TextMatch::Exact("a".into())]);
    assert_eq!(one.namespaces.none, [TextMatch::Prefix("b".into())]);
    assert_eq!(one.principals.any, [TextMatch::Suffix("c".into())]);
    assert_eq!(one.principals.none, [TextMatch::Presence]);
    assert_eq!(one.source_ips.any[0].to_string(), "10.0.0.0/8");
    assert_eq!(one.source_ips.none[0].to_string(), "10.0.0.1/32");
    assert_eq!(one.destination_ips.any[0].to_string(), "::/0");
    assert_eq!((&*one.destination_ports.any, &*one.destination_ports.none), (&[80][..], &[81][..]));
    assert_eq!(&*one.service_accounts.any[0].name, "s");
}

#[test]
fn policies_are_refused_rather_than_read_in_part() {
    let ips = |address: Vec<u8>, length| {
        matching(Match {
            source_ips: vec![
                security::Address { address: vec![10, 0, 0, 1], length: 32 },
                security::Address { address, length },
            ],
            ..Match::default()
        })
    };
    let unsaid = Match { not_principals: vec![text(None)], ..Match::default() };
    for (raw, want) in [
        (Authorization { scope: 3, ..raw_policy() }, "scope has the unknown value 3"),
        (Authorization { action: 2, ..raw_policy() }, "action has the unknown value 2"),
        (Authorization { name: String::new(), ..raw_policy() }, "name is empty"),
        (Authorization { namespace: String::new(), ..raw_policy() }, "namespace is empty"),
        (
            Authorization { name: "q".into(), ..raw_policy() },
            "describes \"ns/q\", which is not its name",
        ),
        (ips(vec![10, 0, 0], 8), "source_ips has an address of 3 bytes"),
        (ips(vec![10, 0, 0, 0], 33), "source_ips has a prefix of 33 bits"),
        (ips(vec![10, 0, 0, 0], u32::MAX), "source_ips has a prefix of 4294967295 bits"),
        (matching(unsaid), "principals has a match that says nothing"),
        (
            matching(Match { destination_ports: vec![65_536 + 22], ..Match::default() }),
            "destination_ports has the port 65558",
        ),
    ] {
        let error = policy_of(raw).unwrap_err().to_string();
        assert!(error.contains(want), "{error}, not {want}");
    }
    assert!(policy_of(raw_policy()).unwrap().rules.is_empty());
    let empty = policy_of(matching(Match::default())).unwrap();
    assert_eq!(
        empty.rules[0].clauses[0].matches.len(),
        1,
        "a match of nothing never matches, so it stays"
    );
}
