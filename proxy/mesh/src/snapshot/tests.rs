use std::path::Path;

use super::*;
use crate::{
    file,
    policy::{Connection, Verdict, evaluate},
    workload::Health,
};

/// A workload of one address; `more` are further fields.
fn workload(uid: &str, ip: &str, more: &str) -> Arc<Workload> {
    let text = format!(
        "workloads: [{{uid: {uid}, name: w, namespace: n, workloadIps: ['{ip}'], {more}}}]"
    );
    let mesh = file::parse(Path::new("mesh.yaml"), &text).unwrap();
    Arc::clone(mesh.find_workload(uid).unwrap())
}

fn of(workloads: &[&Arc<Workload>]) -> Snapshot {
    let updates = workloads.iter().map(|w| Update::Workload(Workload::clone(w)));
    Snapshot::default().apply(Origin::ControlPlane, updates)
}

#[track_caller]
fn check_owner(workloads: &[&Arc<Workload>], want: Option<&str>) {
    let mesh = of(workloads);
    let ip: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
    assert_eq!(mesh.find_by_address("", &ip).map(|w| &*w.uid), want);
    let reversed: Vec<_> = workloads.iter().rev().copied().collect();
    let reversed = of(&reversed);
    assert_eq!(reversed.find_by_address("", &ip).map(|w| &*w.uid), want);
}

#[test]
fn addresses_belong_to_pods_first_then_to_the_mesh_and_never_to_hosts() {
    let plain = workload("a//Entry/plain", "10.0.0.1", "protocol: TCP");
    let meshed = workload("a//Entry/meshed", "10.0.0.1", "protocol: HBONE");
    let pod = workload("a//Pod/n/w", "10.0.0.1", "protocol: TCP");
    let host = workload("a//Pod/n/host", "10.0.0.1", "networkMode: HostNetwork");
    let elsewhere = workload("a//Pod/n/elsewhere", "10.0.0.1", "network: x");
    check_owner(&[&host, &elsewhere], None);
    check_owner(&[&plain, &meshed], Some("a//Entry/meshed"));
    check_owner(&[&plain, &meshed, &pod, &host], Some("a//Pod/n/w"));
}

#[test]
fn pods_are_found_by_name_unless_clusters_share_it() {
    let pod = PodRef { name: "w".into(), namespace: "n".into(), service_account: "default".into() };
    let other = PodRef { service_account: "other".into(), ..pod.clone() };
    let one = workload("a//Pod/n/w", "10.0.0.1", "clusterId: a");
    let two = workload("b//Pod/n/w", "10.0.0.2", "clusterId: b");
    let mesh = of(&[&one]);
    assert_eq!(mesh.find_local(&pod), Some(&one));
    assert_eq!(mesh.find_local(&other), None);
    let mesh = of(&[&one, &two]);
    assert_eq!(mesh.find_local(&pod), None);
}

#[test]
fn services_of_one_name_or_range_are_ranked() {
    let text = "
services:
- {name: a, namespace: a, hostname: x, vips: [/10.1.0.1], cidrVips: [{cidr: 10.2.0.0/16}]}
- {name: b, namespace: b, hostname: x, vips: [/10.1.0.1], cidrVips: [{cidr: 10.2.0.0/16}],
   canonical: true}
- {name: c, namespace: c, hostname: x, vips: [/10.1.0.1], cidrVips: [{cidr: 10.2.0.0/24}],
   visibility: Namespace}
- {name: d, namespace: d, hostname: x, cidrVips: [{cidr: 10.2.0.0/20}]}
";
    let mesh = file::parse(Path::new("mesh.yaml"), text).unwrap();
    let ip: IpAddr = "10.2.0.1".parse().unwrap();
    let vip: IpAddr = "10.1.0.1".parse().unwrap();
    for (client, by_name, by_range) in
        [("a", "a", "a"), ("b", "b", "b"), ("c", "c", "c"), ("d", "d", "d"), ("z", "b", "d")]
    {
        let name = best(mesh.services_of_hostname("x"), client).unwrap();
        assert_eq!(&*name.name, by_name, "{client}");
        assert_eq!(&*mesh.find_by_cidr("", &ip, client).unwrap().name, by_range, "{client}");
    }
    assert_eq!(&*mesh.find_by_vip("", &vip, "c").unwrap().name, "c");
    assert_eq!(&*mesh.find_by_vip("", &vip, "z").unwrap().name, "b");
    assert!(mesh.find_by_vip("x", &vip, "z").is_none());
}

