//! Corners of TCP that redirection has broken elsewhere: ports used twice, 4-tuples used again, SYN cookies, and
//! listeners that come back.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::MeshFile,
    poll,
    topology::{Family, Pod, Topology},
};
use socket2::{Domain, Socket, Type};

use crate::talk::{carried, talks};

/// With NAT one of the two would be answered from the other's 4-tuple, and stall.
#[test]
fn one_source_port_reaches_two_destination_ports_at_once() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let apps = [b1, b1].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    for (from, family) in Family::BOTH.into_iter().flat_map(|f| [(a1, f), (x, f)]) {
        for round in 0..100 {
            let source = from.at(family, 20_000 + round);
            let ((), took) = poll::timed(|| {
                let mut streams = from.netns.run(|| {
                    let dial = |app: &App| client::dial_from(source, b1.at(family, app.port()));
                    apps.each_ref().map(|app| dial(app).unwrap_or_else(|e| panic!("{source}: {e}")))
                });
                for stream in &mut streams {
                    assert_eq!(client::ping(stream, b"at once").unwrap(), b"at once", "{source}");
                }
            });
            // The first retransmission of a lost SYN takes a second.
            assert!(took < Duration::from_millis(900), "{source} stalled for {took:?}");
        }
    }
}

/// The end that closes first keeps the 4-tuple in TIME_WAIT, where the next SYN must find the listener again.
#[test]
fn a_four_tuple_in_time_wait_is_used_again_in_both_directions() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    for (from, to_pod, proxy) in [(a1, b1, &mesh.a), (a1, x, &mesh.a), (x, b1, &mesh.b), (b1, a1, &mesh.a)] {
        let app = App::start(&to_pod.netns, Behaviour::CloseFirst).unwrap();
        for family in Family::BOTH {
            let (source, to) = (from.at(family, 21_000), to_pod.at(family, app.port()));
            for round in 0..4 {
                let since = proxy.flows().len();
                let (reply, took) = poll::timed(|| from.netns.run(|| bye(source, to)));
                let reply = reply.unwrap_or_else(|e| panic!("{source} -> {to}, round {round}: {e}"));
                assert_eq!(reply, b"bye", "{source} -> {to}, round {round}");
                assert!(took < Duration::from_millis(900), "{source} -> {to} stalled for {took:?}");
                let direction = if from.name == "a1" { Direction::Outbound } else { Direction::Inbound };
                carried(proxy, since, direction, to);
            }
            let waiting = [from, to_pod].map(|pod| pod.netns.run(|| client::sockets_in_state(TIME_WAIT)));
            assert_ne!(waiting, [0, 0], "{source} -> {to}: nothing was in TIME_WAIT");
        }
    }
}

/// The state in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";

/// Says a word to an app that closes first, from an address of its choice.
fn bye(source: SocketAddr, to: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = client::dial_from(source, to)?;
    stream.write_all(b"bye")?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply)?;
    Ok(reply)
}

#[test]
fn connections_are_captured_by_syn_cookies_as_by_syns() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    // 2: whatever the queue, as a test of them.
    for pod in [a1, b1] {
        pod.netns.set_sysctl("ipv4/tcp_syncookies", "2").unwrap();
    }
    let apps = [a1, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1, on_x] = apps.each_ref().map(App::port);
    for family in Family::BOTH {
        for _ in 0..10 {
            for (from, to) in [
                (a1, b1.at(family, on_b1)),
                (a1, x.at(family, on_x)),
                (x, a1.at(family, on_a1)),
                (b1, a1.at(family, on_a1)),
            ] {
                talks(from, to, "by cookie");
            }
        }
        carried(&mesh.b, 0, Direction::Inbound, b1.at(family, on_b1));
        carried(&mesh.a, 0, Direction::Inbound, a1.at(family, on_a1));
    }
}

fn listen(pod: &Pod, on: SocketAddr, reuse_address: bool) -> std::io::Result<TcpListener> {
    pod.netns.run(|| {
        let socket = Socket::new(Domain::for_address(on), Type::STREAM, None)?;
        socket.set_reuse_address(reuse_address)?;
        socket.bind(&on.into())?;
        socket.listen(16)?;
        Ok(socket.into())
    })
}

#[test]
fn an_app_gets_its_port_again_while_connections_that_are_proxied_hold_it() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, a2, x) = (&topology.a1, &topology.a2, &topology.x);
    for family in Family::BOTH {
        let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
        let port = app.port();
        let mut open = [a2, x].map(|from| from.netns.run(|| client::dial(a1.at(family, port))).unwrap());
        for stream in &mut open {
            assert_eq!(client::ping(stream, b"one").unwrap(), b"one");
        }
        // The connections of an app that restarts end with it, but their sockets are still there.
        drop(app);
        for round in 0..3 {
            let again = App::start_on(&a1.netns, port, Behaviour::Echo);
            let again = again.unwrap_or_else(|e| panic!("restart {round} by {family:?}: {e:#}"));
            for from in [a2, x] {
                talks(from, a1.at(family, port), "after a restart");
            }
            drop(again);
        }
        drop(open);
    }
}

/// A limit: the socket that the proxy has accepted carries the address of the destination, so that its port is in use in
/// the pod. Known to everyone who has written a server: it asks for `SO_REUSEADDR`.
#[test]
fn an_app_that_does_not_reuse_addresses_finds_the_port_of_an_outbound_connection_in_use() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let to = b1.at(Family::V4, app.port());
    let mut open = a1.netns.run(|| client::dial(to)).unwrap();
    client::ping(&mut open, b"one").unwrap();

    let all = SocketAddr::from((Ipv4Addr::UNSPECIFIED, app.port()));
    let in_use = listen(a1, all, false).map_err(|error| error.kind());
    assert_eq!(in_use.err(), Some(ErrorKind::AddrInUse));
    let reused = listen(a1, all, true);
    assert!(reused.is_ok(), "{reused:?}");
    drop(reused);
    // On its own address alone the port is free.
    let own = listen(a1, a1.at(Family::V4, app.port()), false);
    assert!(own.is_ok(), "{own:?}");
    assert_eq!(client::ping(&mut open, b"two").unwrap(), b"two");
}
