//! Pods and other workloads.

use culvert_proto::istio::workload::{
    Locality, NetworkMode, PortList, TunnelProtocol, WorkloadStatus, WorkloadType,
    application_tunnel::Protocol, gateway_address::Destination,
};

use super::{Mesh, pod};

const AMBIENT: &str = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {istio.io/dataplane-mode: ambient}}\n";

fn ports(list: &PortList) -> Vec<(u32, u32)> {
    list.ports.iter().map(|port| (port.service_port, port.target_port)).collect()
}

#[test]
fn a_pod_is_told_with_all_that_a_node_needs() {
    let mesh = Mesh::of(&format!(
        "{AMBIENT}{}{}",
        pod(
            "web-5d-x",
            ", labels: {app: web, version: v2, pod-template-hash: 5d}, \
             ownerReferences: [{kind: ReplicaSet, name: web-5d, controller: true}]",
            "",
            ", podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}], conditions: [{type: Ready, status: 'True'}]",
        ),
        "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/region: r, \
         topology.kubernetes.io/zone: z, topology.istio.io/subzone: s}}\n",
    ));
    let found = mesh.pod("web-5d-x");
    assert_eq!(found.addresses.len(), 2);
    assert_eq!(found.addresses[0], [10, 0, 0, 1]);
    assert_eq!(found.tunnel_protocol(), TunnelProtocol::Hbone);
    assert_eq!((found.service_account.as_str(), found.node.as_str()), ("web", "n1"));
    assert_eq!(found.workload_name, "web");
    assert_eq!(found.workload_type(), WorkloadType::Deployment);
    assert_eq!((found.canonical_name.as_str(), found.canonical_revision.as_str()), ("web", "v2"));
    assert_eq!(found.status(), WorkloadStatus::Healthy);
    assert_eq!(found.trust_domain, "", "the default is not written");
    assert_eq!(found.cluster_id, "Kubernetes");
    let [region, zone, subzone] = ["r", "z", "s"].map(str::to_owned);
    assert_eq!(found.locality, Some(Locality { region, zone, subzone }));
    assert!(mesh.faults().is_empty());
}

#[test]
fn who_is_in_the_mesh_is_said_by_labels_and_by_what_became_of_them() {
    let label = |mode: &str| format!(", labels: {{istio.io/dataplane-mode: {mode}}}");
    let said = |what: &str| format!(", annotations: {{ambient.istio.io/redirection: {what}}}");
    let sidecar = ", annotations: {sidecar.istio.io/status: '{}'}";
    for (space, metadata, spec, want) in [
        ("", "", "", TunnelProtocol::None),
        (AMBIENT, "", "", TunnelProtocol::Hbone),
        ("", label("ambient").as_str(), "", TunnelProtocol::Hbone),
        (AMBIENT, label("none").as_str(), "", TunnelProtocol::None),
        (AMBIENT, "", ", hostNetwork: true", TunnelProtocol::None),
        (AMBIENT, sidecar, "", TunnelProtocol::None),
        ("", said("enabled").as_str(), "", TunnelProtocol::Hbone),
        (AMBIENT, said("pending").as_str(), "", TunnelProtocol::None),
        ("", ", labels: {networking.istio.io/tunnel: http}", "", TunnelProtocol::Hbone),
    ] {
        let mesh = Mesh::of(&format!("{space}{}", pod("web", metadata, spec, "")));
        assert_eq!(mesh.pod("web").tunnel_protocol(), want, "{space}{metadata}{spec}");
    }
    let native = Mesh::of(&pod("web", ", labels: {networking.istio.io/tunnel: http}", "", ""));
    assert!(native.pod("web").native_tunnel);
}

#[test]
fn an_owner_names_its_pods() {
    let owned = |kind: &str, name: &str| {
        let owner = format!("ownerReferences: [{{kind: {kind}, name: {name}, controller: true}}]");
        let found = Mesh::of(&pod("p", &format!(", {owner}"), "", "")).pod("p");
        (found.workload_name.clone(), found.workload_type())
    };
    assert_eq!(owned("StatefulSet", "db"), ("db".to_owned(), WorkloadType::Pod));
    assert_eq!(owned("Job", "load"), ("load".to_owned(), WorkloadType::Job));
    assert_eq!(owned("Job", "nightly-28512345"), ("nightly".to_owned(), WorkloadType::Cronjob));
    assert_eq!(owned("ReplicaSet", "bare-set"), ("bare-set".to_owned(), WorkloadType::Pod));
    let alone = Mesh::of(&pod("p", "", "", "")).pod("p");
    assert_eq!((alone.workload_name.as_str(), alone.workload_type()), ("p", WorkloadType::Pod));
    assert_eq!((alone.canonical_name.as_str(), alone.canonical_revision.as_str()), ("p", "latest"));
}

