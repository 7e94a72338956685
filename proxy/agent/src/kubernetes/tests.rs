//! Against a server that speaks the API over real connections, and real networks beneath folders like those of `/proc`.

use culvert_mesh::PodRef;
use culvert_test_cluster::ApiServer;
use kube::Config;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::*;
use crate::discovery::testing::{Node, may_make_networks};

const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";
const OTHER: &str = "7f5d7a6e-0c62-4c1b-a9c0-5fd1f4f0a2b1";
/// Longer than a watch waits before it is tried again.
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough to see that nothing is told.
const QUIET: Duration = Duration::from_millis(1500);

fn source(api: &ApiServer, node: &Node) -> Kubernetes {
    let url = format!("http://{}", api.address).parse().unwrap();
    let client = Client::try_from(Config::new(url)).unwrap();
    let proc = node.proc.path().to_owned();
    Kubernetes::new(client, Options { node: "n1".into(), proc, enrolment: Enrolment::default() })
}

fn namespace(name: &str, mode: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": name, "labels": {"istio.io/dataplane-mode": mode}}})
}

fn pod(uid: &str, name: &str, ip: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"uid": uid, "name": name, "namespace": "shop", "annotations": {}},
        "spec": {"nodeName": "n1", "serviceAccountName": "web", "containers": []},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}})
}

async fn told(source: &mut Kubernetes) -> String {
    match timeout(PATIENCE, source.next()).await.unwrap() {
        PodEvent::Added(spec) => {
            let PodRef { name, namespace, service_account } = &spec.pod;
            format!("added {namespace}/{name} as {service_account}")
        }
        PodEvent::Removed(uid) => format!("removed {uid}"),
        PodEvent::Synced => "synced".to_owned(),
    }
}

async fn tells_nothing(source: &mut Kubernetes) {
    let told = timeout(QUIET, source.next()).await;
    assert!(told.is_err(), "{told:?}");
}

/// A node with one pod, in a namespace that is in the mesh.
async fn one_pod() -> (ApiServer, Node, Kubernetes) {
    let api = ApiServer::start().await;
    let mut node = Node::new();
    let network = node.network("10.1.0.7/24");
    node.process(70, &format!("0::/kubepods/pod{UID}/9d2a"), 500, &network);
    api.put("namespaces", namespace("shop", "ambient"));
    api.put("pods", pod(UID, "web-0", "10.1.0.7"));
    let source = source(&api, &node);
    (api, node, source)
}

#[tokio::test]
async fn the_pods_of_the_node_are_told_with_their_networks_and_then_that_these_are_all() {
    if !may_make_networks() {
        return;
    }
    let (api, node, mut source) = one_pod().await;
    let PodEvent::Added(spec) = timeout(PATIENCE, source.next()).await.unwrap() else {
        panic!("nothing was added")
    };
    assert_eq!((&*spec.uid, &*spec.pod.service_account), (UID, "web"));
    assert!(spec.netns.open().unwrap().is(&node.networks[0]));
    assert_eq!(told(&mut source).await, "synced");
    let of_node = |request: &String| {
        request.starts_with("/api/v1/pods?") && request.contains("spec.nodeName%3Dn1")
    };
    assert!(api.requests().iter().any(of_node), "{:?}", api.requests());
}

