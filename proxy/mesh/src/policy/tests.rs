use std::path::Path;

use super::*;
use crate::{
    file,
    snapshot::{Origin, Update},
};

/// A mesh of one workload, `n/w` at 10.0.0.1, selected by policy `n/p`, and the given policies.
fn mesh(policies: &str) -> Snapshot {
    let text = format!(
        "workloads:\n- {{uid: w, name: w, namespace: n, workloadIps: [10.0.0.1], \
         authorizationPolicies: [n/p]}}\npolicies:\n{policies}"
    );
    file::parse(Path::new("mesh.yaml"), &text).unwrap()
}

/// One policy, `n/p`, of the workload, with one match.
fn matching(one_match: &str) -> String {
    with_rules(&format!("[[[{one_match}]]]"))
}

fn with_rules(rules: &str) -> String {
    policy("p", "n", "WorkloadSelector", "Allow", rules)
}

fn policy(name: &str, namespace: &str, scope: &str, action: &str, rules: &str) -> String {
    format!(
        "- {{name: {name}, namespace: {namespace}, scope: {scope}, action: {action}, rules: \
         {rules}}}\n"
    )
}

/// From `account` (`namespace/service account`; empty: plaintext) at 192.0.2.7 to 10.0.0.1:8080.
fn connection(account: &str) -> Connection {
    let identity = account
        .split_once('/')
        .map(|(namespace, account)| Identity::new("cluster.local", namespace, account).unwrap());
    Connection {
        source: "192.0.2.7".parse().unwrap(),
        identity,
        destination: "10.0.0.1:8080".parse().unwrap(),
    }
}

fn verdict(policies: &str, account: &str) -> String {
    let mesh = mesh(policies);
    let workload = mesh.find_workload("w").unwrap();
    match evaluate(&mesh, workload, &connection(account)) {
        Verdict::Allowed => "allowed".into(),
        Verdict::Denied { reason } => reason.to_string(),
    }
}

const NONE_ALLOWED: &str = "allow policies exist, but none allowed";

/// Whether an allowing policy of one match lets `account` in.
#[track_caller]
fn check(one_match: &str, account: &str, want: bool) {
    let want = if want { "allowed" } else { NONE_ALLOWED };
    assert_eq!(verdict(&matching(one_match), account), want, "{one_match} for {account:?}");
}

#[test]
fn texts_match_exactly_by_prefix_by_suffix_and_by_presence() {
    for (matcher, want) in [
        ("{Exact: cluster.local/ns/a/sa/b}", true),
        ("{Exact: cluster.local/ns/a/sa/B}", false),
        ("{Exact: 'spiffe://cluster.local/ns/a/sa/b'}", false),
        ("{Prefix: cluster.local/ns/a/}", true),
        ("{Prefix: ns/a}", false),
        ("{Suffix: /sa/b}", true),
        ("{Suffix: /sa}", false),
        ("{Presence: []}", true),
    ] {
        check(&format!("{{principals: [{matcher}]}}"), "a/b", want);
        check(&format!("{{notPrincipals: [{matcher}]}}"), "a/b", !want);
        // Without an identity no matcher of principals holds.
        check(&format!("{{principals: [{matcher}]}}"), "", false);
        check(&format!("{{notPrincipals: [{matcher}]}}"), "", true);
    }
}

#[test]
fn namespaces_are_empty_without_an_identity() {
    check("{namespaces: [{Exact: a}]}", "a/b", true);
    check("{namespaces: [{Exact: a}]}", "aa/b", false);
    check("{namespaces: [{Prefix: a}]}", "aa/b", true);
    check("{namespaces: [{Exact: a}]}", "", false);
    check("{namespaces: [{Presence: []}]}", "", false);
    check("{notNamespaces: [{Presence: []}]}", "", true);
    check("{notNamespaces: [{Exact: a}]}", "b/a", true);
}

#[test]
fn service_accounts_match_in_whole_and_in_any_trust_domain() {
    check("{serviceAccounts: [{namespace: a, serviceAccount: b}]}", "a/b", true);
    check("{serviceAccounts: [{namespace: a, serviceAccount: b}]}", "a/c", false);
    check("{serviceAccounts: [{namespace: a, serviceAccount: b}]}", "c/b", false);
    check("{serviceAccounts: [{namespace: a, serviceAccount: b}]}", "", false);
    check("{notServiceAccounts: [{namespace: a, serviceAccount: b}]}", "", true);
    check("{notServiceAccounts: [{namespace: a, serviceAccount: b}]}", "a/b", false);
}

