use std::net::IpAddr;

use super::*;
use crate::{
    PodRef, Workload,
    policy::{Enforcement, TextMatch},
    workload::{Health, Protocol},
};

const GOOD: &str = include_str!("tests/good.yaml");

fn parse(text: &str) -> Result<Snapshot, FileError> {
    super::parse(Path::new("mesh.yaml"), text)
}

#[test]
fn every_field_is_read() {
    let mesh = parse(GOOD).unwrap();
    let pod = |name: &str, account: &str| PodRef {
        name: name.into(),
        namespace: "shop".into(),
        service_account: account.into(),
    };
    let web = mesh.find_local(&pod("web-0", "web")).unwrap();
    assert_eq!(web.identity.uri(), "spiffe://cluster.local/ns/shop/sa/web");
    assert_eq!((&*web.canonical_revision, web.capacity), ("1.10", 3));
    assert_eq!(web.addresses.len(), 2);
    let waypoint = mesh.find_local(&pod("waypoint", "default")).unwrap();
    assert_eq!((waypoint.protocol, waypoint.capacity), (Protocol::Hbone, 1));
    let ip: IpAddr = "10.1.0.1".parse().unwrap();
    let service = mesh.find_by_vip("n1", &ip, "other").unwrap();
    let endpoints = mesh.endpoints(&service.key);
    assert_eq!(endpoints.len(), 2);
    let endpoint = |workload: &Workload| endpoints.find(&workload.uid).unwrap();
    assert_eq!(endpoint(waypoint).health(), Health::Unhealthy);
    assert_eq!(endpoint(web).target_port(service, 80), Some(8080));
    assert_eq!(endpoint(waypoint).target_port(service, 443), Some(8443));
    let policy = mesh.find_policy("shop/allow-api").unwrap();
    assert_eq!(policy.enforcement, Enforcement::DryRun);
    let principals = &policy.rules[0].clauses[0].matches[0].principals;
    assert_eq!(principals.any, [TextMatch::Suffix("/sa/api".into()), TextMatch::Presence]);
}

#[track_caller]
fn check(text: &str, want: &str) {
    match parse(text) {
        Ok(_) => panic!("accepted:\n{text}"),
        Err(error) => assert_eq!(error.to_string(), want, "for:\n{text}"),
    }
}

/// A file with one right workload, on the lines up to 6, and `more` after it.
fn after_workload(more: &str) -> String {
    format!(
        "workloads:\n- uid: a\n  name: a\n  namespace: n\n  workloadIps: [10.0.0.1]\n  protocol: \
         HBONE\n{more}"
    )
}

/// A file with one service of the given further fields, from line 5 on.
fn service(fields: &str) -> String {
    format!("services:\n- name: s\n  namespace: n\n  hostname: s.n\n  {fields}\n")
}

/// A file with one policy of one match, on line 6.
fn policy(one_match: &str) -> String {
    format!(
        "policies:\n- name: p\n  namespace: n\n  scope: Global\n  action: Allow\n  rules: \
         [[[{one_match}]]]\n"
    )
}

