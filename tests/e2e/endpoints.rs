//! Which endpoint of a service gets a connection: dead ones, dead zones, waypoints; and what one is told that takes
//! connections for others.

use std::net::SocketAddr;

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Culvert, Mesh, Remains},
    dns::NameServer,
    flow_log::Direction,
    mesh_file::{MeshFile, Protocol, VIP_PORT, VIP_V4, VIP_V6},
    poll,
    topology::{Family, Topology},
};
use serde_json::json;

use crate::third_party::{Nghttpx, have_nghttpx};

/// The service's address.
pub(crate) fn vip(family: Family) -> SocketAddr {
    let ip = match family {
        Family::V4 => VIP_V4,
        Family::V6 => VIP_V6,
    };
    SocketAddr::new(ip.parse().unwrap(), VIP_PORT)
}

/// Waits for `total` outbound connections in the log, and gives how many of them went to each of two workloads.
#[track_caller]
fn sent(culvert: &Culvert<'_>, total: usize, to: [&str; 2]) -> [usize; 2] {
    poll::until(poll::SOON, "all connections to be logged", || {
        let flows = culvert.flows();
        let outbound: Vec<_> = flows.iter().filter(|flow| flow.goes(Direction::Outbound)).collect();
        let to_one = |one| outbound.iter().filter(|flow| flow.is("dst.workload", one)).count();
        (outbound.len() >= total).then(|| to.map(to_one))
    })
}

/// `count` connections to the service by each family, each of which must get its echo.
#[track_caller]
fn all_get_through(topology: &Topology, count: usize) {
    for family in Family::BOTH {
        for number in 0..count {
            let reply = topology.a1.netns.run(|| client::exchange(vip(family), b"to the service"));
            let reply = reply.unwrap_or_else(|e| panic!("{family:?} {number}: {e}"));
            assert_eq!(reply, b"to the service");
        }
    }
}

#[test]
fn of_two_endpoints_one_that_is_dead_fails_no_client() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (b1, x) = (&topology.b1, &topology.x);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    // Nobody speaks HBONE there.
    let file = MeshFile::new(&topology)
        .workload(x, &topology.b, Protocol::Hbone)
        .service(b1, app.port())
        .also_by(x, app.port());
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    all_get_through(&topology, 20);
    assert_eq!(sent(&mesh.a, 40, ["b1", "x"]), [40, 0]);
    for flow in mesh.a.flows() {
        assert_eq!(flow.error(), None, "{flow:?}");
    }
}

#[test]
fn an_endpoint_whose_app_is_not_there_fails_no_client() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a2, b1) = (&topology.a2, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let file = MeshFile::new(&topology).service(b1, app.port()).also_by(a2, app.port());
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    all_get_through(&topology, 20);
    assert_eq!(sent(&mesh.a, 40, ["b1", "a2"]), [40, 0]);
}

/// With one endpoint, and with more that are all dead, the client is told; and not only after each has been tried long.
#[test]
fn where_all_endpoints_are_dead_the_client_sees_a_reset() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a2, b1, x) = (&topology.a2, &topology.b1, &topology.x);
    let free = App::start(&b1.netns, Behaviour::Echo).unwrap().port();
    let file = MeshFile::new(&topology)
        .workload(x, &topology.b, Protocol::Hbone)
        .service(b1, free)
        .also_by(x, free)
        .also_by(a2, free);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let reply = topology.a1.netns.run(|| client::exchange(vip(Family::V4), b"anybody?"));
    assert!(reply.is_err(), "{reply:?}");
    let flow = mesh.a.flow("the failure", |flow| flow.goes(Direction::Outbound));
    assert!(flow.error().is_some(), "{flow:?}");
    assert_eq!(mesh.a.flows().iter().filter(|flow| flow.goes(Direction::Outbound)).count(), 1);
}

#[test]
fn when_a_zone_dies_its_clients_go_to_another() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1) = (&topology.a1, &topology.a2, &topology.b1);
    let near = App::start(&a2.netns, Behaviour::Echo).unwrap();
    let far = App::start_on(&b1.netns, near.port(), Behaviour::Echo).unwrap();
    let zone = |zone: &str| json!({ "region": "r", "zone": zone });
    let file = MeshFile::new(&topology)
        .field(a1, "locality", zone("one"))
        .field(a2, "locality", zone("one"))
        .field(b1, "locality", zone("two"))
        .service(b1, far.port())
        .also_by(a2, near.port())
        .service_field(
            "loadBalancer",
            json!({ "mode": "Failover", "routingPreferences": ["Region", "Zone"] }),
        );
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    all_get_through(&topology, 5);
    assert_eq!(sent(&mesh.a, 10, ["a2", "b1"]), [10, 0]);
    drop(near);
    all_get_through(&topology, 5);
    assert_eq!(sent(&mesh.a, 20, ["a2", "b1"]), [10, 10]);
}

#[test]
fn a_service_behind_a_waypoint_is_reached_through_an_independent_one() {
    if !have_nghttpx() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let app = App::start(&b1.netns, Behaviour::CloseFirst).unwrap();
    let file = MeshFile::new(&topology)
        .workload(x, &topology.b, Protocol::Hbone)
        .service(b1, app.port())
        .service_field("waypoint", json!({ "destination": format!("/{}", x.ip(Family::V4)) }));
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let waypoint = Nghttpx::start(&topology, &mesh.ca, x, Some(b1.at(Family::V4, app.port())));
    for family in Family::BOTH {
        let reply = a1.netns.run(|| client::ping(&mut client::dial(vip(family))?, b"by waypoint"));
        let reply = reply.unwrap_or_else(|e| panic!("{family:?}: {e} {}", waypoint.process.log()));
        assert_eq!(reply, b"by waypoint");
        // It is asked for what the client asked for.
        mesh.a.flow("a connection through the waypoint", |flow| {
            flow.is("dst.hbone_addr", &vip(family).to_string())
                && flow.identities() == Some((a1.identity(), x.identity()))
                && flow.error().is_none()
        });
    }
    assert_eq!(waypoint.onward.seen().len(), 2);
}

