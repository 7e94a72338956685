//! Addresses on both ends of a captured connection: what each end sees, one family only, and addresses and interfaces
//! that come and go.

use std::{
    io::ErrorKind,
    net::{SocketAddr, SocketAddrV6},
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::MeshFile,
    poll,
    tap::{Segment, Tap},
    topology::{Family, Pod, Topology},
};

use nix::net::if_::if_nametoindex;

use crate::talk::{await_filters, carried, talks};

#[test]
fn a_client_sees_its_own_address_and_the_one_that_it_dialled() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let a1 = &topology.a1;
    for to in [&topology.a2, &topology.b1, &topology.x] {
        let app = App::start(&to.netns, Behaviour::Echo).unwrap();
        for family in Family::BOTH {
            let to = to.at(family, app.port());
            let stream = a1.netns.run(|| client::dial(to)).unwrap();
            assert_eq!(stream.peer_addr().unwrap(), to);
            assert_eq!(stream.local_addr().unwrap().ip(), a1.ip(family));
        }
    }
}

/// As in Kubernetes: the metadata service of a cloud, and an API server on the node's network.
#[test]
fn link_local_addresses_and_nodes_are_destinations_like_any_other() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for (node, ip) in
        [(&topology.a, "169.254.169.254"), (&topology.a, "10.0.0.1"), (&topology.b, "fd00:10::2")]
    {
        if ip.starts_with("169") {
            node.netns.ip(&format!("addr add {ip}/32 dev lo\n")).unwrap();
        }
        let app = App::start(&node.netns, Behaviour::Echo).unwrap();
        let to = SocketAddr::new(ip.parse().unwrap(), app.port());
        let since = mesh.a.flows().len();
        talks(&topology.a1, to, "to a node");
        carried(&mesh.a, since, Direction::Outbound, to);
    }
}

/// A host on the link of each of a pod's interfaces, and the pod to it.
#[test]
fn ipv6_link_local_addresses_mean_the_link_that_they_are_dialled_by() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, node) = (&topology.a1, &topology.a.netns);
    node.ip(&format!(
        "link add cali-second type veth peer name net1 netns {}\n\
         link set cali-second up\naddr add fe80::1/64 dev cali-second nodad\n",
        a1.netns.name(),
    ))
    .unwrap();
    a1.netns.ip("link set net1 up\n").unwrap();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let on_node = App::start(node, Behaviour::Echo).unwrap();
    for interface in ["eth0", "net1"] {
        let scope = a1.netns.run(|| if_nametoindex(interface)).unwrap();
        let to = SocketAddrV6::new("fe80::1".parse().unwrap(), on_node.port(), 0, scope).into();
        let since = mesh.a.flows().len();
        let tap = Tap::start(&a1.netns, interface, &[]).unwrap();
        talks(a1, to, interface);
        carried(&mesh.a, since, Direction::Outbound, to);
        assert!(tap.stop().plaintext().any(Segment::opens), "by {interface}");
    }

    let inside = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let shown = a1.netns.output("ip", &["-6", "addr", "show", "dev", "eth0", "scope", "link"]);
    let shown = shown.unwrap();
    let ip = shown.split_whitespace().find_map(|word| word.strip_suffix("/64")).unwrap();
    let scope = node.run(|| if_nametoindex("cali-a1")).unwrap();
    let to = SocketAddrV6::new(ip.parse().unwrap(), inside.port(), 0, scope).into();
    let reply = node.run(|| client::exchange(to, b"from the link"));
    assert_eq!(reply.unwrap(), b"from the link");
    // From where the client is, no reply would come back.
    assert_eq!(inside.seen()[0].peer.ip().to_string(), ip);
    mesh.a.flow("the delivery", |flow| flow.goes(Direction::Inbound) && flow.error().is_none());

    // With the same source on both links, nothing tells which is meant.
    a1.netns.ip(&format!("addr add {ip}/64 dev net1 nodad\n")).unwrap();
    let scope = a1.netns.run(|| if_nametoindex("eth0")).unwrap();
    let to = SocketAddrV6::new("fe80::1".parse().unwrap(), on_node.port(), 0, scope).into();
    poll::until(poll::SOON, "the second link to be known", || {
        a1.netns.run(|| client::exchange(to, b"which?")).err()
    });
}