#[test]
fn workloads_are_checked_field_by_field() {
    let cases = [
        ("  network: {}", "7: workloads[0].network: value is of the wrong kind; write a text"),
        (
            "  workloadType: Deployment",
            "7: workloads[0].workloadType: unknown value `Deployment`; use one of deployment, \
             cronjob, pod, job",
        ),
        (
            "  capacity: -1",
            "7: workloads[0].capacity: `-1` is not a number; write one from 0 to 4294967295",
        ),
        (
            "  trustDomain: TD",
            "7: workloads[0].trustDomain: `TD` is not a trust domain; use lower-case letters, \
             digits, `.`, `-`, `_`",
        ),
        (
            "  serviceAccount: a/b",
            "7: workloads[0].serviceAccount: `a/b` is not a name; use letters, digits, `.`, `-` \
             and `_` only",
        ),
        (
            "  nativeTunnel: yes",
            "7: workloads[0].nativeTunnel: invalid boolean (true or false expected); correct the \
             YAML",
        ),
        (
            "  hostname: a b",
            "7: workloads[0].hostname: `a b` is not a host name; write one, such as \
             web.example.com",
        ),
        (
            "  waypoint: {destination: w}",
            "7: workloads[0].waypoint.destination: `w` is not a destination; write network/ip or \
             namespace/hostname",
        ),
        (
            "  waypoint: {destination: /10.0.0.1, hboneMtlsPort: 0}",
            "7: workloads[0].waypoint.hboneMtlsPort: `0` is not a port; write a number from 1 to \
             65535",
        ),
        (
            "  applicationTunnel: {port: 15008}",
            "7: workloads[0].applicationTunnel.port: port 15008 is the proxy's own; give the \
             application another",
        ),
        (
            "  services:\n    x: {80: 80}",
            "8: workloads[0].services: `x` is not a service; write namespace/hostname",
        ),
        ("  protocol: TCP", "7: workloads[0]: `protocol` is given twice; keep one"),
    ];
    for (field, want) in cases {
        check(&after_workload(&format!("{field}\n")), &format!("mesh.yaml:{want}"));
    }
    let unknown = parse(&after_workload("  waypont: 1\n")).unwrap_err();
    let text = unknown.to_string();
    assert_eq!((unknown.line(), unknown.field()), (7, "workloads[0].waypont"));
    assert!(text.contains("unknown field `waypont`; use one of uid, name, "), "{text}");
}

#[test]
fn required_fields_and_their_values_are_checked() {
    let start = "workloads:\n- uid: a\n  name: a\n";
    check(start, "mesh.yaml:3: workloads[0]: field `namespace` is missing; add it");
    check(
        &format!("{start}  namespace: n\n  workloadIps: [10.0.0.300]\n"),
        "mesh.yaml:5: workloads[0].workloadIps[0]: `10.0.0.300` is not an IP address; write one, \
         such as 10.0.0.1",
    );
    check(
        &format!("{start}  namespace: n\n  protocol: HTTP\n"),
        "mesh.yaml:5: workloads[0].protocol: unknown value `HTTP`; use one of TCP, HBONE",
    );
    check("workloads:\n- uid: ''\n", "mesh.yaml:2: workloads[0].uid: text is empty; write a value");
}

#[test]
fn records_are_unique() {
    check(
        &after_workload("- uid: a\n  name: b\n  namespace: n\n"),
        "mesh.yaml:7: workloads[1].uid: uid `a` is also that of workloads[0]; make it unique",
    );
    check(
        &after_workload("- uid: b\n  name: a\n  namespace: n\n"),
        "mesh.yaml:7: workloads[1].name: name `a` is also that of workloads[0], in the same \
         namespace, service account and cluster; make it unique",
    );
    check(
        &after_workload(
            "- uid: b\n  name: b\n  namespace: n\n  workloadIps:\n  - 10.0.0.2\n  - \
             '::ffff:10.0.0.1'\n",
        ),
        "mesh.yaml:12: workloads[1].workloadIps[1]: 10.0.0.1 is also an address of workloads[0] \
         in network \"\"; let one workload own it",
    );
    check(
        &format!("{}- name: t\n  namespace: n\n  hostname: S.n\n", service("canonical: true")),
        "mesh.yaml:8: services[1].hostname: service n/s.n is also services[0]; make \
         namespace/hostname unique",
    );
    check(
        "policies:\n- &a {name: p, namespace: n, scope: Global, action: Deny}\n- *a\n",
        "mesh.yaml:3: policies[1].name: policy n/p is also policies[0]; make it unique",
    );
}

#[test]
fn addresses_of_other_networks_and_of_hosts_may_repeat() {
    let other = "- {uid: b, name: b, namespace: n, network: x, workloadIps: [10.0.0.1]}\n";
    let host =
        "- {uid: c, name: c, namespace: n, networkMode: HostNetwork, workloadIps: [10.0.0.1]}\n";
    let mesh = parse(&after_workload(&format!("{other}{host}"))).unwrap();
    let ip: IpAddr = "10.0.0.1".parse().unwrap();
    assert_eq!(&*mesh.find_by_address("", &ip).unwrap().uid, "a");
    assert_eq!(&*mesh.find_by_address("x", &ip).unwrap().uid, "b");
}

