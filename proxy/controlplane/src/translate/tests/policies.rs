//! Authorization policies.

use culvert_proto::istio::security::{
    Action, Authorization, Match, Scope, string_match::MatchType,
};

use super::{Mesh, pod};

fn policy(namespace: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p, namespace: {namespace}}}\nspec: {{{spec}}}\n"
    )
}

#[track_caller]
fn of(spec: &str) -> (Authorization, Vec<String>) {
    let mesh = Mesh::of(&policy("shop", spec));
    (mesh.policy("shop/p").unwrap(), mesh.faults())
}

/// The matches of each rule of each group.
fn matches(policy: &Authorization) -> Vec<Vec<Vec<Match>>> {
    let rules = |group: &culvert_proto::istio::security::Group| {
        group.rules.iter().map(|rule| rule.matches.clone()).collect()
    };
    policy.groups.iter().map(rules).collect()
}

#[test]
fn scope_and_action_are_those_of_the_object() {
    let found = |namespace: &str, spec: &str| {
        let policy = Mesh::of(&policy(namespace, spec)).policy(&format!("{namespace}/p")).unwrap();
        (policy.scope(), policy.action())
    };
    assert_eq!(found("shop", ""), (Scope::Namespace, Action::Allow));
    assert_eq!(found("istio-system", "action: DENY"), (Scope::Global, Action::Deny));
    let selector = "selector: {matchLabels: {app: web}}";
    assert_eq!(found("shop", selector), (Scope::WorkloadSelector, Action::Allow));
    assert_eq!(found("istio-system", selector), (Scope::WorkloadSelector, Action::Allow));
}

#[test]
fn workloads_name_the_policies_that_select_them() {
    let named = |name: &str, namespace: &str, app: &str| {
        policy(namespace, &format!("selector: {{matchLabels: {{app: {app}}}}}"))
            .replace("name: p,", &format!("name: {name},"))
    };
    let mesh = Mesh::of(&format!(
        "{}{}{}{}{}{}",
        pod("web", ", labels: {app: web}", "", ""),
        named("z", "shop", "web"),
        named("a", "istio-system", "web"),
        named("b", "shop", "other"),
        named("c", "bank", "web"),
        policy("shop", ""),
    ));
    assert_eq!(mesh.pod("web").authorization_policies, ["istio-system/a", "shop/z"]);
}

#[test]
fn sources_operations_and_conditions_become_clauses() {
    let (policy, faults) = of(
        "rules: [{from: [{source: {principals: ['td/ns/a/sa/b', 'td/*', '*/sa/b', '*'], notNamespaces: [x]}}, \
         {source: {ipBlocks: [10.0.0.0/8, 192.0.2.1], serviceAccounts: [web, bank/ledger]}}], \
         to: [{operation: {ports: ['80'], notPorts: [81]}}], \
         when: [{key: destination.port, values: ['443']}, {key: source.ip, notValues: [10.1.0.0/16]}]}]",
    );
    assert!(faults.is_empty(), "{faults:?}");
    let groups = matches(&policy);
    let [to, from, port, ip] = &groups[0][..] else { panic!("{groups:?}") };
    assert_eq!(
        (&to[0].destination_ports[..], &to[0].not_destination_ports[..]),
        (&[80][..], &[81][..])
    );
    let kinds: Vec<_> = from[0].principals.iter().map(|p| p.match_type.clone().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            MatchType::Exact("td/ns/a/sa/b".into()),
            MatchType::Prefix("td/".into()),
            MatchType::Suffix("/sa/b".into()),
            MatchType::Presence(()),
        ]
    );
    assert_eq!(from[0].not_namespaces.len(), 1);
    let nets: Vec<_> = from[1].source_ips.iter().map(|net| net.length).collect();
    assert_eq!(nets, [8, 32]);
    let accounts: Vec<_> = from[1]
        .service_accounts
        .iter()
        .map(|a| (a.namespace.as_str(), a.service_account.as_str()))
        .collect();
    assert_eq!(accounts, [("shop", "web"), ("bank", "ledger")]);
    assert_eq!(port[0].destination_ports, [443]);
    assert_eq!(ip[0].not_source_ips[0].length, 16);
}

#[test]
fn an_empty_rule_matches_everything_and_no_rule_nothing() {
    assert_eq!(matches(&of("rules: [{}]").0), [Vec::<Vec<Match>>::new()]);
    assert!(of("").0.groups.is_empty());
}

#[test]
fn what_a_node_cannot_see_makes_a_policy_stricter() {
    let http = "to: [{operation: {methods: [GET]}}]";
    let from = "from: [{source: {namespaces: [a]}}]";

    let (allow, faults) = of(&format!("rules: [{{{http}, {from}}}, {{{from}}}]"));
    assert_eq!(allow.groups.len(), 1, "the rule allows nothing");
    assert!(
        faults[0].contains("nodes do not see methods, so rules with them allow nothing"),
        "{faults:?}"
    );
    let (none, _) = of(&format!("rules: [{{{http}}}]"));
    assert!(none.groups.is_empty(), "and without another, nothing is allowed");
    let twice = of(&format!("rules: [{{{http}}}, {{{http}, {from}}}]")).0;
    assert!(twice.groups.is_empty(), "each rule by itself");

    let (deny, faults) = of(&format!("action: DENY, rules: [{{{http}, {from}}}]"));
    let groups = matches(&deny);
    assert_eq!((groups.len(), groups[0].len()), (1, 1), "what remains of the rule denies");
    assert_eq!(groups[0][0][0].namespaces.len(), 1);
    assert!(faults[0].contains("deny without them"), "{faults:?}");
    let all = of(&format!("action: DENY, rules: [{{{http}}}]")).0;
    assert_eq!(matches(&all), [Vec::<Vec<Match>>::new()], "it denies everything");
    let ports = of("action: DENY, rules: [{to: [{operation: {methods: [GET], ports: ['80']}}]}]").0;
    assert_eq!(matches(&ports)[0][0][0].destination_ports, [80]);
    let when = of("action: DENY, rules: [{when: [{key: 'request.headers[x]', values: [y]}]}]").0;
    assert_eq!(matches(&when), [Vec::<Vec<Match>>::new()]);
}

#[test]
fn what_only_a_waypoint_can_do_is_left_to_it() {
    let target = "targetRefs: [{group: '', kind: Service, name: web}]";
    let mesh = Mesh::of(&policy("shop", target));
    assert!(mesh.resources.is_empty() && mesh.faults().is_empty());
    for action in ["AUDIT", "CUSTOM"] {
        let mesh = Mesh::of(&policy("shop", &format!("action: {action}")));
        assert!(mesh.resources.is_empty());
        assert!(mesh.faults()[0].contains("need a waypoint"), "{:?}", mesh.faults());
    }
}

#[test]
fn a_policy_can_be_on_trial() {
    let yaml = policy("shop", "")
        .replace("namespace: shop}", "namespace: shop, annotations: {istio.io/dry-run: 'true'}}");
    assert!(Mesh::of(&yaml).policy("shop/p").unwrap().dry_run);
}
