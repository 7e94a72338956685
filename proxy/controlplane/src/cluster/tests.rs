//! Against a server that speaks the API over real connections.

use std::time::Duration;

use culvert_test_cluster::ApiServer;
use futures::StreamExt as _;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    watches::{Watches, all},
    *,
};
use crate::objects::Mode;

/// Longer than a watch waits before it is tried again, several times over.
const PATIENCE: Duration = Duration::from_mins(1);
const ABSENT: Duration = Duration::from_millis(200);

fn client(api: &ApiServer) -> Client {
    let url = format!("http://{}", api.address).parse().unwrap();
    Client::try_from(Config::new(url)).unwrap()
}

/// What a control plane knows of the API's objects.
struct View {
    api: ApiServer,
    watches: Watches,
    cluster: Cluster,
    /// Every object, as the world would have it.
    world: BTreeMap<Key, Object>,
    /// How often something was set or removed.
    changes: usize,
}

impl View {
    fn new(api: ApiServer) -> Self {
        let watches = all(&client(&api), ABSENT);
        Self { api, watches, cluster: Cluster::new(), world: BTreeMap::new(), changes: 0 }
    }

    async fn of(api: ApiServer) -> Self {
        let mut view = Self::new(api);
        view.until(|view| view.cluster.is_complete()).await;
        view
    }

    async fn until(&mut self, done: impl Fn(&Self) -> bool) {
        while !done(self) {
            let told = timeout(PATIENCE, self.watches.next()).await;
            let told = told.unwrap_or_else(|_| panic!("never: {:?}", self.world)).unwrap();
            let mut changes = Vec::new();
            for (kind, told) in told {
                self.cluster.apply(kind, told, &mut changes);
            }
            self.changes += changes.len();
            for change in changes {
                match change {
                    Change::Set(key, object) => drop(self.world.insert(key, object)),
                    Change::Remove(key) => drop(self.world.remove(&key)),
                    Change::Mesh(..) => unreachable!("a cluster has no mesh documents"),
                }
            }
        }
    }

    async fn until_known(&mut self, want: &[&str]) {
        self.until(|view| view.names() == want).await;
    }

    fn names(&self) -> Vec<String> {
        self.world.keys().map(ToString::to_string).collect()
    }

    fn problems(&self) -> Vec<String> {
        self.cluster.problems().iter().map(ToString::to_string).collect()
    }

    /// Whether the watch of every kind is open, so that what is done now is seen as an event.
    fn is_watching(&self) -> bool {
        Kind::ALL.into_iter().all(|kind| self.api.watches(kind.plural()) == 1)
    }

    fn lists(&self, kind: Kind) -> usize {
        let path = format!("/{}?", kind.plural());
        let requests = self.api.requests();
        requests.iter().filter(|r| r.contains(&path) && !r.contains("watch=true")).count()
    }

    /// Lets the watches run until each is open.
    async fn settle(&mut self) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !self.is_watching() {
            assert!(tokio::time::Instant::now() < deadline, "{:?}", self.api.requests());
            if let Ok(told) = timeout(Duration::from_millis(20), self.watches.next()).await {
                let mut changes = Vec::new();
                for (kind, told) in told.unwrap() {
                    self.cluster.apply(kind, told, &mut changes);
                }
                assert!(changes.is_empty(), "{changes:?}");
            }
        }
    }
}

