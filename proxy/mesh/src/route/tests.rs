mod choice;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use rand::{SeedableRng as _, rngs::StdRng};

use super::*;
use crate::{
    file,
    snapshot::{Origin, Update},
    workload::{Destination, Gateway, ServiceName},
};

const MESH: &str = include_str!("tests/mesh.yaml");

fn mesh() -> Snapshot {
    file::parse(Path::new("mesh.yaml"), MESH).unwrap()
}

fn named<'a>(mesh: &'a Snapshot, name: &str) -> &'a Arc<Workload> {
    mesh.workloads().find(|w| *w.name == *name).unwrap()
}

fn tell(route: &Route) -> String {
    let service = |s: &Option<Arc<Service>>| {
        s.as_ref().map_or_else(String::new, |s| format!(" for {}", s.name))
    };
    match route {
        Route::Direct { dst, workload, service: s } => {
            let workload = workload.as_ref().map_or("nobody", |w| &w.name);
            format!("tcp {dst} {workload}{}", service(s))
        }
        Route::Hbone(hbone) => {
            let HboneRoute { gateway, authority, workload, service: s, hop, expected } = hbone;
            assert!(expected.contains(&workload.identity), "{hbone:?}");
            let hop = match hop {
                Hop::Workload => "hbone",
                Hop::Waypoint => "waypoint",
            };
            format!("{hop} {gateway} {authority} {}{}", workload.name, service(s))
        }
        Route::DoubleHbone(double) => {
            assert!(double.gateway_expected.contains(&double.gateway_workload.identity));
            let expected: Vec<_> = double.expected.iter().map(Identity::service_account).collect();
            let hop = match double.hop {
                Hop::Workload => "double",
                Hop::Waypoint => "double-waypoint",
            };
            let DoubleHboneRoute { gateway, authority, gateway_workload, workload, .. } = double;
            format!(
                "{hop} {gateway} {} then {authority} {} as {} for {}",
                gateway_workload.name,
                workload.name,
                expected.join(","),
                double.service.name
            )
        }
        Route::Refuse(refusal) => refusal.to_string(),
    }
}

/// All routes that chance may choose.
fn routes(mesh: &Snapshot, source: &str, dst: &str) -> BTreeSet<String> {
    let request = Request::new(named(mesh, source), dst.parse().unwrap());
    (0..64).map(|seed| tell(&route(mesh, &request, &mut StdRng::seed_from_u64(seed)))).collect()
}

#[track_caller]
fn check_in(mesh: &Snapshot, source: &str, dst: &str, want: &[&str]) {
    let got = routes(mesh, source, dst);
    let want: BTreeSet<_> = want.iter().map(ToString::to_string).collect();
    assert_eq!(got, want, "{source} to {dst}");
}

#[track_caller]
fn check(source: &str, dst: &str, want: &[&str]) {
    check_in(&mesh(), source, dst, want);
}

#[test]
fn what_nobody_claims_passes_through() {
    check("client", "192.0.2.1:443", &["tcp 192.0.2.1:443 nobody"]);
    check("client", "[2001:db8::1]:443", &["tcp [2001:db8::1]:443 nobody"]);
    // The same address in another network is another one.
    check("client", "10.5.0.1:80", &["tcp 10.5.0.1:80 nobody"]);
}

#[test]
fn workloads_are_reached_by_what_they_speak() {
    check("client", "10.0.1.1:81", &["hbone 10.0.1.1:15008 10.0.1.1:81 a"]);
    check("client", "[::ffff:10.0.1.1]:81", &["hbone 10.0.1.1:15008 10.0.1.1:81 a"]);
    check("client", "[fd00::3]:81", &["hbone [fd00::3]:15008 [fd00::3]:81 dual"]);
    check("client", "10.0.2.1:81", &["tcp 10.0.2.1:81 plain"]);
    check("client", "10.0.0.1:81", &["hbone 10.0.0.1:15008 10.0.0.1:81 client"]);
    // An address of the node does not tell which of its pods is meant.
    check("client", "10.9.9.9:81", &["tcp 10.9.9.9:81 nobody"]);
}

#[test]
fn services_spread_over_healthy_endpoints_and_translate_ports() {
    check(
        "client",
        "10.1.0.1:80",
        &[
            "hbone 10.0.1.1:15008 10.0.1.1:8080 a for web",
            "hbone 10.0.1.2:15008 10.0.1.2:9090 b for web",
            "tcp 10.0.2.1:8080 plain for web",
        ],
    );
    check(
        "client",
        "10.1.0.2:80",
        &[
            "hbone 10.0.1.1:15008 10.0.1.1:80 a for any-health",
            "hbone 10.0.1.3:15008 10.0.1.3:80 sick for any-health",
        ],
    );
}

