//! Corners of TCP that redirection has broken elsewhere: ports used twice, 4-tuples used again, SYN cookies, and
//! listeners that come back.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client::{self, REPEATED_SYNS},
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::MeshFile,
    poll, require,
    tap::Tap,
    topology::{Family, Pod, Topology},
};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

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
            let mut streams = from.netns.run(|| {
                let dial = |app: &App| client::dial_from(source, b1.at(family, app.port()));
                apps.each_ref().map(|app| dial(app).unwrap_or_else(|e| panic!("{source}: {e}")))
            });
            for stream in &mut streams {
                assert_eq!(client::ping(stream, b"at once").unwrap(), b"at once", "{source}");
            }
        }
    }
    no_syn_was_lost(&topology);
}

/// The application sees the client's address, but not its port: that one is taken, in the same namespace, by the
/// connection that the proxy has accepted. The port that is chosen instead must not be another client's connection.
#[test]
fn connections_of_one_client_do_not_get_in_each_others_way() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    // Everybody's range in small, so that what is rare in thousands of connections is certain in a hundred.
    a1.netns.set_sysctl("ipv4/ip_local_port_range", "40000 40255").unwrap();
    for family in Family::BOTH {
        let to = a1.at(family, app.port());
        let mut open = Vec::new();
        for port in 40_000..40_100 {
            let reply = x.netns.run(|| {
                let mut stream = client::dial_from(x.at(family, port), to)?;
                stream.set_read_timeout(Some(Duration::from_secs(3)))?;
                client::ping(&mut stream, b"one of many").map(|_| stream)
            });
            let count = open.len();
            open.push(reply.unwrap_or_else(|e| panic!("after {count} by {family:?}: {e}")));
        }
    }
    no_syn_was_lost(&topology);
}

/// Nor answered so late that it was sent again: that is what a stall is.
#[track_caller]
fn no_syn_was_lost(topology: &Topology) {
    for pod in topology.pods() {
        let repeated = pod.netns.run(|| client::tcp_counter(REPEATED_SYNS));
        assert_eq!(repeated, 0, "SYNs of {} were lost", pod.name);
    }
}

/// The end that closes first keeps the 4-tuple in `TIME_WAIT`, where the next SYN must find the listener again.
#[test]
fn a_four_tuple_in_time_wait_is_used_again_in_both_directions() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    for (from, to_pod, proxy) in
        [(a1, b1, &mesh.a), (a1, x, &mesh.a), (x, b1, &mesh.b), (b1, a1, &mesh.a)]
    {
        let app = App::start(&to_pod.netns, Behaviour::CloseFirst).unwrap();
        for family in Family::BOTH {
            let (source, to) = (from.at(family, 21_000), to_pod.at(family, app.port()));
            for round in 0..4 {
                let since = proxy.flows().len();
                let reply = from.netns.run(|| bye(source, to));
                let reply =
                    reply.unwrap_or_else(|e| panic!("{source} -> {to}, round {round}: {e}"));
                assert_eq!(reply, b"bye", "{source} -> {to}, round {round}");
                let direction =
                    if from.name == "a1" { Direction::Outbound } else { Direction::Inbound };
                carried(proxy, since, direction, to);
            }
            let waiting =
                [from, to_pod].map(|pod| pod.netns.run(|| client::sockets_in_state(TIME_WAIT)));
            assert_ne!(waiting, [0, 0], "{source} -> {to}: nothing was in TIME_WAIT");
        }
    }
    no_syn_was_lost(&topology);
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
    for pod in [a1, b1] {
        let cookies = pod.netns.run(|| client::tcp_counter("SyncookiesRecv"));
        assert!(cookies >= 40, "{}: only {cookies} connections were made by cookie", pod.name);
    }
    no_syn_was_lost(&topology);
}

/// Linux's `MSG_FASTOPEN`.
const MSG_FASTOPEN: i32 = 0x2000_0000;

#[test]
fn a_connection_that_opens_with_data_is_captured() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    // 3: clients and listeners, of which the proxy's are not asked; 0x4: also without a cookie.
    a1.netns.set_sysctl("ipv4/tcp_fastopen", "7").unwrap();
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
    for family in Family::BOTH {
        let (since, to) = (mesh.a.flows().len(), b1.at(family, app.port()));
        let reply = a1.netns.run(|| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            socket.set_read_timeout(Some(client::LIMIT))?;
            socket.send_to_with_flags(b"early ", &to.into(), MSG_FASTOPEN)?;
            client::converse(&mut socket.into(), b"and late")
        });
        assert_eq!(reply.unwrap(), b"early and late", "{family:?}");
        carried(&mesh.a, since, Direction::Outbound, to);
    }
    assert_eq!(eth0.stop().plaintext().count(), 0);
}

