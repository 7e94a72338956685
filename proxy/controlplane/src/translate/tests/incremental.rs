//! A change tells what it changes, and no more; and what comes of changes is what would come of the objects at once.

use super::{Mesh, pod};
use crate::objects::Kind;

fn labelled(namespace: &str, name: &str, ip: &str, labels: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}\n\
         spec: {{nodeName: n1}}\nstatus: {{podIP: {ip}}}\n"
    )
}

const SERVICE: &str = "---\napiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {selector: {app: web}, ports: [{port: 80}]}\n";

#[test]
fn one_pod_is_one_change() {
    let mut mesh = Mesh::of(&format!("{SERVICE}{}", labelled("shop", "a", "10.0.0.1", "app: web")));
    let (changed, gone) = mesh.set(&labelled("shop", "b", "10.0.0.2", "app: web"));
    assert_eq!((changed, gone), (vec!["Kubernetes//Pod/shop/b".to_owned()], vec![]));
    let (changed, gone) = mesh.remove(Kind::Pod, "shop", "a");
    assert_eq!((changed, gone), (vec![], vec!["Kubernetes//Pod/shop/a".to_owned()]));
}

#[test]
fn what_does_not_matter_changes_nothing() {
    let node = |beat: &str| {
        format!(
            "---\napiVersion: v1\nkind: Node\nmetadata: {{name: n1, labels: {{topology.kubernetes.io/zone: z, other: '{beat}'}}, \
             annotations: {{beat: '{beat}'}}}}\nstatus: {{beat: '{beat}'}}\n"
        )
    };
    let mut mesh =
        Mesh::of(&format!("{}{}", node("1"), pod("web", ", annotations: {a: '1'}", "", "")));
    assert_eq!(mesh.set(&node("2")), (vec![], vec![]));
    assert_eq!(
        mesh.set(&pod("web", ", annotations: {a: '2'}", "", ", hostIP: 1.1.1.1")),
        (vec![], vec![])
    );
}

#[test]
fn a_namespaces_label_reaches_its_pods_alone() {
    let mut mesh = Mesh::of(&format!(
        "{}{}",
        labelled("shop", "a", "10.0.0.1", ""),
        labelled("bank", "b", "10.0.0.2", ""),
    ));
    let (changed, _) = mesh.set("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n");
    assert_eq!(changed, ["Kubernetes//Pod/shop/a"]);
}

#[test]
fn a_service_changes_the_pods_that_it_selects() {
    let mut mesh = Mesh::of(&format!(
        "{}{}",
        labelled("shop", "a", "10.0.0.1", "app: web"),
        labelled("shop", "b", "10.0.0.2", "app: cart"),
    ));
    let (changed, _) = mesh.set(SERVICE);
    assert_eq!(changed, ["Kubernetes//Pod/shop/a", "shop/web.shop.svc.cluster.local"]);
    let (changed, gone) = mesh.remove(Kind::Service, "shop", "web");
    assert_eq!(changed, ["Kubernetes//Pod/shop/a"]);
    assert_eq!(gone, ["shop/web.shop.svc.cluster.local"]);
}

#[test]
fn the_roots_policies_reach_every_namespace() {
    let mut mesh = Mesh::of(&format!(
        "{}{}",
        labelled("shop", "a", "10.0.0.1", ""),
        labelled("bank", "b", "10.0.0.2", ""),
    ));
    let strict = "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: m, namespace: istio-system}\nspec: {mtls: {mode: STRICT}}\n";
    let (changed, _) = mesh.set(strict);
    assert_eq!(changed.len(), 3, "{changed:?}");
    let (changed, gone) = mesh.remove(Kind::PeerAuthentication, "istio-system", "m");
    assert_eq!((changed.len(), gone.len()), (2, 1));
}

#[test]
fn the_order_of_changes_does_not_matter() {
    let parts = [
        SERVICE.to_owned(),
        labelled("shop", "a", "10.0.0.1", "app: web"),
        labelled("shop", "w", "10.0.0.3", "gateway.networking.k8s.io/gateway-name: wp"),
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient, istio.io/use-waypoint: wp}}\n".to_owned(),
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: wp, namespace: shop}\n\
         spec: {gatewayClassName: istio-waypoint}\nstatus: {addresses: [{value: 10.96.0.9}]}\n".to_owned(),
        "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z}}\n".to_owned(),
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: p, namespace: istio-system}\nspec: {selector: {matchLabels: {app: web}}}\n".to_owned(),
        "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: m, namespace: istio-system}\nspec: {mtls: {mode: STRICT}}\n".to_owned(),
    ];
    let versions = |mesh: &Mesh| {
        mesh.resources
            .iter()
            .map(|(key, r)| (key.clone(), r.version.to_string()))
            .collect::<Vec<_>>()
    };
    let at_once = versions(&Mesh::of(&parts.concat()));
    assert_eq!(at_once.len(), 5);
    for turn in 0..parts.len() {
        let mut mesh = Mesh::default();
        for part in parts.iter().cycle().skip(turn).take(parts.len()) {
            mesh.set(part);
        }
        assert_eq!(versions(&mesh), at_once, "turned by {turn}");
        for part in parts.iter().rev().cycle().skip(turn).take(parts.len()) {
            mesh.set(part);
        }
        assert_eq!(versions(&mesh), at_once, "said again");
    }
}