fn pod(name: &str, ip: &str) -> Value {
    json!({"metadata": {"uid": format!("uid-{name}"), "name": name, "namespace": "shop",
            "managedFields": [{"manager": "kubelet", "operation": "Update"}]},
        "spec": {"nodeName": "n1", "serviceAccountName": "web", "containers": []},
        "status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}})
}

fn object(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

fn addresses(view: &View, name: &str) -> Vec<String> {
    let key = Key { kind: Kind::Pod, namespace: "shop".to_owned(), name: name.to_owned() };
    match view.world.get(&key) {
        Some(Object::Pod(pod)) => pod.addresses().iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn every_kind_is_listed_once_and_then_watched() {
    let api = ApiServer::start().await;
    api.put("namespaces", json!({"metadata": {"name": "shop"}}));
    api.put(
        "nodes",
        json!({"metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z"}}}),
    );
    api.put("pods", pod("web", "10.0.0.1"));
    api.put("services", object("web", json!({"clusterIP": "10.1.0.1", "ports": [{"port": 80}]})));
    let mut slice = object("web-x", Value::Null);
    slice["addressType"] = json!("IPv4");
    slice["endpoints"] = json!([]);
    api.put("endpointslices", slice);
    let entry =
        json!({"hosts": ["a.example"], "resolution": "STATIC", "ports": [], "endpoints": []});
    api.put("serviceentries", object("a", entry));
    api.put("workloadentries", object("vm", json!({"address": "10.0.0.9"})));
    api.put(
        "gateways",
        object("waypoint", json!({"gatewayClassName": "istio-waypoint", "listeners": []})),
    );
    api.put("authorizationpolicies", object("deny", json!({"action": "DENY", "rules": []})));
    api.put("peerauthentications", object("default", json!({"mtls": {"mode": "STRICT"}})));
    let mut view = View::of(api).await;
    let want = [
        "Namespace shop",
        "Node n1",
        "Pod shop/web",
        "Service shop/web",
        "EndpointSlice shop/web-x",
        "ServiceEntry shop/a",
        "WorkloadEntry shop/vm",
        "Gateway shop/waypoint",
        "AuthorizationPolicy shop/deny",
        "PeerAuthentication shop/default",
    ];
    assert_eq!(view.names(), want);
    assert_eq!(view.problems(), [""; 0]);
    view.settle().await;
    view.api.delete("authorizationpolicies", "shop/deny");
    view.api.put("pods", pod("web", "10.0.0.2"));
    view.until(|view| view.world.len() == 9 && addresses(view, "web") == ["10.0.0.2"]).await;
    assert!(Kind::ALL.into_iter().all(|kind| view.lists(kind) == 1), "{:?}", view.api.requests());
}

#[tokio::test]
async fn a_list_of_several_pages_is_one_list() {
    let api = ApiServer::start().await;
    let mut names: Vec<_> = (0..1100).map(|n| format!("p{n}")).collect();
    for name in &names {
        api.put("pods", pod(name, "10.0.0.1"));
    }
    let view = View::of(api).await;
    names.sort_unstable();
    assert_eq!(view.names(), names.iter().map(|n| format!("Pod shop/{n}")).collect::<Vec<_>>());
    assert_eq!(view.lists(Kind::Pod), 3);
}

#[tokio::test]
async fn watches_that_break_go_on_where_they_were() {
    let api = ApiServer::start().await;
    api.put("pods", pod("web", "10.0.0.1"));
    let mut view = View::of(api).await;
    view.settle().await;
    view.api.cut();
    view.api.put("pods", pod("db", "10.0.0.2"));
    view.until_known(&["Pod shop/db", "Pod shop/web"]).await;
    view.settle().await;
    assert_eq!(view.lists(Kind::Pod), 1);
}

#[tokio::test]
async fn a_bookmark_spares_a_list_after_changes_are_forgotten() {
    let api = ApiServer::start().await;
    api.put("pods", pod("web", "10.0.0.1"));
    let mut view = View::of(api).await;
    view.settle().await;
    for kind in Kind::ALL {
        view.api.bookmark(kind.plural());
    }
    // The bookmark has been read once what comes after it has.
    view.api.put("pods", pod("db", "10.0.0.2"));
    view.until_known(&["Pod shop/db", "Pod shop/web"]).await;
    view.api.forget();
    view.api.cut();
    view.api.delete("pods", "shop/db");
    view.until_known(&["Pod shop/web"]).await;
    view.settle().await;
    assert_eq!(view.lists(Kind::Pod), 1);
}

#[tokio::test]
async fn what_went_while_nobody_was_told_goes_with_the_next_list() {
    let api = ApiServer::start().await;
    api.put("pods", pod("web", "10.0.0.1"));
    api.put("pods", pod("db", "10.0.0.2"));
    let mut view = View::of(api).await;
    view.settle().await;
    view.api.delete_and_forget("pods", "shop/db");
    view.until_known(&["Pod shop/web"]).await;
    assert_eq!(view.lists(Kind::Pod), 2);
}

#[tokio::test]
async fn nothing_is_complete_while_one_kind_may_not_be_listed() {
    let api = ApiServer::start().await;
    api.put("authorizationpolicies", object("deny", json!({"action": "DENY"})));
    api.forbid_kind("authorizationpolicies", true);
    let mut view = View::new(api);
    view.until(|view| view.cluster.missing().eq([Kind::AuthorizationPolicy])).await;
    view.api.forbid_kind("authorizationpolicies", false);
    view.until(|view| view.cluster.is_complete()).await;
    assert_eq!(view.names(), ["AuthorizationPolicy shop/deny"]);
}

#[tokio::test]
async fn an_api_that_refuses_for_a_while_takes_nothing_away() {
    let api = ApiServer::start().await;
    api.put("pods", pod("web", "10.0.0.1"));
    api.put("pods", pod("db", "10.0.0.2"));
    let mut view = View::of(api).await;
    view.settle().await;
    let before = view.changes;
    view.api.forbid(true);
    view.api.forget();
    view.api.cut();
    let asked = view.api.requests().len();
    // Until each has asked in vain.
    let refused = async { view.until(|view| view.api.requests().len() >= asked + 10).await };
    drop(timeout(Duration::from_secs(3), refused).await);
    assert_eq!((view.changes, view.world.len()), (before, 2));
    view.api.forbid(false);
    view.api.delete("pods", "shop/db");
    view.until_known(&["Pod shop/web"]).await;
}

#[tokio::test]
async fn a_kind_that_the_cluster_does_not_know_is_empty_until_it_does() {
    let api = ApiServer::start().await;
    let custom = Kind::ALL.into_iter().filter(|kind| kind.is_custom());
    custom.for_each(|kind| api.serve_only(kind.plural(), ""));
    let mut view = View::of(api).await;
    assert_eq!(view.names(), [""; 0]);
    view.api.put("authorizationpolicies", object("deny", json!({"action": "DENY"})));
    view.api.serve_only("authorizationpolicies", "v1");
    view.until_known(&["AuthorizationPolicy shop/deny"]).await;
}

#[tokio::test]
async fn a_kind_of_an_older_version_is_found() {
    let api = ApiServer::start().await;
    api.put("authorizationpolicies", object("deny", json!({"action": "DENY"})));
    api.serve_only("authorizationpolicies", "v1beta1");
    let view = View::of(api).await;
    assert_eq!(view.names(), ["AuthorizationPolicy shop/deny"]);
}

#[tokio::test]
async fn objects_of_a_kind_that_is_not_known_any_more_stay() {
    let api = ApiServer::start().await;
    api.put("authorizationpolicies", object("deny", json!({"action": "DENY"})));
    let mut view = View::of(api).await;
    view.settle().await;
    view.api.serve_only("authorizationpolicies", "");
    view.api.cut();
    let absent = |view: &View| {
        let beta = "/apis/security.istio.io/v1beta1/authorizationpolicies?";
        view.api.requests().iter().filter(|request| request.starts_with(beta)).count() > 1
    };
    // Pods change meanwhile, so that there is something to wait for.
    let mut changes = 0_u32;
    while !absent(&view) {
        changes += 1;
        view.api.put("pods", pod("web", &format!("10.0.{}.1", changes % 256)));
        let want = format!("10.0.{}.1", changes % 256);
        view.until(|view| addresses(view, "web") == [want.as_str()]).await;
    }
    assert!(view.names().contains(&"AuthorizationPolicy shop/deny".to_owned()));
}

#[tokio::test]
async fn a_core_kind_that_is_not_known_is_an_error() {
    let api = ApiServer::start().await;
    api.serve_only("pods", "");
    let mut view = View::new(api);
    view.until(|view| view.cluster.missing().eq([Kind::Pod])).await;
    view.api.serve_only("pods", "v1");
    view.until(|view| view.cluster.is_complete()).await;
}

#[tokio::test]
async fn a_policy_that_cannot_be_read_closes_its_namespace_at_first_and_keeps_its_last_version_later()
 {
    let api = ApiServer::start().await;
    api.put("authorizationpolicies", object("a", json!({"acton": "DENY"})));
    api.put("peerauthentications", object("b", json!({"mtls": {"mode": "STRICTLY"}})));
    let mut view = View::of(api).await;
    assert_eq!(view.names(), ["AuthorizationPolicy shop/a", "PeerAuthentication shop/b"]);
    let objects: Vec<_> = view.world.values().cloned().collect();
    let [Object::AuthorizationPolicy(policy), Object::PeerAuthentication(peer)] = &*objects else {
        panic!("{objects:?}")
    };
    assert_eq!((policy.spec.rules.len(), peer.mode()), (1, Mode::Strict));
    assert_eq!(view.problems().len(), 2);
    assert!(
        view.problems()[0].starts_with("AuthorizationPolicy shop/a: spec"),
        "{:?}",
        view.problems()
    );
    view.settle().await;

    let allow = object("a", json!({"action": "ALLOW", "rules": [{}, {}]}));
    view.api.put("authorizationpolicies", allow);
    let rules = |view: &View| match view.world.values().next() {
        Some(Object::AuthorizationPolicy(policy)) => policy.spec.rules.len(),
        _ => 0,
    };
    view.until(|view| rules(view) == 2).await;
    assert_eq!(view.problems().len(), 1);
    view.api.put("authorizationpolicies", object("a", json!({"acton": "DENY"})));
    view.api.put("authorizationpolicies", object("c", json!({"acton": "DENY"})));
    view.until(|view| view.problems().len() == 3).await;
    assert_eq!((rules(&view), view.world.len()), (2, 2));
}
