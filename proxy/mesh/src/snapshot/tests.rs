use std::path::Path;

use super::*;
use crate::file;

/// A workload of one address; `more` are further fields.
fn workload(uid: &str, ip: &str, more: &str) -> Arc<Workload> {
    let text = format!(
        "workloads: [{{uid: {uid}, name: w, namespace: n, workloadIps: ['{ip}'], {more}}}]"
    );
    let mesh = file::parse(Path::new("mesh.yaml"), &text).unwrap();
    Arc::clone(mesh.find_workload(uid).unwrap())
}

#[track_caller]
fn check_owner(workloads: &[&Arc<Workload>], want: Option<&str>) {
    let mesh = Snapshot::new(workloads.iter().copied().cloned(), [], []);
    let ip: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
    assert_eq!(mesh.find_by_address("", &ip).map(|w| &*w.uid), want);
    let reversed = Snapshot::new(workloads.iter().rev().copied().cloned(), [], []);
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
    let mesh = Snapshot::new([Arc::clone(&one)], [], []);
    assert_eq!(mesh.find_local(&pod), Some(&one));
    assert_eq!(mesh.find_local(&other), None);
    let mesh = Snapshot::new([one, two], [], []);
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
    let mesh = Snapshot::new([old, new, workload("a", "10.0.0.2", "")], [], []);
    let listed: Vec<_> = mesh.workloads().map(|w| (&*w.uid, &*w.node)).collect();
    assert_eq!(listed, [("a", ""), ("b", "new")]);
}
