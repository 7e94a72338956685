//! Meshes of any size, as control planes describe them.

use std::{net::IpAddr, path::Path, sync::Arc};

use culvert_mesh::{
    Identity, Origin, Pool, Ports, Service, Snapshot, Update, Workload, file,
    policy::{Action, Clause, Condition, Enforcement, Match, Policy, Rule, Scope, TextMatch},
    workload::{Locality, Membership, NetworkAddress, ServiceName},
};

pub(crate) fn one() -> (Workload, Service) {
    let text = "
workloads: [{uid: w, name: w, namespace: n, protocol: HBONE, node: node, services: {n/s: {}}}]
services: [{name: s, namespace: n, hostname: s, ports: {80: 8080}}]
";
    let mesh = file::parse(Path::new("mesh.yaml"), text).unwrap();
    let workload = Workload::clone(mesh.workloads().next().unwrap());
    (workload, Service::clone(mesh.services().next().unwrap()))
}

fn service_name(index: usize) -> ServiceName {
    ServiceName { namespace: "n".into(), hostname: format!("s-{index}").into() }
}

pub(crate) fn workload(like: &Workload, index: usize, services: usize) -> Workload {
    // Addresses come in no order, as a cluster gives them out.
    let ip = u32::try_from(0x0a00_0000 + index * 40_503 % (1 << 20)).unwrap();
    let ip = IpAddr::from(ip.to_be_bytes());
    let member = Membership {
        service: service_name(index % services),
        ports: Ports::default(),
        health: None,
    };
    Workload {
        uid: format!("cluster//Pod/n/w-{index}").into(),
        name: format!("w-{index}").into(),
        addresses: vec![ip],
        services: vec![member],
        ..like.clone()
    }
}

pub(crate) fn vip(service: usize) -> IpAddr {
    IpAddr::from(u32::try_from(0x6440_0000 + service).unwrap().to_be_bytes())
}

/// A mesh of so many workloads, evenly in the services.
pub(crate) fn mesh(workloads: usize, services: usize) -> Snapshot {
    let (like, service) = one();
    let services = (0..services).map(|index| {
        let vips = vec![NetworkAddress { network: "".into(), ip: vip(index) }];
        Update::Service(Service { key: service_name(index), vips, ..service.clone() })
    });
    let count = services.len();
    let workloads = (0..workloads).map(|index| Update::Workload(workload(&like, index, count)));
    Snapshot::default().apply(Origin::ControlPlane, services.chain(workloads))
}

/// A workload as a feed parses it: each text is its own, and as long as they are.
fn parsed(like: &Workload, index: usize, services: usize) -> Workload {
    let service = parsed_name(index % services);
    let account = format!("web-{}", index % services);
    let name = format!("{account}-7d4b9c6f5-{index:05x}");
    let identity = Identity::new("cluster.local", &service.namespace, &account).unwrap();
    let text = |text: &str| Arc::<str>::from(text);
    Workload {
        uid: format!("Kubernetes//Pod/{}/{name}", service.namespace).into(),
        name: name.into(),
        identity,
        network: text("network-1"),
        node: format!("ip-10-0-{}-{}.eu-west-1.compute.internal", index % 20, index % 250).into(),
        workload_name: text(&account),
        canonical_name: text(&account),
        canonical_revision: text("latest"),
        cluster_id: text("Kubernetes"),
        locality: Locality {
            region: text("eu-west-1"),
            zone: format!("eu-west-1{}", index % 3).into(),
            subzone: text(""),
        },
        services: vec![Membership { service, ports: Ports::default(), health: None }],
        ..workload(like, index, services)
    }
}

fn parsed_name(service: usize) -> ServiceName {
    let namespace = format!("team-{}-production", service % 500);
    let hostname = format!("web-{service}.{namespace}.svc.cluster.local");
    ServiceName { namespace: namespace.into(), hostname: hostname.into() }
}

pub(crate) fn settled(workloads: usize) -> (Pool, Snapshot) {
    let (like, service) = one();
    let mut pool = Pool::default();
    let services = (0..workloads / 10).map(|index| {
        let vips = vec![NetworkAddress { network: "network-1".into(), ip: vip(index) }];
        let name = format!("web-{index}").into();
        let key = parsed_name(index);
        Update::Service(Service { key, name, vips, ..service.clone() })
    });
    let all = (0..workloads).map(|index| Update::Workload(parsed(&like, index, workloads / 10)));
    let shared = services.chain(all).map(|update| pool.share(update));
    let mesh = Snapshot::default().apply(Origin::ControlPlane, shared);
    (pool, mesh)
}

pub(crate) fn policies(scope: Scope) -> impl Iterator<Item = Update> {
    (0..10_000).map(move |index| {
        let principal = TextMatch::Exact(format!("td/ns/n/sa/s-{index}").into());
        let matches = vec![Match {
            principals: Condition { any: vec![principal], none: vec![] },
            ..Match::default()
        }];
        let action = if index % 2 == 0 { Action::Allow } else { Action::Deny };
        let name: Arc<str> = format!("{scope:?}-{index}").into();
        Update::Policy(Policy {
            key: format!("n/{name}").into(),
            name,
            namespace: "n".into(),
            scope,
            action,
            rules: vec![Rule { clauses: vec![Clause { matches }] }],
            enforcement: Enforcement::Enforced,
        })
    })
}
