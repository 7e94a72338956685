//! The choice among a service's endpoints: what failed, what is busy, and what is far away.

use super::*;

/// A mesh of one client and a service of so many endpoints: `e-0`, `e-1` and so on.
fn many(count: usize) -> Snapshot {
    let endpoint = |i: usize| {
        let ip = format!("10.0.{}.{}", i / 200, i % 200);
        format!(
            "- {{uid: e-{i}, name: e-{i}, namespace: n, protocol: HBONE, workloadIps: [{ip}], \
             services: {{n/s.n: {{}}}}}}\n"
        )
    };
    let text = format!(
        "services:\n- {{name: s, namespace: n, hostname: s.n, vips: [/10.1.0.1], ports: {{80: 80}}}}\n\
         workloads:\n- {{uid: client, name: client, namespace: n, workloadIps: [10.9.0.1]}}\n{}",
        (0..count).map(endpoint).collect::<String>()
    );
    file::parse(Path::new("mesh.yaml"), &text).unwrap()
}

/// What a node knows, by uid.
#[derive(Default)]
struct Known {
    busy: Vec<(&'static str, u32)>,
    avoided: Vec<&'static str>,
}

impl Outlook for Known {
    fn load(&self, workload: &Workload) -> u32 {
        self.busy.iter().find(|(uid, _)| *uid == &*workload.uid).map_or(0, |(_, load)| *load)
    }

