//! What peer authentications come to, alone and inherited.

use culvert_proto::istio::security::{Action, Authorization, Scope};

use super::{Mesh, pod};

const STATIC: &str = "istio-system/istio_converted_static_strict";
const OWN: &str = "shop/converted_peer_authentication_web";

fn authentication(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {{{spec}}}\n"
    )
}

/// The mesh's mode, the namespace's, the workload's and its ports': which policy the workload names.
#[track_caller]
fn check(mesh: &str, namespace: &str, workload: &str, ports: &str, want: Option<&str>) -> Mesh {
    let mut yaml = pod("web", ", labels: {app: web}", "", "");
    let mode = |mode: &str| format!("mtls: {{mode: {mode}}}");
    if !mesh.is_empty() {
        yaml += &authentication("istio-system", "mesh", &mode(mesh));
    }
    if !namespace.is_empty() {
        yaml += &authentication("shop", "default", &mode(namespace));
    }
    if !workload.is_empty() {
        let spec = format!(
            "selector: {{matchLabels: {{app: web}}}}, {}, portLevelMtls: {{{ports}}}",
            mode(workload)
        );
        yaml += &authentication("shop", "web", &spec);
    }
    let found = Mesh::of(&yaml);
    let case = format!("{mesh}/{namespace}/{workload}/{ports}");
    assert_eq!(found.pod("web").authorization_policies, want.as_slice(), "{case}");
    assert_eq!(found.policy(OWN).is_some(), want == Some(OWN), "{case}");
    if let Some(policy) = found.policy(OWN) {
        assert_eq!((policy.scope(), policy.action()), (Scope::WorkloadSelector, Action::Deny));
    }
    found
}

#[test]
fn the_narrowest_that_is_set_counts() {
    check("", "", "", "", None);
    check("STRICT", "", "", "", Some(STATIC));
    check("PERMISSIVE", "", "", "", None);
    check("STRICT", "PERMISSIVE", "", "", None);
    check("STRICT", "UNSET", "", "", Some(STATIC));
    check("PERMISSIVE", "STRICT", "", "", Some(STATIC));
    check("STRICT", "STRICT", "PERMISSIVE", "", None);
    check("STRICT", "STRICT", "DISABLE", "", None);
    check("", "PERMISSIVE", "STRICT", "", Some(STATIC));
    check("STRICT", "PERMISSIVE", "UNSET", "", None);
    check("STRICT", "", "UNSET", "", Some(STATIC));
}

#[test]
fn ports_that_differ_make_a_policy_of_their_own() {
    let (loose, strict) = ("9090: {mode: PERMISSIVE}", "9090: {mode: STRICT}");
    check("", "", "STRICT", loose, Some(OWN));
    check("", "", "STRICT", "9090: {mode: DISABLE}", Some(OWN));
    check("", "", "STRICT", strict, Some(STATIC));
    check("", "", "STRICT", "9090: {mode: UNSET}", Some(STATIC));
    check("", "", "PERMISSIVE", strict, Some(OWN));
    check("", "", "PERMISSIVE", loose, None);
    check("STRICT", "", "UNSET", loose, Some(OWN));
    check("STRICT", "PERMISSIVE", "UNSET", loose, None);
    check("STRICT", "UNSET", "UNSET", loose, Some(OWN));
    check("STRICT", "", "UNSET", strict, Some(STATIC));
    check("", "", "UNSET", strict, Some(OWN));
    check("", "STRICT", "PERMISSIVE", strict, Some(OWN));
}

/// Each group's rules, each rule's matches, as `ports/not ports/whether it wants no identity`.
fn shape(policy: &Authorization) -> Vec<Vec<Vec<String>>> {
    let matched = |m: &culvert_proto::istio::security::Match| {
        format!(
            "{:?}/{:?}/{}",
            m.destination_ports,
            m.not_destination_ports,
            m.not_principals.len()
        )
    };
    let rules = |group: &culvert_proto::istio::security::Group| {
        group.rules.iter().map(|rule| rule.matches.iter().map(matched).collect()).collect()
    };
    policy.groups.iter().map(rules).collect()
}

#[test]
fn a_strict_workload_exempts_ports_in_one_group() {
    let ports = "9090: {mode: PERMISSIVE}, 80: {mode: DISABLE}";
    let mesh = check("", "", "STRICT", ports, Some(OWN));
    let want = [[["[]/[]/1"], ["[]/[80]/0"], ["[]/[9090]/0"]]];
    assert_eq!(shape(&mesh.policy(OWN).unwrap()), want);
}

#[test]
fn a_permissive_workload_guards_ports_each_in_a_group() {
    let ports = "9090: {mode: STRICT}, 80: {mode: STRICT}";
    let mesh = check("", "", "PERMISSIVE", ports, Some(OWN));
    assert_eq!(shape(&mesh.policy(OWN).unwrap()), [[["[80]/[]/1"]], [["[9090]/[]/1"]]]);
}

#[test]
fn the_shared_policy_is_there_as_soon_as_any_is() {
    let mut mesh = Mesh::of(&pod("web", "", "", ""));
    assert!(mesh.policy(STATIC).is_none());
    let (changed, _) = mesh.set(&authentication("other", "a", "mtls: {mode: PERMISSIVE}"));
    assert_eq!(changed, [STATIC]);
    assert_eq!(shape(&mesh.policy(STATIC).unwrap()), [[["[]/[]/1"]]]);
    let (_, gone) = mesh.remove(crate::objects::Kind::PeerAuthentication, "other", "a");
    assert_eq!(gone, [STATIC]);
}

#[test]
fn the_oldest_of_several_counts() {
    let aged = |name: &str, time: &str, mode: &str| {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\n\
             metadata: {{name: {name}, namespace: shop, creationTimestamp: '{time}'}}\nspec: {{mtls: {{mode: {mode}}}}}\n"
        )
    };
    let mesh = Mesh::of(&format!(
        "{}{}{}",
        pod("web", "", "", ""),
        aged("a", "2026-02-01T00:00:00Z", "PERMISSIVE"),
        aged("b", "2026-01-01T00:00:00Z", "STRICT"),
    ));
    assert_eq!(mesh.pod("web").authorization_policies, [STATIC]);
}

#[test]
fn a_selector_in_the_root_selects_nothing() {
    let root = authentication(
        "istio-system",
        "x",
        "selector: {matchLabels: {app: web}}, mtls: {mode: STRICT}",
    );
    let mesh = Mesh::of(&format!("{root}{}", pod("web", ", labels: {app: web}", "", "")));
    assert!(mesh.pod("web").authorization_policies.is_empty());
}