#[test]
fn records_are_listed_in_order_and_the_last_of_a_key_counts() {
    let old = workload("b", "10.0.0.1", "node: old");
    let new = workload("b", "10.0.0.1", "node: new");
    let mesh = of(&[&old, &new, &workload("a", "10.0.0.2", "")]);
    let listed: Vec<_> = mesh.workloads().map(|w| (&*w.uid, &*w.node)).collect();
    assert_eq!(listed, [("a", ""), ("b", "new")]);
}

/// The records of a file, as updates.
fn updates(text: &str) -> Vec<Update> {
    let mesh = file::parse(Path::new("mesh.yaml"), text).unwrap();
    let workloads = mesh.workloads().map(|w| Update::Workload(Workload::clone(w)));
    let services = mesh.services().map(|s| Update::Service(Service::clone(s)));
    let policies = mesh.policies().map(|p| Update::Policy(Policy::clone(p)));
    workloads.chain(services).chain(policies).collect()
}

const RECORDS: &str = "
workloads:
- {uid: a, name: a, namespace: n, workloadIps: [10.0.0.1], hostname: a.n, services: {n/x: {80: 81}}}
- {uid: b, name: b, namespace: n, workloadIps: [10.0.0.2], services: {n/x: {}, n/y: {}}}
services:
- {name: x, namespace: n, hostname: x, vips: [/10.1.0.1], cidrVips: [{cidr: 10.2.0.0/16}]}
- {name: y, namespace: n, hostname: y}
policies:
- {name: all, namespace: n, scope: Global, action: Deny, rules: [[]]}
- {name: some, namespace: n, scope: Namespace, action: Allow}
";

/// Everything that can be asked of a snapshot of [`RECORDS`].
fn answers(mesh: &Snapshot) -> Vec<String> {
    let name = |hostname: &str| ServiceName { namespace: "n".into(), hostname: hostname.into() };
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let pod = |name: &str| PodRef {
        name: name.into(),
        namespace: "n".into(),
        service_account: "default".into(),
    };
    let endpoints = |hostname: &str| {
        let endpoints = mesh.endpoints(&name(hostname));
        let told: Vec<_> = endpoints.iter().map(|e| (&*e.workload().uid, e.ports())).collect();
        format!("{told:?}")
    };
    vec![
        format!("{:?}", mesh.workloads().map(|w| &*w.uid).collect::<Vec<_>>()),
        format!("{:?}", mesh.services().map(|s| &*s.name).collect::<Vec<_>>()),
        format!("{:?}", mesh.policies().map(|p| &*p.key).collect::<Vec<_>>()),
        endpoints("x"),
        endpoints("y"),
        format!("{:?}", ["a", "b"].map(|name| mesh.find_local(&pod(name)).is_some())),
        format!("{:?}", mesh.find_by_address("", &ip("10.0.0.1")).is_some()),
        format!("{:?}", mesh.find_by_hostname(&name("a.n")).is_some()),
        format!("{:?}", mesh.find_service(&name("x")).is_some()),
        format!("{:?}", mesh.services_of_hostname("x").count()),
        format!("{:?}", mesh.find_by_vip("", &ip("10.1.0.1"), "n").is_some()),
        format!("{:?}", mesh.find_by_cidr("", &ip("10.2.0.1"), "n").is_some()),
        format!("{:?}", mesh.workloads().map(|w| denial(mesh, w)).collect::<Vec<_>>()),
    ]
}

/// The first policy that denies a connection to `workload`.
fn denial(mesh: &Snapshot, workload: &Workload) -> Verdict {
    let connection = Connection {
        source: [10, 0, 0, 9].into(),
        identity: None,
        destination: ([10, 0, 0, 1], 80).into(),
    };
    evaluate(mesh, workload, &connection)
}