#[test]
fn references_lead_somewhere() {
    let cases = [
        (
            "  waypoint: {destination: n/w}",
            "7: workloads[0].waypoint.destination: no service or workload is n/w",
        ),
        (
            "  waypoint: {destination: /10.0.0.7}",
            "7: workloads[0].waypoint.destination: no service or workload is /10.0.0.7",
        ),
        (
            "  networkGateway: {destination: x/10.0.0.1}",
            "7: workloads[0].networkGateway.destination: no service or workload is x/10.0.0.1",
        ),
        (
            "  authorizationPolicies:\n  - n/b",
            "8: workloads[0].authorizationPolicies[0]: no policy is called n/b",
        ),
        (
            "  services:\n    n/x:\n      80: 80",
            "8: workloads[0].services.n/x: no service is called n/x",
        ),
    ];
    for (field, want) in cases {
        let want = format!("mesh.yaml:{want}; add it or remove the reference");
        check(&after_workload(&format!("{field}\n")), &want);
    }
    check(
        &service("endpoints: {x: {workloadUid: x}}"),
        "mesh.yaml:5: services[0].endpoints.x: no workload has uid `x`; add it or remove the \
         endpoint",
    );
    check(
        &service("weightedWaypoints: [{destination: {destination: n/q}, weight: 1}]"),
        "mesh.yaml:5: services[0].weightedWaypoints[0].destination.destination: no service or \
         workload is n/q; add it or remove the reference",
    );
    let twice = service("endpoints: {a: {workloadUid: a, port: {80: 81}}}");
    check(
        &after_workload(&format!("  services: {{n/s.n: {{80: 82}}}}\n{twice}")),
        "mesh.yaml:12: services[0].endpoints.a: workload `a` is an endpoint of n/s.n twice, with \
         different ports or status; declare it in one place",
    );
}

#[test]
fn services_are_checked_field_by_field() {
    let cases = [
        (
            "vips: [10.0.0.1]",
            "vips[0]: `10.0.0.1` has no network; write network/ip, or /ip for the default network",
        ),
        (
            "vips: [n/10.0.0.]",
            "vips[0]: `10.0.0.` is not an IP address; write one, such as 10.0.0.1",
        ),
        (
            "cidrVips: [{cidr: 10.0.0.0/33}]",
            "cidrVips[0].cidr: `10.0.0.0/33` is not a CIDR; write one, such as 10.0.0.0/8",
        ),
        (
            "ports: {80: 65536}",
            "ports.80: `65536` is not a target port; write a number from 0 to 65535",
        ),
        ("ports: {0: 80}", "ports.0: `0` is not a port; write a number from 1 to 65535"),
        ("ports: {80: 1, 80: 2}", "ports: `80` is given twice; keep one"),
        (
            "subjectAltNames: [foo]",
            "subjectAltNames[0]: `foo`: identity does not start with spiffe://; write \
             spiffe://<trust domain>/ns/<namespace>/sa/<account>",
        ),
        (
            "loadBalancer: {mode: Random}",
            "loadBalancer.mode: unknown value `Random`; use one of Standard, Strict, Failover, \
             Passthrough",
        ),
        (
            "loadBalancer: {routingPreferences: [Rack]}",
            "loadBalancer.routingPreferences[0]: unknown value `Rack`; use one of Region, Zone, \
             Subzone, Node, Cluster, Network",
        ),
        ("visibility: Secret", "visibility: unknown value `Secret`; use one of Public, Namespace"),
        ("ipFamilies: IPv5", "ipFamilies: unknown value `IPv5`; use one of Dual, IPv4, IPv6"),
    ];
    for (field, want) in cases {
        check(&service(field), &format!("mesh.yaml:5: services[0].{want}"));
    }
}