#[test]
fn a_port_that_nobody_listens_on_is_answered_by_the_proxy() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let free = App::start(&a1.netns, Behaviour::Echo).unwrap().port();
    for family in Family::BOTH {
        let to = a1.at(family, free);
        // Accepted, then reset: a kernel would have refused it.
        let end = x.netns.run(|| client::next_event(&mut client::dial(to)?));
        let end = end.map_err(|error| error.kind());
        assert_eq!(end, Err(ErrorKind::ConnectionReset), "{family:?}");
        mesh.a.flow("the refusal of the app", |flow| {
            flow.goes(Direction::Inbound)
                && flow.is("dst.addr", &to.to_string())
                && flow.error().is_some()
        });
    }
}

/// A pod with one family talks by it, both ways.
fn talks_by(topology: &Topology, mesh: &Mesh<'_>, family: Family) {
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let [on_b1, on_x] = [b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let inside = App::start(&a1.netns, Behaviour::Echo).unwrap();
    talks(a1, b1.at(family, on_b1.port()), "to the mesh");
    carried(&mesh.a, 0, Direction::Outbound, b1.at(family, on_b1.port()));
    talks(a1, x.at(family, on_x.port()), "out of the mesh");
    for from in [b1, x] {
        talks(from, a1.at(family, inside.port()), "in");
    }
    carried(&mesh.a, 0, Direction::Inbound, a1.at(family, inside.port()));
}

#[test]
fn a_pod_without_ipv6_is_captured() {
    let Some(topology) = Topology::with_culvert() else { return };
    topology.a1.netns.set_sysctl("ipv6/conf/all/disable_ipv6", "1").unwrap();
    topology.a1.netns.set_sysctl("ipv6/conf/lo/disable_ipv6", "1").unwrap();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    talks_by(&topology, &mesh, Family::V4);
}

#[test]
fn a_pod_without_ipv4_is_captured() {
    let Some(topology) = Topology::with_culvert() else { return };
    let address = topology.a1.ip(Family::V4);
    topology.a1.netns.ip(&format!("addr del {address}/32 dev eth0\n")).unwrap();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    talks_by(&topology, &mesh, Family::V6);
}

/// Waits until a connection to `to` is one that the node carries, and is delivered.
#[track_caller]
fn reached_by_capture(mesh: &Mesh<'_>, from: &Pod, to: SocketAddr) {
    poll::until(poll::SOON, &format!("{to} to be captured"), || {
        let since = mesh.a.flows().len();
        let reply = from.netns.run(|| client::exchange(to, b"later"));
        let to = to.to_string();
        let logged = poll::within(Duration::from_millis(300), || {
            let flows = mesh.a.flows();
            let mut new = flows.iter().skip(since);
            new.any(|flow| flow.goes(Direction::Inbound) && flow.is("dst.addr", &to)).then_some(())
        });
        (logged.is_some() && reply.is_ok_and(|reply| reply == b"later")).then_some(())
    });
}

#[test]
fn addresses_that_a_pod_gets_later_are_captured_in_and_out() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let inside = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let outside = App::start(&b1.netns, Behaviour::Echo).unwrap();
    for (family, later) in [(Family::V4, "10.244.1.111"), (Family::V6, "fd00:244:1::6f")] {
        let prefix = if family == Family::V4 { 32 } else { 128 };
        a1.netns.ip(&format!("addr add {later}/{prefix} dev eth0\n")).unwrap();
        topology.a.netns.ip(&format!("route add {later} dev cali-a1\n")).unwrap();
        let ip = later.parse().unwrap();
        reached_by_capture(&mesh, x, SocketAddr::new(ip, inside.port()));
        let (since, to) = (mesh.a.flows().len(), b1.at(family, outside.port()));
        let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
        let mut stream = a1.netns.run(|| client::dial_from(SocketAddr::new(ip, 0), to)).unwrap();
        assert_eq!(client::converse(&mut stream, b"from there").unwrap(), b"from there");
        carried(&mesh.a, since, Direction::Outbound, to);
        assert_eq!(eth0.stop().plaintext().count(), 0, "{later}");
    }
}

