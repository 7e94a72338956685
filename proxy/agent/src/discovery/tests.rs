//! Against folders like those of `/proc`, whose networks are real.

use std::net::Ipv4Addr;

use super::{
    testing::{Node, may_make_networks},
    *,
};

const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";

/// The inode of the namespace that the pod is found in.
fn find_in(node: &Node, address: [u8; 4]) -> Option<u32> {
    let wanted = BTreeMap::from([(UID.into(), vec![IpAddr::V4(Ipv4Addr::from(address))])]);
    find(node.proc.path(), &wanted).unwrap().get(UID).map(Netns::inode)
}

const POD: &str = "0::/kubepods/pod2c48913c-b29f-11e7-9350-020968147796/9d2a";

#[test]
fn a_pod_is_found_by_a_process_in_the_network_that_has_its_address() {
    if !may_make_networks() {
        return;
    }
    let mut node = Node::new();
    let own = node.network("10.1.0.7/24");
    let inode = node.networks[0].inode();
    node.process(70, POD, 500, &own);
    assert_eq!(find_in(&node, [10, 1, 0, 7]), Some(inode));
    assert_eq!(find_in(&node, [10, 1, 0, 8]), None, "the address is another pod's");
}

#[test]
fn a_process_that_visits_another_network_does_not_take_it() {
    if !may_make_networks() {
        return;
    }
    let mut node = Node::new();
    let (own, foreign) = (node.network("10.1.0.7/24"), node.network("10.1.0.9/24"));
    let inode = node.networks[0].inode();
    node.process(60, POD, 400, &foreign);
    node.process(61, POD, 450, &foreign);
    node.process(70, POD, 500, &own);
    assert_eq!(find_in(&node, [10, 1, 0, 7]), Some(inode));
}

#[test]
fn of_several_networks_the_oldest_processs_counts() {
    if !may_make_networks() {
        return;
    }
    let mut node = Node::new();
    let (own, copy) = (node.network("10.1.0.7/24"), node.network("10.1.0.7/24"));
    let inode = node.networks[0].inode();
    node.process(80, POD, 900, &copy);
    node.process(70, POD, 500, &own);
    node.process(90, POD, 700, &copy);
    assert_eq!(find_in(&node, [10, 1, 0, 7]), Some(inode));
}

#[test]
fn a_cgroup_that_a_pod_calls_after_another_makes_it_no_process_of_that_one() {
    if !may_make_networks() {
        return;
    }
    let mut node = Node::new();
    let copy = node.network("10.1.0.7/24");
    let outer = "0::/kubepods/pod7f5d7a6e-0c62-4c1b-a9c0-5fd1f4f0a2b1/9d2a";
    node.process(70, &format!("{outer}/pod{UID}"), 500, &copy);
    assert_eq!(find_in(&node, [10, 1, 0, 7]), None);
    // It is the kubelet's word where the node itself is a container in that pod.
    fs::write(node.proc.path().join("1/cgroup"), outer).unwrap();
    assert_eq!(find_in(&node, [10, 1, 0, 7]), Some(node.networks[0].inode()));
}

#[test]
fn the_network_of_the_node_is_no_pods() {
    let node = Node::new();
    node.process(70, POD, 500, "/proc/self/ns/net");
    assert_eq!(find_in(&node, [127, 0, 0, 1]), None);
}

#[test]
fn processes_that_end_meanwhile_are_passed_over() {
    let node = Node::new();
    fs::create_dir(node.proc.path().join("71")).unwrap();
    fs::create_dir(node.proc.path().join("self")).unwrap();
    assert_eq!(find_in(&node, [10, 1, 0, 7]), None);
}

#[test]
fn a_place_without_processes_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = find(folder.path(), &BTreeMap::new()).unwrap_err();
    assert!(matches!(error, DiscoveryError::Node(_)), "{error}");
}
