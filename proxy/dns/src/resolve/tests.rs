//! The decision as a table: who asks for what, and who answers what.

use std::{collections::BTreeSet, path::Path};

use rand::{SeedableRng as _, rngs::StdRng};

use super::*;

fn mesh() -> Snapshot {
    culvert_mesh::file::parse(Path::new("mesh.yaml"), include_str!("tests/mesh.yaml")).unwrap()
}

struct Table {
    mesh: Snapshot,
    zone: Zone,
    rng: StdRng,
}

impl Table {
    fn new() -> Self {
        Self { mesh: mesh(), zone: Zone::default(), rng: StdRng::seed_from_u64(1) }
    }

    fn ask(&mut self, client: &str, name: &str, kind: Kind) -> Resolution {
        let client = self.mesh.find_workload(client).unwrap();
        let search = SearchPath::of_cluster(client.namespace(), &self.zone.domain);
        let question = Question { client, search: &search, name, kind };
        resolve(&self.mesh, &self.zone, &question, &mut self.rng)
    }

    /// Addresses as they were sorted, after the name that they are of if it is another one.
    #[track_caller]
    fn check(&mut self, client: &str, name: &str, kind: Kind, want: &str) {
        let got = match self.ask(client, name, kind) {
            Resolution::Forward => "forward".to_owned(),
            Resolution::ForwardExisting => "forward existing".to_owned(),
            Resolution::Local(answer) => {
                let sorted: BTreeSet<_> = answer.addresses.iter().collect();
                assert_eq!(sorted.len(), answer.addresses.len(), "an address twice");
                let addresses = sorted.into_iter().map(ToString::to_string);
                answer.canonical.into_iter().chain(addresses).collect::<Vec<_>>().join(" ")
            }
        };
        assert_eq!(got, want, "{client} asks for {name} {kind:?}");
    }

    #[track_caller]
    fn a(&mut self, name: &str, want: &str) {
        self.check("client", name, Kind::A, want);
    }

    #[track_caller]
    fn aaaa(&mut self, name: &str, want: &str) {
        self.check("client", name, Kind::Aaaa, want);
    }
}

#[test]
fn a_service_has_its_addresses_in_the_clients_network() {
    let mut t = Table::new();
    t.a("web.shop.svc.cluster.local", "10.1.0.1");
    t.aaaa("web.shop.svc.cluster.local", "fd01::1");
    t.check("far-client", "web.shop.svc.cluster.local", Kind::A, "10.2.0.1");
    t.a("two.shop.svc.cluster.local", "10.1.0.2 10.1.0.3 10.1.0.4");
    t.a("api.example.com", "240.240.0.1");
}

#[test]
fn a_name_without_the_family_exists_all_the_same() {
    let mut t = Table::new();
    t.aaaa("two.shop.svc.cluster.local", "");
    t.aaaa("api.example.com", "");
    t.aaaa("old.shop.svc.cluster.local", "");
    t.a("old.shop.svc.cluster.local", "10.1.0.5");
    t.a("new.shop.svc.cluster.local", "");
    t.aaaa("new.shop.svc.cluster.local", "fd01::6");
    t.a("elsewhere.shop.svc.cluster.local", "");
    t.zone.ipv6 = false;
    t.aaaa("web.shop.svc.cluster.local", "");
    t.aaaa("new.shop.svc.cluster.local", "");
    t.aaaa("db-0.db.shop.svc.cluster.local", "");
}

#[test]
fn other_types_are_for_the_server_which_cannot_deny_the_name() {
    let mut t = Table::new();
    for name in ["web.shop.svc.cluster.local", "api.example.com", "db.shop.svc.cluster.local"] {
        t.check("client", name, Kind::Other, "forward existing");
    }
    t.check("client", "_http._tcp.web.shop.svc.cluster.local", Kind::Other, "forward");
    t.check("client", "unknown.test", Kind::Other, "forward");
}

#[test]
fn a_headless_service_has_its_ready_endpoints_in_the_clients_network() {
    let mut t = Table::new();
    t.a("db.shop.svc.cluster.local", "10.0.1.1 10.0.1.2");
    t.aaaa("db.shop.svc.cluster.local", "fd00::11");
    t.check("far-client", "db.shop.svc.cluster.local", Kind::A, "10.0.1.4");
    t.check("far-client", "db.shop.svc.cluster.local", Kind::Aaaa, "");
    t.a("early.shop.svc.cluster.local", "10.0.1.3");
}

#[test]
fn a_headless_service_that_leads_nowhere_is_for_the_server() {
    let mut t = Table::new();
    t.a("late.shop.svc.cluster.local", "forward existing");
    t.a("external.shop.svc.cluster.local", "forward existing");
    t.aaaa("external.shop.svc.cluster.local", "forward existing");
}

