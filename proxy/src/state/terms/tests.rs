use std::path::Path;

use culvert_mesh::file;

use super::*;

fn mesh(text: &str) -> Snapshot {
    file::parse(Path::new("mesh.yaml"), text).unwrap()
}

fn pod(name: &str) -> PodRef {
    PodRef { name: name.into(), namespace: "n".into(), service_account: "default".into() }
}

const PODS: &str = "
workloads:
- {uid: a, name: a, namespace: n, workloadIps: [10.0.0.1], authorizationPolicies: [NAMED]}
- {uid: b, name: b, namespace: n, workloadIps: [10.0.0.2]}
policies:
- {name: one, namespace: n, scope: WorkloadSelector, action: Allow}
- {name: two, namespace: n, scope: WorkloadSelector, action: Deny}
";

/// Whom the change from one text to the next concerns, of the pods `a` and `b`.
#[track_caller]
fn check(before: &str, after: &str, want: [bool; 2]) {
    let current = ArcSwap::from_pointee(mesh(before));
    let terms = PodTerms::default();
    let mut news = ["a", "b"].map(|name| terms.subscribe(&pod(name), &current));
    current.store(Arc::new(current.load().replace(culvert_mesh::Origin::File, &mesh(after))));
    terms.renew(&current);
    assert_eq!(news.each_mut().map(|news| news.has_changed().unwrap()), want);
}

fn pods(named: &str, more: &str) -> String {
    PODS.replace("NAMED", named) + more
}

#[test]
fn only_those_are_told_of_whom_policy_says_something_else() {
    let before = pods("n/one", "");
    let add = |scope: &str, namespace: &str| {
        pods(
            "n/one",
            &format!("- {{name: x, namespace: {namespace}, scope: {scope}, action: Deny}}\n"),
        )
    };
    check(&before, &before, [false, false]);
    check(&before, &add("Global", "x"), [true, true]);
    check(&before, &add("Namespace", "n"), [true, true]);
    check(&add("Namespace", "n"), &before, [true, true]);
    check(&before, &add("Namespace", "x"), [false, false]);
    check(&before, &add("WorkloadSelector", "n"), [false, false]);
    // The list of a workload's policies is as good a reason as the policies are.
    check(&before, &pods("n/two", ""), [true, false]);
    check(&before, &pods("", ""), [true, false]);
    check(&before, &before.replace("Allow", "Deny"), [true, false]);
    // What policy does not look at is none.
    check(&before, &before.replace("10.0.0.1]", "10.0.0.3], node: x"), [false, false]);
    check(&before, &before.replace("uid: b, name: b", "uid: b, name: c"), [false, true]);
}

#[test]
fn pods_without_connections_are_forgotten() {
    let current = ArcSwap::from_pointee(mesh(&pods("", "")));
    let terms = PodTerms::default();
    let first = terms.subscribe(&pod("a"), &current);
    let second = terms.subscribe(&pod("a"), &current);
    drop(first);
    terms.renew(&current);
    assert_eq!(terms.lock().len(), 1);
    drop(second);
    terms.renew(&current);
    assert_eq!(terms.lock().len(), 0);
}