#[test]
fn addresses_and_ports_match() {
    check("{sourceIps: [192.0.2.0/24]}", "", true);
    check("{sourceIps: [192.0.2.8]}", "", false);
    check("{sourceIps: ['::/0']}", "", false);
    check("{notSourceIps: [192.0.2.7/32]}", "", false);
    check("{destinationIps: [10.0.0.0/8]}", "", true);
    check("{destinationIps: [192.0.2.0/24]}", "", false);
    check("{notDestinationIps: [10.0.0.1]}", "", false);
    check("{destinationPorts: [80, 8080]}", "", true);
    check("{destinationPorts: [80]}", "", false);
    check("{notDestinationPorts: [8080]}", "", false);
    let mapped = Connection {
        source: "::ffff:192.0.2.7".parse().unwrap(),
        destination: "[::ffff:10.0.0.1]:8080".parse().unwrap(),
        identity: None,
    };
    let mesh = mesh(&matching("{sourceIps: [192.0.2.7], destinationIps: [10.0.0.1]}"));
    let workload = mesh.find_workload("w").unwrap();
    assert_eq!(evaluate(&mesh, workload, &mapped), Verdict::Allowed);
}

#[test]
fn dimensions_are_anded_and_values_are_ored() {
    check("{namespaces: [{Exact: x}, {Exact: a}], destinationPorts: [8080]}", "a/b", true);
    check("{namespaces: [{Exact: a}], destinationPorts: [80]}", "a/b", false);
    check("{namespaces: [{Exact: a}], notNamespaces: [{Exact: a}]}", "a/b", false);
    check("{}", "a/b", false);
}

#[test]
fn rules_are_ored_clauses_anded_and_matches_ored() {
    let yes = "{destinationPorts: [8080]}";
    let no = "{destinationPorts: [80]}";
    for (rules, want) in [
        ("[]".into(), false),
        ("[[]]".into(), true),
        ("[[[]]]".into(), true),
        (format!("[[[{no}]], [[{yes}]]]"), true),
        (format!("[[[{no}], [{yes}]]]"), false),
        (format!("[[[{yes}], [{yes}]]]"), true),
        (format!("[[[{no}, {yes}]]]"), true),
        (format!("[[[{no}, {no}]]]"), false),
        (format!("[[[{yes}], []]]"), true),
    ] {
        let want = if want { "allowed" } else { NONE_ALLOWED };
        assert_eq!(verdict(&with_rules(&rules), ""), want, "{rules}");
    }
}

#[test]
fn policies_apply_by_scope_and_denying_ones_come_first() {
    const ALL: &str = "[[]]";
    const NONE: &str = "[]";
    let p = |action, rules| policy("p", "n", "WorkloadSelector", action, rules);
    let q = |ns, scope, action, rules| policy("q", ns, scope, action, rules);
    for (policies, want) in [
        (p("Allow", ALL), "allowed"),
        (p("Deny", ALL), "explicitly denied by: n/p"),
        (p("Deny", NONE), "allowed"),
        (p("Allow", NONE), NONE_ALLOWED),
        (p("Allow", ALL) + &q("n", "Namespace", "Deny", ALL), "explicitly denied by: n/q"),
        (p("Allow", ALL) + &q("m", "Namespace", "Deny", ALL), "allowed"),
        (p("Allow", ALL) + &q("m", "Global", "Deny", ALL), "explicitly denied by: m/q"),
        (p("Allow", ALL) + &q("n", "WorkloadSelector", "Deny", ALL), "allowed"),
        (p("Deny", NONE) + &q("n", "Namespace", "Allow", NONE), NONE_ALLOWED),
        (p("Allow", NONE) + &q("m", "Global", "Allow", ALL), "allowed"),
    ] {
        assert_eq!(verdict(&policies, "a/b"), want, "{policies}");
    }
}

#[test]
fn trials_are_reported_once_and_not_enforced() {
    let policies = "\
- {name: p, namespace: n, scope: Namespace, action: Deny, dryRun: true, rules: [[]]}
- {name: q, namespace: m, scope: Global, action: Allow, dryRun: true, rules: [[]]}
- {name: r, namespace: n, scope: Namespace, action: Allow, dryRun: true, rules: []}
";
    assert_eq!(verdict(policies, "a/b"), "allowed");
    let mesh = mesh(policies);
    let workload = mesh.find_workload("w").unwrap();
    let connection = connection("a/b");
    let keys: Vec<&str> = dry_run(&mesh, workload, &connection).map(|p| &*p.key).collect();
    assert_eq!(keys, ["m/q", "n/p"]);
}

#[test]
fn policies_that_nobody_knows_fail_closed() {
    let known = mesh(&with_rules("[[]]"));
    let workload = known.find_workload("w").unwrap();
    let connection = connection("a/b");
    let verdict = |policies: Vec<Policy>| {
        let removed = [Update::RemovePolicy("n/p".into())];
        let updates = removed.into_iter().chain(policies.into_iter().map(Update::Policy));
        evaluate(&known.apply(Origin::File, updates), workload, &connection)
    };
    let missing = Denial::Missing("n/p".into());
    assert_eq!(
        missing.to_string(),
        "policy n/p selects this workload but is not known, and none allowed"
    );
    assert_eq!(verdict(vec![]), Verdict::Denied { reason: missing });
    // Another one that allows still does.
    let mut other = Policy::clone(known.find_policy("n/p").unwrap());
    (other.key, other.scope) = ("n/other".into(), Scope::Namespace);
    assert_eq!(verdict(vec![other]), Verdict::Allowed);
}