#[test]
fn a_pod_of_a_headless_service_has_a_name() {
    let mut t = Table::new();
    t.a("db-0.db.shop.svc.cluster.local", "10.0.1.1");
    t.aaaa("db-0.db.shop.svc.cluster.local", "fd00::11");
    t.aaaa("db-1.db.shop.svc.cluster.local", "");
    t.a("db-0.db", "10.0.1.1");
    t.a("db-0.db.shop", "10.0.1.1");
    t.a("db-0.db.shop.svc", "10.0.1.1");
    t.check("stranger", "db-0.db.shop", Kind::A, "10.0.1.1");
    // Not ready, in another network, not there, of a service that is not headless: the server knows better.
    t.a("db-2.db.shop.svc.cluster.local", "forward");
    t.a("db-3.db.shop.svc.cluster.local", "forward");
    t.a("db-9.db.shop.svc.cluster.local", "forward");
    t.a("db-1.web.shop.svc.cluster.local", "forward");
    t.a("x.db-0.db.shop.svc.cluster.local", "forward");
}

#[test]
fn short_names_are_completed() {
    let mut t = Table::new();
    for name in ["web", "web.shop", "web.shop.svc"] {
        t.a(name, "10.1.0.1");
    }
    t.check("stranger", "web", Kind::A, "forward");
    t.check("stranger", "web.shop", Kind::A, "10.1.0.1");
}

#[test]
fn names_that_arrive_expanded_are_seen_through() {
    let mut t = Table::new();
    let tail = ["shop.svc.cluster.local", "svc.cluster.local", "cluster.local"];
    for tail in tail {
        t.a(&format!("api.example.com.{tail}"), "api.example.com 240.240.0.1");
        t.aaaa(&format!("api.example.com.{tail}"), "api.example.com");
        t.a(&format!("unknown.test.{tail}"), "forward");
    }
    t.a("web.shop.shop.svc.cluster.local", "web.shop 10.1.0.1");
    // Another namespace's domain is none that this pod searches.
    t.check("stranger", "api.example.com.shop.svc.cluster.local", Kind::A, "forward");
}

#[test]
fn search_domains_are_the_pods_own() {
    let mut t = Table::new();
    let search = SearchPath::parse("search corp.test\n").unwrap();
    let client = t.mesh.find_workload("client").unwrap();
    let mut ask = |name| {
        let question = Question { client, search: &search, name, kind: Kind::A };
        resolve(&t.mesh, &t.zone, &question, &mut t.rng)
    };
    let answer = Answer {
        canonical: Some("api.example.com".to_owned()),
        addresses: vec!["240.240.0.1".parse().unwrap()],
    };
    assert_eq!(ask("api.example.com.corp.test"), Resolution::Local(answer));
    assert_eq!(ask("api.example.com.cluster.local"), Resolution::Forward);
}

#[test]
fn the_narrowest_wildcard_counts_and_an_exact_name_before_it() {
    let mut t = Table::new();
    t.a("a.wild.example.com", "240.240.0.2");
    t.a("b.a.wild.example.com", "240.240.0.2");
    t.a("a.example.com", "240.240.0.3");
    t.a("wild.example.com", "240.240.0.3");
    t.a("api.example.com", "240.240.0.1");
    t.a("example.com", "forward");
    t.aaaa("a.example.com", "");
    // A name that a wildcard covers is its own: there is no other to point to.
    t.a("a.example.com.shop.svc.cluster.local", "240.240.0.3");
}

#[test]
fn services_that_are_not_for_the_client_are_forwarded() {
    let mut t = Table::new();
    t.a("secret.shop.svc.cluster.local", "10.1.0.8");
    t.check("stranger", "secret.shop.svc.cluster.local", Kind::A, "forward");
    t.a("no-vip.test", "forward");
    t.a("ranges.test", "forward");
    t.a("", "forward");
}

#[test]
fn of_services_with_one_name_the_best_answers() {
    let mut t = Table::new();
    t.a("shared.test", "10.3.0.4");
    t.check("stranger", "shared.test", Kind::A, "10.3.0.3");
    let third = "far-client";
    t.check(third, "shared.test", Kind::A, "");
    t.a("tied.test", "10.4.0.1");
    t.zone.preferred_namespace = Some("b".into());
    t.a("tied.test", "10.4.0.2");
    t.a("shared.test", "10.3.0.4");
}

#[test]
fn a_canonical_service_is_better_than_a_preferred_one() {
    let mut t = Table::new();
    let text = include_str!("tests/mesh.yaml")
        .replace("namespace: shop, hostname: shared", "namespace: c, hostname: shared");
    t.mesh = culvert_mesh::file::parse(Path::new("mesh.yaml"), &text).unwrap();
    t.zone.preferred_namespace = Some("a".into());
    t.a("shared.test", "10.3.0.2");
}

#[test]
fn the_order_of_addresses_is_random() {
    let mut t = Table::new();
    let firsts: BTreeSet<_> = (0..100)
        .map(|_| match t.ask("client", "two.shop.svc.cluster.local", Kind::A) {
            Resolution::Local(answer) => answer.addresses[0],
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(firsts.len(), 3);
}

#[test]
fn the_domain_is_the_clusters() {
    let mut t = Table::new();
    t.zone.domain = "corp.test".into();
    // Under another domain a service without addresses is none of Kubernetes's.
    t.a("db.shop.svc.cluster.local", "forward");
    t.a("web.shop", "forward");
    t.a("web.shop.svc.cluster.local", "10.1.0.1");
}