#[test]
fn a_pod_that_is_over_or_has_no_address_is_no_workload() {
    for status in
        ["phase: Succeeded, podIP: 10.0.0.1", "phase: Failed, podIP: 10.0.0.1", "phase: Pending"]
    {
        let yaml = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p, namespace: shop}}\nspec: {{}}\nstatus: {{{status}}}\n"
        );
        assert!(Mesh::of(&yaml).resources.is_empty(), "{status}");
    }
    let pending = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: shop}\nstatus: {phase: Pending, podIP: 10.0.0.1}\n";
    assert_eq!(Mesh::of(pending).pod("p").status(), WorkloadStatus::Unhealthy);
}

#[test]
fn a_pod_that_shares_its_nodes_address_says_so() {
    let found = Mesh::of(&pod("p", "", ", hostNetwork: true", "")).pod("p");
    assert_eq!(found.network_mode(), NetworkMode::HostNetwork);
}

#[test]
fn a_pod_has_the_ports_of_the_services_that_select_it() {
    let service = |name: &str, selector: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{selector: {selector}, ports: [{{port: 80, targetPort: http}}, {{port: 81, targetPort: 8081}}, \
             {{port: 82}}, {{port: 53, protocol: UDP}}, {{port: 83, targetPort: nowhere}}]}}\n"
        )
    };
    let mesh = Mesh::of(&format!(
        "{}{}{}{}",
        pod(
            "web",
            ", labels: {app: web, tier: front}",
            ", containers: [{ports: [{name: http, containerPort: 8080}]}]",
            ""
        ),
        service("web", "{app: web}"),
        service("other", "{app: web, tier: back}"),
        service("all", "{}"),
    ));
    let found = mesh.pod("web").services;
    assert_eq!(found.len(), 1, "a service without a selector selects nothing: {found:?}");
    assert_eq!(
        ports(&found["shop/web.shop.svc.cluster.local"]),
        [(80, 8080), (81, 8081), (82, 82)]
    );
}

#[test]
fn slices_name_the_endpoints_of_services_without_a_selector() {
    let mesh = Mesh::of(&format!(
        "{}---\napiVersion: v1\nkind: Service\nmetadata: {{name: db, namespace: shop}}\nspec: {{ports: [{{name: sql, port: 5432}}]}}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: db-1, namespace: shop, labels: {{kubernetes.io/service-name: db}}}}\naddressType: IPv4\n\
         ports: [{{name: sql, port: 6432}}]\nendpoints:\n- addresses: [192.0.2.7]\n  conditions: {{ready: false}}\n\
         - addresses: [10.0.0.1]\n  targetRef: {{kind: Pod, name: web, namespace: shop}}\n",
        pod("web", "", "", ""),
    ));
    let key = "shop/db.shop.svc.cluster.local";
    assert_eq!(ports(&mesh.pod("web").services[key]), [(5432, 5432)]);
    let uid = "Kubernetes/discovery.k8s.io/EndpointSlice/shop/db.shop.svc.cluster.local/192.0.2.7";
    let outside = mesh.workload(uid);
    assert_eq!(ports(&outside.services[key]), [(5432, 6432)]);
    assert_eq!(outside.status(), WorkloadStatus::Unhealthy);
    assert_eq!(outside.tunnel_protocol(), TunnelProtocol::None);
}

#[test]
fn entries_are_workloads_of_the_services_that_select_them() {
    let mesh = Mesh::of(
        "apiVersion: networking.istio.io/v1\nkind: WorkloadEntry\nmetadata: {name: vm, namespace: shop, labels: {app: legacy}}\n\
         spec: {address: 192.0.2.1, ports: {http: 9080}, labels: {app: ignored}, locality: r/z, weight: 3, serviceAccount: vm}\n\
         ---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: legacy, namespace: shop}\n\
         spec: {hosts: [legacy.example.com], addresses: [240.0.0.1, 240.1.0.0/16], resolution: STATIC, \
         ports: [{number: 80, name: http}, {number: 443, name: tls, targetPort: 8443}], workloadSelector: {labels: {app: legacy}}}\n",
    );
    let found = mesh.workload("Kubernetes/networking.istio.io/WorkloadEntry/shop/vm");
    assert_eq!(ports(&found.services["shop/legacy.example.com"]), [(80, 9080), (443, 8443)]);
    assert_eq!((found.capacity, found.service_account.as_str()), (Some(3), "vm"));
    let addresses = mesh.service("shop/legacy.example.com").addresses;
    let lengths: Vec<_> = addresses.iter().map(|address| address.length).collect();
    assert_eq!(lengths, [None, Some(16)]);
}