/// What Go's listeners are by default.
#[test]
fn multipath_sockets_are_captured_and_delivered_to() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let multipath =
        |domain| a1.netns.run(|| Socket::new(domain, Type::STREAM, Some(Protocol::MPTCP)));
    if let Err(error) = multipath(Domain::IPV4) {
        eprintln!("skipped: no MPTCP: {error}");
        return;
    }
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
    for family in Family::BOTH {
        let (since, to) = (mesh.a.flows().len(), b1.at(family, app.port()));
        let socket = multipath(Domain::for_address(to)).unwrap();
        socket.connect_timeout(&to.into(), client::LIMIT).unwrap();
        let reply = client::converse(&mut socket.into(), b"multipath");
        assert_eq!(reply.unwrap(), b"multipath", "{family:?}");
        carried(&mesh.a, since, Direction::Outbound, to);

        let listener = multipath(Domain::for_address(to)).unwrap();
        listener.bind(&a1.at(family, 0).into()).unwrap();
        listener.listen(8).unwrap();
        let inside = listener.local_addr().unwrap().as_socket().unwrap();
        for from in [b1, x] {
            let client = from.netns.start(move || client::exchange(inside, b"to multipath"));
            let (mut accepted, peer) = listener.accept().unwrap();
            assert_eq!(peer.as_socket().unwrap().ip(), from.ip(family));
            let mut chunk = [0; 64];
            let length = accepted.read(&mut chunk).unwrap();
            accepted.write_all(&chunk[..length]).unwrap();
            drop(accepted);
            assert_eq!(client.join().unwrap().unwrap(), b"to multipath", "{}", from.name);
        }
    }
    let report = eth0.stop();
    let others = Family::BOTH.map(|family| b1.ip(family));
    let leaked = report
        .plaintext()
        .find(|segment| others.contains(&segment.src.ip()) || others.contains(&segment.dst.ip()));
    assert_eq!(leaked, None);
}

/// A limit: a listener with a mark of its own does not take over ours, and its answers miss the way to the proxy.
#[test]
fn a_listener_with_a_mark_of_its_own_is_not_reached() {
    if !require::full() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let listener = listen(a1, a1.at(Family::V4, 0), true).unwrap();
    SockRef::from(&listener).set_mark(0x8_0000).unwrap();
    let to = listener.local_addr().unwrap();
    let reply = b1.netns.run(|| client::exchange(to, b"anyone?"));
    assert!(reply.is_err(), "{reply:?}: a limit less; say so in docs/STEERING.md");
    mesh.a.flow("the delivery that was not answered", |flow| {
        flow.goes(Direction::Inbound) && flow.error().is_some()
    });
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
        let mut open =
            [a2, x].map(|from| from.netns.run(|| client::dial(a1.at(family, port))).unwrap());
        for stream in &mut open {
            assert_eq!(client::ping(stream, b"one").unwrap(), b"one");
        }
        // The connections of an app that restarts end with it, but their sockets are still there.
        drop(app);
        for round in 0..3 {
            // A process that another scenario has just forked may hold the old listener, until it runs a program.
            let start = || App::start_on(&a1.netns, port, Behaviour::Echo).ok();
            let again = poll::until(poll::SOON, &format!("restart {round} by {family:?}"), start);
            for from in [a2, x] {
                talks(from, a1.at(family, port), "after a restart");
            }
            drop(again);
        }
        drop(open);
    }
}

/// The socket that the proxy has accepted carries the address of the destination, so that its port is in use in the pod.
/// Where the kernel cannot help it, a limit that is known to everyone who has written a server: ask for `SO_REUSEADDR`.
#[test]
fn an_app_that_does_not_reuse_addresses_gets_the_port_of_an_outbound_connection() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let to = b1.at(Family::V4, app.port());
    let mut open = a1.netns.run(|| client::dial(to)).unwrap();
    client::ping(&mut open, b"one").unwrap();

    let all = SocketAddr::from((Ipv4Addr::UNSPECIFIED, app.port()));
    let limited = mesh.a.log().contains("does not let bind programs set options");
    let in_use = listen(a1, all, false).map_err(|error| error.kind());
    assert_eq!(in_use.err(), limited.then_some(ErrorKind::AddrInUse));
    let reused = listen(a1, all, true);
    assert!(reused.is_ok(), "{reused:?}");
    drop(reused);
    // On its own address alone the port is free.
    let own = listen(a1, a1.at(Family::V4, app.port()), false);
    assert!(own.is_ok(), "{own:?}");
    assert_eq!(client::ping(&mut open, b"two").unwrap(), b"two");
}