#[test]
fn waypoints_get_connections_by_their_weight() {
    if !have_nghttpx() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, a2, b1, x) = (&topology.a1, &topology.a2, &topology.b1, &topology.x);
    let app = App::start(&b1.netns, Behaviour::CloseFirst).unwrap();
    let to = |ip, weight| json!({ "destination": { "destination": format!("/{ip}") }, "weight": weight });
    let weights = json!([
        to(x.ip(Family::V4), 1),
        to(a2.ip(Family::V4), 1),
        // It is none, and has no weight.
        to(b1.ip(Family::V4), 0),
    ]);
    let file = MeshFile::new(&topology)
        .workload(x, &topology.b, Protocol::Hbone)
        .service(b1, app.port())
        .service_field("weightedWaypoints", weights);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    // Its port 15008 is its own then.
    mesh.a.set_pods(&[a1]).unwrap();
    crate::talk::await_filters(&a2.netns, "eth0", &[]);
    let onward = Some(b1.at(Family::V4, app.port()));
    let waypoints = [x, a2].map(|pod| Nghttpx::start(&topology, &mesh.ca, pod, onward));
    for _ in 0..24 {
        let to = vip(Family::V4);
        let reply = a1.netns.run(|| client::ping(&mut client::dial(to)?, b"by weight"));
        assert_eq!(reply.unwrap(), b"by weight");
    }
    let [one, two] = waypoints.map(|waypoint| waypoint.onward.seen().len());
    assert!(one > 0 && two > 0 && one + two == 24, "{one} and {two}");
}

/// As a waypoint in the mesh's sandwich is: it is told who connects, and to what.
#[test]
fn an_application_that_takes_connections_for_others_is_told_of_each_by_a_proxy_header() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let tunnel = json!({ "protocol": "PROXY", "port": app.port() });
    let file = MeshFile::new(&topology).field(b1, "applicationTunnel", tunnel);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    for family in Family::BOTH {
        let to = b1.at(family, 8080);
        let reply = a1.netns.run(|| client::exchange(to, b"after the header")).unwrap();
        let flow = mesh.b.flow("the delivery", |flow| {
            flow.goes(Direction::Inbound) && flow.is("dst.hbone_addr", &to.to_string())
        });
        let peer: SocketAddr = flow.field("src.addr").unwrap().parse().unwrap();
        let mut want = b"\r\n\r\n\0\r\nQUIT\n\x21".to_vec();
        let (code, addresses) = match (peer.ip(), to.ip()) {
            (std::net::IpAddr::V4(from), std::net::IpAddr::V4(to)) => {
                (0x11, [from.octets(), to.octets()].concat())
            }
            (std::net::IpAddr::V6(from), std::net::IpAddr::V6(to)) => {
                (0x21, [from.octets(), to.octets()].concat())
            }
            mixed => panic!("{mixed:?}"),
        };
        let identity = a1.identity();
        let length = u16::try_from(addresses.len() + 4 + 3 + identity.len()).unwrap();
        want.push(code);
        want.extend(length.to_be_bytes());
        want.extend(addresses);
        want.extend(peer.port().to_be_bytes());
        want.extend(8080_u16.to_be_bytes());
        want.push(0xd0);
        want.extend(u16::try_from(identity.len()).unwrap().to_be_bytes());
        want.extend(identity.bytes());
        want.extend(b"after the header");
        assert_eq!(reply, want, "{family:?}");
    }
    // By loopback, so that no other pod can tell it of somebody else.
    assert!(app.seen().iter().all(|seen| seen.peer.ip().is_loopback()), "{:?}", app.seen());
}

/// The first name server of this machine's resolver; glibc's default where there is none.
fn name_server() -> std::net::IpAddr {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let mut servers = text.lines().filter_map(|line| line.strip_prefix("nameserver"));
    let first = servers.find_map(|server| server.trim().parse().ok());
    first.unwrap_or_else(|| [127, 0, 0, 1].into())
}

/// By HBONE, and once for all connections: the resolver of node a is asked, which answers in node a's network.
#[test]
fn an_endpoint_with_a_host_name_alone_is_looked_up() {
    let Some(topology) = Topology::with_culvert() else { return };
    let b1 = &topology.b1;
    let server = name_server();
    if !server.is_loopback() {
        let prefix = if server.is_ipv4() { 32 } else { 128 };
        topology.a.netns.ip(&format!("addr add {server}/{prefix} dev lo")).unwrap();
    }
    let names = Family::BOTH.map(|family| ("ledger.test.", b1.at(family, 0).ip()));
    let dns = NameServer::knowing(&topology.a.netns, &[server], &names).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let file = MeshFile::new(&topology).service(b1, app.port());
    let named =
        file.field(b1, "workloadIps", json!([])).field(b1, "hostname", json!("ledger.test"));
    let mesh = Mesh::start(&topology, &named, Remains::Nothing).unwrap();
    all_get_through(&topology, 5);
    assert_eq!(sent(&mesh.a, 10, ["b1", "x"]), [10, 0]);
    for flow in mesh.a.flows() {
        assert_eq!(flow.error(), None, "{flow:?}");
        assert_eq!(flow.field("dst.identity"), Some(b1.identity()));
    }
    let asked = dns.asked_about("ledger.test.");
    assert!((1..=2 * 2).contains(&asked.len()), "{asked:?}");
}