#[test]
fn a_host_that_dns_resolves_is_its_own_endpoint() {
    let mesh = Mesh::of(
        "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: web, namespace: shop}\n\
         spec: {hosts: [a.example.com, b.example.com], resolution: DNS, ports: [{number: 443, name: tls}]}\n",
    );
    let found = mesh.workload("Kubernetes/networking.istio.io/ServiceEntry/shop/web/a.example.com");
    assert_eq!((found.hostname.as_str(), found.addresses.len()), ("a.example.com", 0));
    assert_eq!(found.services.keys().collect::<Vec<_>>(), ["shop/a.example.com"]);
}

#[test]
fn workloads_and_services_are_reached_through_their_waypoint() {
    let gateway = |name: &str, labels: &str, status: &str| {
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\n\
             metadata: {{name: {name}, namespace: shop, labels: {{{labels}}}, annotations: {{ambient.istio.io/waypoint-inbound-binding: PROXY/15088}}}}\n\
             spec: {{gatewayClassName: istio-waypoint}}\nstatus: {{addresses: [{status}]}}\n"
        )
    };
    let service = "---\napiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.0.1}\n";
    let uses = |name: &str| {
        format!(
            "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: shop, labels: {{istio.io/use-waypoint: {name}}}}}\n"
        )
    };
    let address = "{type: IPAddress, value: 10.96.0.9}";
    let of = |labels: &str, metadata: &str| {
        Mesh::of(&format!(
            "{}{service}{}{}",
            uses("wp"),
            gateway("wp", labels, address),
            pod("web", metadata, "", "")
        ))
    };
    let host = "shop/web.shop.svc.cluster.local";
    let by_default = of("", "");
    let found = by_default.service(host).waypoint.unwrap();
    assert_eq!(found.hbone_mtls_port, 15008);
    assert!(
        matches!(found.destination, Some(Destination::Address(a)) if a.address == [10, 96, 0, 9])
    );
    assert!(by_default.pod("web").waypoint.is_none(), "a waypoint is for services by default");
    assert!(by_default.faults().is_empty());

    let all = of("istio.io/waypoint-for: all", "");
    assert!(all.service(host).waypoint.is_some() && all.pod("web").waypoint.is_some());
    let none = of("istio.io/waypoint-for: all", ", labels: {istio.io/use-waypoint: none}");
    assert!(none.pod("web").waypoint.is_none());
    let own =
        of("istio.io/waypoint-for: all", ", labels: {gateway.networking.k8s.io/gateway-name: wp}");
    let instance = own.pod("web");
    assert!(instance.waypoint.is_none(), "it does not go through itself");
    let tunnel = instance.application_tunnel.unwrap();
    assert_eq!((tunnel.protocol(), tunnel.port), (Protocol::Proxy, 15088));

    let absent = Mesh::of(&format!("{}{service}", uses("nowhere")));
    assert!(absent.service(host).waypoint.is_none());
    assert!(absent.faults()[0].contains("shop/nowhere is not there"), "{:?}", absent.faults());

    let named = Mesh::of(&format!(
        "{}{service}{}",
        uses("wp"),
        gateway("wp", "", "{type: Hostname, value: wp.example.com}, {value: 10.96.0.9}")
    ));
    let found = named.service(host).waypoint.unwrap().destination;
    assert!(matches!(found, Some(Destination::Hostname(h)) if h.hostname == "wp.example.com"));
}

#[test]
fn a_waypoint_admits_namespaces() {
    for (from, admitted) in [
        ("All", true),
        ("Same", false),
        ("Selector, selector: {matchLabels: {team: a}}", true),
        ("Selector, selector: {matchLabels: {team: b}}", false),
        (
            "Selector, selector: {matchExpressions: [{key: team, operator: In, values: [a, b]}]}",
            true,
        ),
        ("Selector, selector: {matchExpressions: [{key: team, operator: DoesNotExist}]}", false),
    ] {
        let mesh = Mesh::of(&format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: wp, namespace: infra}}\n\
             spec: {{gatewayClassName: istio-waypoint, listeners: [{{port: 15008, protocol: HBONE, allowedRoutes: {{namespaces: {{from: {from}}}}}}}]}}\n\
             status: {{addresses: [{{value: 10.96.0.9}}]}}\n\
             ---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: shop, labels: {{team: a, istio.io/use-waypoint: wp, istio.io/use-waypoint-namespace: infra}}}}\n\
             ---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\nspec: {{clusterIP: 10.96.0.1}}\n"
        ));
        let found = mesh.service("shop/web.shop.svc.cluster.local").waypoint.is_some();
        assert_eq!(found, admitted, "{from}");
        assert_eq!(mesh.faults().is_empty(), admitted, "{from}: {:?}", mesh.faults());
    }
}