    fn is_avoided(&self, workload: &Workload) -> bool {
        self.avoided.contains(&&*workload.uid)
    }
}

/// The endpoints that chance may choose, with how often it does in 400 times.
fn chosen(mesh: &Snapshot, known: &Known, failed: &[Arc<str>]) -> BTreeMap<String, usize> {
    let source = named(mesh, "client");
    let dst = "10.1.0.1:80".parse().unwrap();
    let request = Request { source, dst, failed, outlook: known };
    let mut counts = BTreeMap::new();
    for seed in 0..400 {
        let route = route(mesh, &request, &mut StdRng::seed_from_u64(seed));
        let name = match (&route, route.endpoint()) {
            (Route::Refuse(refusal), _) => refusal.to_string(),
            (_, endpoint) => endpoint.unwrap().uid.to_string(),
        };
        *counts.entry(name).or_insert(0) += 1;
    }
    counts
}

#[test]
fn what_failed_is_not_tried_again_and_what_is_avoided_only_for_want_of_others() {
    let mesh = many(3);
    let uids = |of: &[&str]| of.iter().map(|uid| Arc::from(*uid)).collect::<Vec<_>>();
    let names = |known: &Known, failed: &[&str]| {
        chosen(&mesh, known, &uids(failed)).into_keys().collect::<Vec<_>>()
    };
    assert_eq!(names(&Known::default(), &[]), ["e-0", "e-1", "e-2"]);
    assert_eq!(names(&Known::default(), &["e-0", "e-2"]), ["e-1"]);
    let all = ["e-0", "e-1", "e-2"];
    assert_eq!(names(&Known::default(), &all), ["n/s.n has no endpoint left to try"]);
    let avoiding =
        |avoided: &[&'static str]| Known { avoided: avoided.to_vec(), ..Known::default() };
    assert_eq!(names(&avoiding(&["e-0", "e-2"]), &[]), ["e-1"]);
    assert_eq!(names(&avoiding(&["e-0", "e-2"]), &["e-1"]), ["e-0", "e-2"]);
    assert_eq!(names(&avoiding(&all), &[]), all);
}

#[test]
fn of_two_the_less_loaded_one_is_chosen() {
    for count in [3, 100] {
        let mesh = many(count);
        let busy = Known { busy: vec![("e-0", 9)], ..Known::default() };
        // It would have to be drawn twice.
        assert!(!chosen(&mesh, &busy, &[]).contains_key("e-0"), "{count}");
    }
    // Load counts in proportion to capacity.
    let mut strong = Workload::clone(many(1).find_workload("e-0").unwrap());
    strong.capacity = 10;
    let mesh = many(2).apply(Origin::File, [Update::Workload(strong)]);
    let busy = Known { busy: vec![("e-0", 9), ("e-1", 1)], ..Known::default() };
    assert_eq!(chosen(&mesh, &busy, &[]).into_keys().collect::<Vec<_>>(), ["e-0"]);
}

#[test]
fn many_equal_endpoints_are_all_chosen_and_none_that_may_not_be() {
    let mesh = many(100);
    let mut sick = Workload::clone(mesh.find_workload("e-7").unwrap());
    sick.health = crate::workload::Health::Unhealthy;
    let mesh = mesh.apply(Origin::File, [Update::Workload(sick)]);
    let known = Known { avoided: vec!["e-9"], ..Known::default() };
    let counts = chosen(&mesh, &known, &[Arc::from("e-8")]);
    assert!(["e-7", "e-8", "e-9"].iter().all(|uid| !counts.contains_key(*uid)), "{counts:?}");
    assert!(counts.len() > 80 && counts.values().all(|count| *count < 20), "{counts:?}");
}

const FAR: &str = "
workloads:
- {uid: client, name: client, namespace: n, workloadIps: [10.9.0.1], network: near}
- {uid: gate, name: gate, namespace: g, protocol: HBONE, workloadIps: [192.0.2.1], network: far, serviceAccount: gate, services: {g/gate.g: {}}}
- {uid: named-gate, name: named-gate, namespace: g, protocol: HBONE, hostname: gate.example.com, network: far}
- {uid: one, name: one, namespace: n, protocol: HBONE, network: far, serviceAccount: one, networkGateway: {destination: far/192.0.2.1, hboneMtlsPort: 15010}, services: {n/by-address: {}}}
- {uid: two, name: two, namespace: n, protocol: HBONE, network: far, serviceAccount: two, networkGateway: {destination: g/gate.g, hboneMtlsPort: 15008}, services: {n/by-service: {}, n/by-address: {}}}
- {uid: three, name: three, namespace: n, protocol: HBONE, network: far, serviceAccount: three, networkGateway: {destination: g/gate.example.com, hboneMtlsPort: 15008}, services: {n/by-name: {}, n/waypoint: {}}}
- {uid: plain, name: plain, namespace: n, protocol: TCP, network: far, networkGateway: {destination: g/gate.g, hboneMtlsPort: 15008}, services: {n/plain: {}}}
services:
- {name: gate, namespace: g, hostname: gate.g, ports: {15008: 15009}}
- {name: by-address, namespace: n, hostname: by-address, vips: [near/10.1.0.1], ports: {80: 80}, subjectAltNames: ['spiffe://cluster.local/ns/n/sa/vouched']}
- {name: by-service, namespace: n, hostname: by-service, vips: [near/10.1.0.2], ports: {80: 80}}
- {name: by-name, namespace: n, hostname: by-name, vips: [near/10.1.0.3], ports: {80: 80}}
- {name: plain, namespace: n, hostname: plain, vips: [near/10.1.0.4], ports: {80: 80}}
- {name: waypoint, namespace: n, hostname: waypoint, ports: {15008: 15008}}
- {name: guarded, namespace: n, hostname: guarded, vips: [near/10.1.0.5], ports: {80: 80}, waypoint: {destination: n/waypoint}}
";

#[test]
fn gateways_of_networks_are_found_by_address_service_and_name() {
    let mesh = file::parse(Path::new("mesh.yaml"), FAR).unwrap();
    let check = |dst: &str, want: &[&str]| check_in(&mesh, "client", dst, want);
    check(
        "10.1.0.1:80",
        &[
            "double 192.0.2.1:15009 gate then by-address:80 two as vouched,one,two for by-address",
            "double 192.0.2.1:15010 gate then by-address:80 one as vouched,one,two for by-address",
        ],
    );
    check(
        "10.1.0.2:80",
        &["double 192.0.2.1:15009 gate then by-service:80 two as two for by-service"],
    );
    check(
        "10.1.0.3:80",
        &["double gate.example.com:15008 named-gate then by-name:80 three as three for by-name"],
    );
    // Nobody could prove there who it is.
    check("10.1.0.4:80", &["service n/plain has no healthy endpoint for port 80"]);
    check(
        "10.1.0.5:80",
        &[
            "double-waypoint gate.example.com:15008 named-gate then guarded:80 three as three for guarded",
        ],
    );
    let lost = mesh.apply(Origin::File, [Update::RemoveAddress("gate".into())]);
    check_in(
        &lost,
        "client",
        "10.1.0.2:80",
        &["service g/gate.g has no healthy endpoint for port 15008"],
    );
    let lost = mesh.apply(Origin::File, [Update::RemoveAddress("g/gate.g".into())]);
    check_in(
        &lost,
        "client",
        "10.1.0.2:80",
        &["two is in network \"far\", to which there is no usable gateway"],
    );
}

#[test]
fn a_name_that_leads_into_the_mesh_gets_no_plaintext() {
    let text = "
workloads:
- {uid: client, name: client, namespace: n, workloadIps: [10.9.0.1]}
- {uid: meshed, name: meshed, namespace: n, protocol: HBONE, workloadIps: [10.0.0.1]}
- {uid: outside, name: outside, namespace: n, protocol: TCP, hostname: db.example.com, services: {n/db: {}}}
- {uid: inside, name: inside, namespace: n, protocol: HBONE, hostname: vm.example.com, services: {n/vm: {}}}
services:
- {name: db, namespace: n, hostname: db, vips: [/10.1.0.1], ports: {80: 5432}}
- {name: vm, namespace: n, hostname: vm, vips: [/10.1.0.2], ports: {80: 8080}}
";
    let mesh = file::parse(Path::new("mesh.yaml"), text).unwrap();
    let check = |vip: &str, name: &str, ip: &str, want: &str| {
        let request = Request::new(named(&mesh, "client"), vip.parse().unwrap());
        let mut rng = StdRng::seed_from_u64(1);
        let route = route(&mesh, &request, &mut rng);
        assert_eq!(route.unresolved().map(|host| &**host), Some(name));
        let resolved = route.resolve(&mesh, &request, ip.parse().unwrap(), &mut rng);
        assert_eq!((tell(&resolved), resolved.unresolved()), (want.to_owned(), None));
    };
    check("10.1.0.1:80", "db.example.com", "192.0.2.7", "tcp 192.0.2.7:5432 outside for db");
    check(
        "10.1.0.1:80",
        "db.example.com",
        "10.0.0.1",
        "hbone 10.0.0.1:15008 10.0.0.1:5432 meshed for db",
    );
    check(
        "10.1.0.2:80",
        "vm.example.com",
        "::ffff:192.0.2.8",
        "hbone 192.0.2.8:15008 192.0.2.8:8080 inside for vm",
    );
}