#[test]
fn records_come_in_any_order() {
    let all = Snapshot::default().apply(Origin::ControlPlane, updates(RECORDS));
    assert_eq!(answers(&all)[3], r#"[("a", Ports([(80, 81)])), ("b", Ports([]))]"#);
    assert!(answers(&all)[5..].iter().all(|answer| !answer.contains("false")));
    let mut order = updates(RECORDS);
    for _ in 0..order.len() {
        order.rotate_left(1);
        let one_by_one = order.iter().fold(Snapshot::default(), |mesh, update| {
            mesh.apply(Origin::ControlPlane, [update.clone()])
        });
        assert_eq!(answers(&one_by_one), answers(&all));
    }
}

#[test]
fn what_is_removed_leaves_no_trace_and_comes_back_whole() {
    let all = Snapshot::default().apply(Origin::ControlPlane, updates(RECORDS));
    let removals = || {
        let address = |name: &str| Update::RemoveAddress(name.into());
        let policy = |key: &str| Update::RemovePolicy(key.into());
        [
            address("a"),
            address("n/x"),
            policy("n/all"),
            address("n/y"),
            policy("n/some"),
            address("b"),
        ]
    };
    for (index, removal) in removals().into_iter().enumerate() {
        let without = all.apply(Origin::ControlPlane, [removal]);
        assert_ne!(answers(&without), answers(&all), "{index}");
        // A service that comes back has the endpoints that it had.
        let again = without.apply(Origin::ControlPlane, updates(RECORDS));
        assert_eq!(answers(&again), answers(&all), "{index}");
    }
    let none = all.apply(Origin::ControlPlane, removals());
    assert_eq!(answers(&none), answers(&Snapshot::default()));
    assert!(none.endpoints.is_empty() && none.addresses.is_empty() && none.hostnames.is_empty());
    let unknown = ["c", "n/z", "n/x/y", ""].map(|name| Update::RemoveAddress(name.into()));
    assert_eq!(answers(&all.apply(Origin::ControlPlane, unknown)), answers(&all));
}

#[test]
fn workloads_leave_the_services_that_they_name_no_more() {
    let all = Snapshot::default().apply(Origin::ControlPlane, updates(RECORDS));
    let mut b = Workload::clone(all.find_workload("b").unwrap());
    b.services.remove(0);
    b.health = Health::Unhealthy;
    let next = all.apply(Origin::ControlPlane, [Update::Workload(b)]);
    assert_eq!(answers(&next)[3], r#"[("a", Ports([(80, 81)]))]"#);
    let y = ServiceName { namespace: "n".into(), hostname: "y".into() };
    assert_eq!(next.endpoints(&y).find("b").unwrap().health(), Health::Unhealthy);
    // The version before is as it was.
    assert_eq!(all.endpoints(&y).find("b").unwrap().health(), Health::Healthy);
}

#[test]
fn origins_have_each_their_own_say_and_the_file_comes_first() {
    let file = file::parse(Path::new("mesh.yaml"), RECORDS).unwrap();
    let local = Snapshot::default().replace(Origin::File, &file);
    let mut theirs = updates(RECORDS);
    for update in &mut theirs {
        if let Update::Workload(workload) = update {
            workload.node = "theirs".into();
        }
    }
    theirs.push(Update::Workload(Workload::clone(&workload("c", "10.0.0.3", ""))));
    let both = local.apply(Origin::ControlPlane, theirs);
    let nodes = |mesh: &Snapshot| {
        mesh.workloads().map(|w| format!("{} {}", w.uid, w.node)).collect::<Vec<_>>()
    };
    assert_eq!(nodes(&both), ["a ", "b ", "c "]);
    // A file that says nothing any more leaves what the control plane says.
    let remote = both.replace(Origin::File, &Snapshot::default());
    assert_eq!(nodes(&remote), ["a theirs", "b theirs", "c "]);
    assert_eq!(answers(&remote)[1..], answers(&both)[1..]);
    let removals = ["a", "b", "c", "n/x", "n/y"].map(|name| Update::RemoveAddress(name.into()));
    let local = both.apply(Origin::ControlPlane, removals.clone());
    assert_eq!(nodes(&local), ["a ", "b "]);
    assert_eq!(nodes(&remote.apply(Origin::ControlPlane, removals)), [""; 0]);
}

#[test]
fn services_that_share_a_namespace_and_an_address_are_kept_apart() {
    let text = "
services:
- {name: x, namespace: n, hostname: x, vips: [/10.1.0.1]}
- {name: y, namespace: n, hostname: y, vips: [/10.1.0.1]}
";
    let both = Snapshot::default().apply(Origin::ControlPlane, updates(text));
    let ip: IpAddr = "10.1.0.1".parse().unwrap();
    assert_eq!(both.services_of_vip("", &ip).count(), 2);
    let one = both.apply(Origin::ControlPlane, [Update::RemoveAddress("n/x".into())]);
    assert_eq!(&*one.find_by_vip("", &ip, "n").unwrap().name, "y");
}