#[test]
fn services_refuse_what_they_do_not_serve() {
    check("client", "10.1.0.1:81", &["service n/web.n has no port 81"]);
    check("client", "10.1.0.3:80", &["service n/empty.n has no healthy endpoint for port 80"]);
    check("client", "10.1.0.4:80", &["service n/sick.n has no healthy endpoint for port 80"]);
    // Declared without a target port, and the endpoint does not know one.
    check("client", "10.1.0.1:82", &["service n/web.n has no healthy endpoint for port 82"]);
    check("client", "10.1.0.20:80", &["service n/idle.n has no healthy endpoint for port 80"]);
}

#[test]
fn strict_locality_needs_all_and_failover_the_longest_run() {
    check("client", "10.1.0.5:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for strict"]);
    check("stranger", "10.1.0.5:80", &["service n/strict.n has no healthy endpoint for port 80"]);
    check("client", "10.1.0.6:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for failover"]);
    check(
        "stranger",
        "10.1.0.6:80",
        &[
            "hbone 10.0.1.1:15008 10.0.1.1:80 a for failover",
            "hbone 10.0.1.2:15008 10.0.1.2:80 b for failover",
        ],
    );
}

#[test]
fn addresses_follow_the_family_that_was_asked_for() {
    check("client", "10.1.0.7:80", &["hbone 10.0.3.1:15008 10.0.3.1:80 dual for dual"]);
    check("client", "[fd01::7]:80", &["hbone [fd00::3]:15008 [fd00::3]:80 dual for dual"]);
    check("client", "10.1.0.8:80", &["hbone [fd00::3]:15008 [fd00::3]:80 dual for only-v6"]);
    check("client", "10.1.0.9:80", &["service n/v6-less.n has no healthy endpoint for port 80"]);
}

#[test]
fn ranges_serve_addresses_that_nobody_owns_and_the_longest_prefix_wins() {
    check("client", "10.2.0.1:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for wide"]);
    check("client", "10.2.3.4:80", &["hbone 10.0.1.2:15008 10.0.1.2:80 b for narrow"]);
    check("client", "10.2.3.5:80", &["hbone 10.2.3.5:15008 10.2.3.5:80 inside-range"]);
}

#[test]
fn passthrough_keeps_the_address_and_the_mesh_its_protection() {
    check("client", "10.1.0.10:80", &["tcp 10.1.0.10:80 nobody for through"]);
    // A workload of the mesh is behind this virtual address itself.
    check("client", "10.0.6.1:80", &["hbone 10.0.6.1:15008 10.0.6.1:80 headless for headless"]);
}

#[test]
fn private_services_are_hidden_from_other_namespaces() {
    check("client", "10.1.0.11:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for private"]);
    check(
        "stranger",
        "10.1.0.11:80",
        &["service n/private.n is visible in its own namespace only"],
    );
    // Nothing of the mesh is behind it, so it is like an unknown address.
    check("stranger", "10.1.0.12:80", &["tcp 10.1.0.12:80 nobody"]);
    // A visible one of the same address serves the rest.
    check("stranger", "10.1.0.13:80", &["hbone 10.0.1.2:15008 10.0.1.2:80 b for shared-theirs"]);
    check("client", "10.1.0.13:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for shared-ours"]);
}

#[test]
fn waypoints_of_services_get_what_was_asked_for() {
    check(
        "client",
        "10.1.0.14:80",
        &[
            "waypoint 10.0.9.1:15008 10.1.0.14:80 wp-1 for guarded",
            "waypoint 10.0.9.2:15008 10.1.0.14:80 wp-2 for guarded",
        ],
    );
    check(
        "client",
        "[fd01::14]:80",
        &[
            "waypoint 10.0.9.1:15008 [fd01::14]:80 wp-1 for guarded",
            "waypoint 10.0.9.2:15008 [fd01::14]:80 wp-2 for guarded",
        ],
    );
    // A port that the service has not is the waypoint's to refuse.
    check(
        "client",
        "10.1.0.14:81",
        &[
            "waypoint 10.0.9.1:15008 10.1.0.14:81 wp-1 for guarded",
            "waypoint 10.0.9.2:15008 10.1.0.14:81 wp-2 for guarded",
        ],
    );
}

#[test]
fn waypoints_of_workloads_are_used_for_their_own_addresses_only() {
    check("client", "10.0.4.1:80", &["waypoint 10.0.9.1:15009 10.0.4.1:80 wp-1"]);
    check("client", "10.0.4.2:80", &["waypoint 10.0.9.3:15010 10.0.4.2:80 wp-3"]);
    check("client", "10.0.4.3:80", &["waypoint 10.0.9.4:15008 10.0.4.3:80 wp-4"]);
    check("client", "10.1.0.15:80", &["hbone 10.0.4.1:15008 10.0.4.1:80 behind for unguarded"]);
}