#[test]
fn a_connection_from_an_address_that_the_pod_has_just_got_is_carried() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    for (family, prefix, start) in
        [(Family::V4, 32, "10.244.1.7"), (Family::V6, 128, "fd00:244:1::7")]
    {
        for number in 1..=3 {
            let fresh = format!("{start}{number}");
            topology.a.netns.ip(&format!("route add {fresh} dev cali-a1\n")).unwrap();
            let nodad = if family == Family::V6 { "nodad" } else { "" };
            a1.netns.ip(&format!("addr add {fresh}/{prefix} dev eth0 {nodad}\n")).unwrap();
            let from = SocketAddr::new(fresh.parse().unwrap(), 0);
            let to = b1.at(family, app.port());
            let since = mesh.a.flows().len();
            let reply =
                a1.netns.run(|| client::converse(&mut client::dial_from(from, to)?, b"at once"));
            assert_eq!(
                reply.unwrap_or_else(|e| panic!("from {fresh}: {e}")),
                b"at once",
                "from {fresh}"
            );
            carried(&mesh.a, since, Direction::Outbound, to);
        }
    }
}

/// The kernel dials from the newest IPv6 address, so that a tunnel may well start from one that comes and goes.
#[test]
fn an_interface_that_a_pod_gets_later_is_captured_in_and_out() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let inside = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let outside = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let node = &topology.a.netns;
    node.ip(&format!(
        "link add cali-later type veth peer name net1 netns {}\n\
         link set cali-later up\naddr add 169.254.1.1/32 dev cali-later\nroute add 10.244.1.21 dev cali-later\n",
        a1.netns.name(),
    ))
    .unwrap();
    a1.netns
        .ip("link set net1 up\naddr add 10.244.1.21/32 dev net1\n\
             rule add pref 2000 from 10.244.1.21 lookup 21\n\
             route add 169.254.1.1 dev net1 scope link table 21\n\
             route add default via 169.254.1.1 dev net1 table 21\n")
        .unwrap();
    await_filters(&a1.netns, "net1", &["hold_in", "guard"]);
    let own = "10.244.1.21".parse().unwrap();
    reached_by_capture(&mesh, x, SocketAddr::new(own, inside.port()));

    let net1 = Tap::start(&a1.netns, "net1", &[]).unwrap();
    let to = b1.at(Family::V4, outside.port());
    let since = mesh.a.flows().len();
    let mut stream = a1.netns.run(|| client::dial_through("net1", to)).unwrap();
    assert_eq!(client::converse(&mut stream, b"by net1").unwrap(), b"by net1");
    let mut stream = a1.netns.run(|| client::dial_from(SocketAddr::new(own, 0), to)).unwrap();
    assert_eq!(client::converse(&mut stream, b"from net1").unwrap(), b"from net1");
    carried(&mesh.a, since, Direction::Outbound, to);
    assert_eq!(net1.stop().plaintext().count(), 0);
}

#[test]
fn a_tunnel_whose_address_has_left_the_pod_is_not_used_again() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    for (family, prefix, spare) in
        [(Family::V4, 32, "10.244.1.88"), (Family::V6, 128, "fd00:244:1::58")]
    {
        topology.a.netns.ip(&format!("route add {spare} dev cali-a1\n")).unwrap();
        let nodad = if family == Family::V6 { "nodad" } else { "" };
        a1.netns.ip(&format!("addr add {spare}/{prefix} dev eth0 {nodad}\n")).unwrap();
        let to = b1.at(family, app.port());
        let delivered = || {
            let flows = mesh.b.flows();
            let mut inbound = flows.iter().filter(|flow| {
                flow.goes(Direction::Inbound)
                    && flow.is("dst.hbone_addr", &to.to_string())
                    // A request that was on the old tunnel when the address left has been given up.
                    && !flow.is("bytes_recv", "0")
            });
            (inbound.clone().count(), inbound.next().and_then(|flow| flow.field("src.addr")))
        };
        talks(a1, to, "by a new tunnel");
        let from = poll::until(poll::SOON, "the tunnel's address", || delivered().1);
        let from = from.parse::<SocketAddr>().unwrap().ip();
        a1.netns.ip(&format!("addr del {from}/{prefix} dev eth0\n")).unwrap();
        // Three, so that one that merely waited for the old tunnel to be given up shows in the log as well.
        for _ in 0..3 {
            talks(a1, to, "after its address has left");
        }
        poll::until(poll::SOON, "the deliveries", || (delivered().0 == 4).then_some(()));
        mesh.a
            .flow("a connection by the tunnel", |flow| flow.is("dst.hbone_addr", &to.to_string()));
        for flow in mesh.a.flows() {
            assert_eq!(flow.error(), None, "{flow:?}");
        }
    }
}