#[tokio::test]
async fn what_changes_the_decision_is_told() {
    if !may_make_networks() {
        return;
    }
    let (api, _node, mut source) = one_pod().await;
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    assert_eq!(told(&mut source).await, "synced");
    api.put("namespaces", namespace("shop", "none"));
    assert_eq!(told(&mut source).await, format!("removed {UID}"));
    api.put("namespaces", namespace("shop", "ambient"));
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    let mut out = pod(UID, "web-0", "10.1.0.7");
    out["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "none"});
    api.put("pods", out);
    assert_eq!(told(&mut source).await, format!("removed {UID}"));
    api.put("pods", pod(UID, "web-0", "10.1.0.7"));
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    api.delete("pods", "shop/web-0");
    assert_eq!(told(&mut source).await, format!("removed {UID}"));
}

#[tokio::test]
async fn other_annotations_are_told_and_our_own_are_not() {
    if !may_make_networks() {
        return;
    }
    let (api, _node, mut source) = one_pod().await;
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    assert_eq!(told(&mut source).await, "synced");
    let mut noted = pod(UID, "web-0", "10.1.0.7");
    noted["metadata"]["annotations"] = json!({REDIRECTION: "enabled"});
    api.put("pods", noted.clone());
    tells_nothing(&mut source).await;
    noted["metadata"]["annotations"]["ambient.istio.io/dns-capture"] = json!("false");
    api.put("pods", noted);
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
}

#[tokio::test]
async fn a_captured_pod_is_annotated_and_one_that_leaves_the_mesh_is_no_longer() {
    if !may_make_networks() {
        return;
    }
    let (api, _node, mut source) = one_pod().await;
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    source.settled(UID, Ok(()));
    assert_eq!(told(&mut source).await, "synced");
    tells_nothing(&mut source).await;
    api.put("namespaces", namespace("shop", "none"));
    assert_eq!(told(&mut source).await, format!("removed {UID}"));
    tells_nothing(&mut source).await;
    let path = "/api/v1/namespaces/shop/pods/web-0/status".to_owned();
    let patch = |note: Value| json!({"metadata": {"annotations": {REDIRECTION: note}}});
    let want = [(path.clone(), patch(json!("enabled"))), (path, patch(Value::Null))];
    assert_eq!(api.patches(), want);
}

#[tokio::test]
async fn a_pod_whose_network_is_not_there_yet_keeps_the_source_from_being_complete() {
    if !may_make_networks() {
        return;
    }
    let (api, mut node, _) = one_pod().await;
    api.put("pods", pod(OTHER, "db-0", "10.1.0.8"));
    let mut source = source(&api, &node);
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    tells_nothing(&mut source).await;
    let network = node.network("10.1.0.8/24");
    node.process(80, &format!("0::/kubepods/pod{OTHER}/1c3b"), 600, &network);
    assert_eq!(told(&mut source).await, "added shop/db-0 as web");
    assert_eq!(told(&mut source).await, "synced");
}

#[tokio::test]
async fn pods_without_an_address_and_pods_that_go_hold_nothing_up() {
    if !may_make_networks() {
        return;
    }
    let (api, node, _) = one_pod().await;
    let mut pending = pod(OTHER, "db-0", "");
    pending["status"] = json!({"phase": "Pending"});
    api.put("pods", pending);
    let mut going = pod("0fcb5e4b5b5d1b05b8fb9b4d7a1e9dbf", "old-0", "10.1.0.9");
    going["metadata"]["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
    api.put("pods", going);
    let mut source = source(&api, &node);
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    assert_eq!(told(&mut source).await, "synced");
}

#[tokio::test]
async fn watches_that_break_lose_nothing() {
    if !may_make_networks() {
        return;
    }
    let (api, mut node, mut source) = one_pod().await;
    let network = node.network("10.1.0.8/24");
    node.process(80, &format!("0::/kubepods/pod{OTHER}/1c3b"), 600, &network);
    assert_eq!(told(&mut source).await, "added shop/web-0 as web");
    assert_eq!(told(&mut source).await, "synced");
    api.bookmark("pods");
    // The rest of the file counts on both watches being there.
    tells_nothing(&mut source).await;

    api.cut();
    api.put("pods", pod(OTHER, "db-0", "10.1.0.8"));
    assert_eq!(told(&mut source).await, "added shop/db-0 as web");
    tells_nothing(&mut source).await;

    api.delete_and_forget("pods", "shop/db-0");
    assert_eq!(told(&mut source).await, format!("removed {OTHER}"));
    tells_nothing(&mut source).await;

    // A server that refuses for a while is not one that has no pods.
    api.forbid(true);
    api.cut();
    tells_nothing(&mut source).await;
    api.forbid(false);
    api.delete("pods", "shop/web-0");
    assert_eq!(told(&mut source).await, format!("removed {UID}"));
}