#[test]
fn waypoints_reach_what_they_guard() {
    check("wp-1", "10.1.0.14:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for guarded"]);
    check("wp-3", "10.0.4.2:80", &["hbone 10.0.4.2:15008 10.0.4.2:80 behind-name"]);
    check("wp-1", "10.0.4.1:80", &["hbone 10.0.4.1:15008 10.0.4.1:80 behind"]);
    // Another's waypoint is like any other client.
    check("wp-3", "10.0.4.1:80", &["waypoint 10.0.9.1:15009 10.0.4.1:80 wp-1"]);
    check("wp-heavy", "10.1.0.16:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for weighted"]);
}

#[test]
fn weighted_waypoints_share_connections_and_weight_zero_gets_none() {
    check(
        "client",
        "10.1.0.16:80",
        &[
            "waypoint 10.0.9.3:15008 10.1.0.16:80 wp-3 for weighted",
            "waypoint 10.0.9.5:15008 10.1.0.16:80 wp-heavy for weighted",
        ],
    );
    check("client", "10.1.0.17:80", &["waypoint 10.0.9.1:15009 10.1.0.17:80 wp-1 for weightless"]);
}

#[test]
fn what_has_only_a_name_is_where_that_leads() {
    check(
        "client",
        "10.0.4.4:80",
        &["waypoint wp-nowhere.example.com:15008 10.0.4.4:80 wp-nowhere"],
    );
}

#[test]
fn waypoints_that_cannot_be_used_fail_closed() {
    check(
        "client",
        "10.1.0.18:80",
        &["service n/wp-empty.n has no healthy endpoint for port 15008"],
    );
    let unknown = Gateway {
        destination: Destination::Name(ServiceName { namespace: "n".into(), hostname: "w".into() }),
        port: 15008,
    };
    let known = mesh();
    let mut lost = (**named(&known, "a")).clone();
    lost.waypoint = Some(Box::new(unknown));
    let mesh = known.apply(Origin::File, [Update::Workload(lost)]);
    check_in(
        &mesh,
        "client",
        "10.0.1.1:80",
        &["waypoint n/w of a is not known or has no usable address"],
    );
}

#[test]
fn other_networks_are_entered_by_their_gateways() {
    check(
        "client",
        "10.1.0.19:80",
        &["double 10.5.0.1:15008 far then remote.n:80 far as default for remote"],
    );
    check("client", "10.1.0.21:80", &["hbone 10.0.1.1:15008 10.0.1.1:80 a for both-networks"]);
    // There, an address would mean another workload.
    check(
        "client",
        "10.0.4.5:80",
        &["far is in network \"n2\", to which there is no usable gateway"],
    );
    check(
        "client",
        "10.1.0.22:80",
        &["service n/no-gateway.n has no healthy endpoint for port 80"],
    );
}

#[test]
fn services_vouch_for_further_identities() {
    let mesh = mesh();
    let request = Request::new(named(&mesh, "client"), "10.1.0.7:80".parse().unwrap());
    let Route::Hbone(hbone) = route(&mesh, &request, &mut StdRng::seed_from_u64(1)) else {
        panic!("not a tunnel");
    };
    let expected: Vec<_> = hbone.expected.iter().map(Identity::uri).collect();
    assert_eq!(
        expected,
        ["spiffe://cluster.local/ns/n/sa/extra", "spiffe://cluster.local/ns/n/sa/default",]
    );
}

#[test]
fn connections_are_shared_by_capacity() {
    let mesh = mesh();
    let request = Request::new(named(&mesh, "client"), "10.1.0.1:80".parse().unwrap());
    let mut rng = StdRng::seed_from_u64(7);
    let routes = (0..6000).map(|_| tell(&route(&mesh, &request, &mut rng)));
    let to_b = routes.filter(|route| route.contains(" b ")).count();
    // `b` has capacity 4 of 6.
    assert!((3800..4200).contains(&to_b), "{to_b} of 6000");
}

#[test]
fn no_mesh_workload_is_ever_reached_in_plaintext() {
    let mesh = mesh();
    let vips = mesh.services().flat_map(|s| s.vips.iter().map(|vip| vip.ip));
    let owned = mesh.workloads().flat_map(|w| w.addresses.iter().copied());
    let addresses: Vec<IpAddr> = vips.chain(owned).collect();
    let mut rng = StdRng::seed_from_u64(3);
    for source in mesh.workloads() {
        for ip in &addresses {
            for port in [80, 81, 82, 15008] {
                let request = Request::new(source, SocketAddr::new(*ip, port));
                let Route::Direct { dst, workload, .. } = route(&mesh, &request, &mut rng) else {
                    continue;
                };
                assert!(workload.is_none_or(|w| w.protocol == Protocol::Tcp), "{request:?}");
                let ip = dst.address().unwrap().ip();
                let owner = mesh.find_by_address(&source.network, &ip);
                assert!(owner.is_none_or(|w| w.protocol == Protocol::Tcp), "{request:?}");
            }
        }
    }
}