#[test]
fn policies_are_checked_field_by_field() {
    let cases = [
        (
            "{sourceIps: [1.2.3.4/33]}",
            ".sourceIps[0]: `1.2.3.4/33` is not a CIDR; write one, such as 10.0.0.0/8",
        ),
        (
            "{notSourceIps: ['::ffff:10.0.0.0/104']}",
            ".notSourceIps[0]: `::ffff:10.0.0.0/104` is an IPv4 range in IPv6 form; write it as \
             IPv4",
        ),
        ("{principals: [{Exact: ''}]}", ".principals[0].Exact: text is empty; write a value"),
        (
            "{principals: [{Regex: x}]}",
            ".principals[0]: unknown value `Regex`; use one of Exact, Prefix, Suffix, Presence",
        ),
        (
            "{principals: [{Presence: [x]}]}",
            ".principals[0].Presence: write `[]` here; nothing else",
        ),
        (
            "{destinationPorts: [70000]}",
            ".destinationPorts[0]: `70000` is not a port; write a number from 1 to 65535",
        ),
        (
            "{serviceAccounts: [{namespace: a}]}",
            ".serviceAccounts[0]: field `serviceAccount` is missing; add it",
        ),
        ("[]", ": value is of the wrong kind; write a mapping"),
    ];
    for (one_match, want) in cases {
        check(&policy(one_match), &format!("mesh.yaml:6: policies[0].rules[0][0][0]{want}"));
    }
    check(
        "policies:\n- {name: p, namespace: n, scope: Cluster, action: Allow}\n",
        "mesh.yaml:2: policies[0].scope: unknown value `Cluster`; use one of Global, Namespace, \
         WorkloadSelector",
    );
    check(
        "policies:\n- {name: p, namespace: n, scope: Global}\n",
        "mesh.yaml:2: policies[0]: field `action` is missing; add it",
    );
}

#[test]
fn files_that_are_no_mesh_are_refused() {
    const EMPTY: &str = "mesh.yaml:1: file is empty; write `workloads: []` if no workload is meant";
    check("", EMPTY);
    check("\n# only a comment\n", EMPTY);
    check("hello", "mesh.yaml:1: value is of the wrong kind; write a mapping");
    check("---\n", "mesh.yaml:1: value is of the wrong kind; write a mapping");
    check("workloads:\n", "mesh.yaml:1: workloads: value is of the wrong kind; write a list");
    check("workloads: []\n---\nworkloads: []\n", "mesh.yaml:3: a second document starts; keep one");
    check(
        "workload: []\n",
        "mesh.yaml:1: workload: unknown field `workload`; use one of workloads, services, policies",
    );
    check("workloads: [", "mesh.yaml:1: workloads: unclosed bracket '['; correct the YAML");
}

#[test]
fn hostile_files_are_refused_in_one_short_line() {
    let deep = format!("workloads: {}", "[".repeat(100_000));
    let deep_blocks = format!("workloads:\n{}", "- ".repeat(100_000));
    let wide = "{sourceIps: [10.0.0.0/8]},".repeat(1000);
    let aliased = policy(&wide).replace("- name", "- &a\n  name") + &"- *a\n".repeat(100_000);
    let long = format!("workloads: {}\n", "x".repeat(1 << 20));
    let controls = "\"a\\nb\\e[31m\": 1\n".to_owned();
    let huge = " ".repeat(MAX_FILE + 1);
    for text in [deep, deep_blocks, aliased, long, controls, huge] {
        let line = parse(&text).unwrap_err().to_string();
        assert!(line.len() < 1000 && !line.contains(char::is_control), "{line:?}");
    }
}

#[test]
fn broken_copies_of_a_good_file_never_panic() {
    for (at, _) in GOOD.char_indices().step_by(7) {
        probe(GOOD.split_at(at).0);
    }
    let replacements =
        ["", ":", "-", "[", "}", "\"", "\n", "\t", "&a ", "*a", "!x ", "0", "\u{0}", "\u{e9}"];
    for (at, old) in GOOD.char_indices().step_by(47) {
        let (before, after) = GOOD.split_at(at);
        for new in replacements {
            probe(&format!("{before}{new}{}", after.strip_prefix(old).unwrap()));
        }
    }
}

/// A result is all that is asked of `text`; an error must fit a line.
#[track_caller]
fn probe(text: &str) {
    if let Err(error) = parse(text) {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}
