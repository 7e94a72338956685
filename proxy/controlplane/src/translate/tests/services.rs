//! Services, and records of mesh documents.

use culvert_proto::istio::workload::{
    IpFamilies,
    load_balancing::{HealthPolicy, Mode, Scope},
};

use super::Mesh;

const HOST: &str = "shop/web.shop.svc.cluster.local";

fn service(metadata: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop{metadata}}}\nspec: {{{spec}}}\n"
    )
}

#[test]
fn a_service_has_its_addresses_and_tcp_ports() {
    let mesh = Mesh::of(&service(
        "",
        "clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1, 'fd00::1'], ipFamilies: [IPv4, IPv6], \
         ports: [{port: 80, targetPort: http}, {port: 81, targetPort: 8081}, {port: 82}, {port: 53, protocol: UDP}]",
    ));
    let found = mesh.service(HOST);
    assert_eq!(found.addresses.len(), 2);
    let ports: Vec<_> =
        found.ports.iter().map(|port| (port.service_port, port.target_port)).collect();
    assert_eq!(ports, [(80, 0), (81, 8081), (82, 82)], "0: the endpoint knows");
    assert_eq!(found.ip_families(), IpFamilies::Dual);
    assert!(found.canonical && found.load_balancing.is_none());
    let aliases = &mesh.resources.values().next().unwrap().aliases;
    assert_eq!(aliases[..], ["/10.96.0.1".into(), "/fd00::1".into()]);
}

#[test]
fn a_headless_service_has_no_address_and_an_external_name_is_none() {
    assert!(Mesh::of(&service("", "clusterIP: None")).service(HOST).addresses.is_empty());
    assert!(Mesh::of(&service("", "type: ExternalName")).resources.is_empty());
}

#[test]
fn traffic_is_kept_near_as_the_service_says() {
    let near = [Scope::Network, Scope::Region, Scope::Zone];
    let nearest = [Scope::Network, Scope::Region, Scope::Zone, Scope::Subzone, Scope::Node];
    let annotated = ", annotations: {networking.istio.io/traffic-distribution: PreferClose}";
    for (metadata, spec, mode, scopes) in [
        ("", "trafficDistribution: PreferClose", Mode::Failover, &near[..]),
        ("", "trafficDistribution: PreferSameZone", Mode::Failover, &near),
        ("", "trafficDistribution: PreferSameNode", Mode::Failover, &nearest),
        (annotated, "", Mode::Failover, &near),
        (
            "",
            "trafficDistribution: PreferClose, internalTrafficPolicy: Local",
            Mode::Strict,
            &[Scope::Node],
        ),
    ] {
        let found = Mesh::of(&service(metadata, spec)).service(HOST).load_balancing.unwrap();
        assert_eq!(found.mode(), mode, "{spec}");
        assert_eq!(found.routing_preference().collect::<Vec<_>>(), scopes, "{spec}");
        assert_eq!(found.health_policy(), HealthPolicy::OnlyHealthy);
    }
    let all = Mesh::of(&service("", "publishNotReadyAddresses: true")).service(HOST);
    let found = all.load_balancing.unwrap();
    assert_eq!(
        (found.health_policy(), found.mode()),
        (HealthPolicy::AllowAll, Mode::UnspecifiedMode)
    );
}

#[test]
fn a_host_that_two_entries_claim_is_the_older_ones() {
    let entry = |name: &str, time: &str, address: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\n\
             metadata: {{name: {name}, namespace: shop, creationTimestamp: '{time}'}}\n\
             spec: {{hosts: [x.example.com], addresses: [{address}]}}\n"
        )
    };
    let mesh = Mesh::of(&format!(
        "{}{}",
        entry("a", "2026-02-01T00:00:00Z", "240.0.0.1"),
        entry("b", "2026-01-01T00:00:00Z", "240.0.0.2"),
    ));
    assert_eq!(mesh.service("shop/x.example.com").name, "b");
    assert_eq!(mesh.faults().len(), 1);
    assert!(mesh.faults()[0].starts_with("ServiceEntry shop/a: spec.hosts"), "{:?}", mesh.faults());
}

#[test]
fn mesh_documents_are_told_as_they_are_written() {
    let mesh = Mesh::of(
        "workloads:\n- {uid: Kubernetes//Pod/shop/w, name: w, namespace: shop, serviceAccount: web, workloadIps: [10.0.0.1], protocol: HBONE,\n\
         \x20  node: n1, services: {shop/web.shop.svc.cluster.local: {80: 8080}}}\n\
         services:\n- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.96.0.1], ports: {80: 8080}}\n\
         policies:\n- {name: p, namespace: shop, scope: Namespace, action: Deny, rules: [[[{principals: [{Presence: []}]}]]]}\n",
    );
    let ports = &mesh.pod("w").services[HOST].ports[0];
    assert_eq!((ports.service_port, ports.target_port), (80, 8080));
    assert_eq!(mesh.service(HOST).addresses.len(), 1);
    assert_eq!(mesh.policy("shop/p").unwrap().groups.len(), 1);
}

#[test]
fn an_objects_record_goes_before_a_mesh_documents() {
    let document = "---\nservices:\n- {name: web, namespace: shop, hostname: web.shop.svc.cluster.local, vips: [/10.96.0.7]}\n";
    let mut mesh = Mesh::of(document);
    assert_eq!(mesh.service(HOST).addresses[0].address, [10, 96, 0, 7]);
    mesh.set(&service("", "clusterIP: 10.96.0.1"));
    assert_eq!(mesh.service(HOST).addresses[0].address, [10, 96, 0, 1]);
    assert!(mesh.faults()[0].contains("defined twice"), "{:?}", mesh.faults());
    mesh.remove(crate::objects::Kind::Service, "shop", "web");
    assert_eq!(mesh.service(HOST).addresses[0].address, [10, 96, 0, 7]);
    assert!(mesh.faults().is_empty());
}
