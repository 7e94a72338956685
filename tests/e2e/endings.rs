//! How connections end: half-closes, resets, refusals and dead peers reach the other app as what they are.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::Shutdown,
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour, End, GREETING},
    client::{self, LAST_ACK},
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::{MeshFile, Protocol},
    payload::Source,
    poll,
    tap::Tap,
    topology::{Family, Pod, Topology},
};

/// One destination for each way that a connection of a1 can take, with its name.
fn destinations(topology: &Topology) -> [(&'static str, &Pod); 3] {
    [
        ("to the other node", &topology.b1),
        ("on the same node", &topology.a2),
        ("out of the mesh", &topology.x),
    ]
}

#[test]
fn a_client_that_ends_its_direction_still_gets_the_reply() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for (way, to) in destinations(&topology) {
        let app = App::start(&to.netns, Behaviour::Sink).unwrap();
        for family in Family::BOTH {
            let address = to.at(family, app.port());
            let report =
                topology.a1.netns.run(|| client::upload(&mut client::dial(address)?, 1000));
            assert_eq!(report.unwrap(), Source::digest(1000).report(), "{way} by {family:?}");
        }
    }
}

#[test]
fn an_app_that_ends_its_direction_still_reads() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for (way, to) in destinations(&topology) {
        let app = App::start(&to.netns, Behaviour::HalfClose).unwrap();
        for (count, family) in Family::BOTH.into_iter().enumerate() {
            let address = to.at(family, app.port());
            let greeting = topology.a1.netns.run(|| {
                let mut stream = client::dial(address)?;
                let mut greeting = Vec::new();
                // The end of the app's direction is the end of this read.
                stream.read_to_end(&mut greeting)?;
                stream.write_all(b"after the end")?;
                stream.shutdown(Shutdown::Write)?;
                std::io::Result::Ok(greeting)
            });
            assert_eq!(greeting.unwrap(), GREETING, "{way} by {family:?}");
            let seen = app.ended(count + 1)[count];
            assert_eq!((seen.read, seen.end), (13, Some(End::Eof)), "{way} by {family:?}");
        }
    }
}

#[test]
fn a_reset_by_the_app_resets_the_client() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for (way, to) in destinations(&topology) {
        let app = App::start(&to.netns, Behaviour::ResetAfterRead).unwrap();
        for family in Family::BOTH {
            let address = to.at(family, app.port());
            let end = topology.a1.netns.run(|| {
                let mut stream = client::dial(address)?;
                stream.write_all(b"x")?;
                client::next_event(&mut stream)
            });
            let kind = end.as_ref().map_err(std::io::Error::kind);
            assert_eq!(
                kind.err(),
                Some(ErrorKind::ConnectionReset),
                "{way} by {family:?}: {end:?}"
            );
        }
    }
}

#[test]
fn a_reset_by_the_client_resets_the_app() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for (way, to) in destinations(&topology) {
        let app = App::start(&to.netns, Behaviour::Echo).unwrap();
        for (count, family) in Family::BOTH.into_iter().enumerate() {
            let address = to.at(family, app.port());
            topology
                .a1
                .netns
                .run(|| {
                    let mut stream = client::dial(address)?;
                    client::ping(&mut stream, b"hello")?;
                    client::reset(stream)
                })
                .unwrap();
            let seen = app.ended(count + 1)[count];
            assert_eq!(seen.end, Some(End::Reset), "{way} by {family:?}");
        }
    }
}

#[test]
fn whoever_closes_first_no_packet_escapes_and_no_socket_lingers() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (from, to) = (&topology.a1, &topology.b1);
    let taps = [from, to].map(|pod| Tap::start(&pod.netns, "eth0", &[]).unwrap());

    // The listening app closes first.
    let app = App::start(&to.netns, Behaviour::CloseFirst).unwrap();
    for round in 0..50 {
        let address = to.at(Family::BOTH[round % 2], app.port());
        let reply = from.netns.run(|| {
            let mut stream = client::dial(address)?;
            stream.write_all(b"bye")?;
            let mut reply = Vec::new();
            stream.read_to_end(&mut reply).map(|_| reply)
        });
        assert_eq!(reply.unwrap(), b"bye", "round {round}");
    }
    // The connecting app closes first.
    let app = App::start(&to.netns, Behaviour::Echo).unwrap();
    for round in 0..50 {
        let address = to.at(Family::BOTH[round % 2], app.port());
        from.netns
            .run(|| client::ping(&mut client::dial(address)?, b"bye"))
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
    app.ended(50);
    poll::until(poll::SOON, "both nodes to finish 100 flows", || {
        (mesh.a.flows().len() >= 100 && mesh.b.flows().len() >= 100).then_some(())
    });

    for (pod, tap) in [from, to].into_iter().zip(taps) {
        let left = poll::within(poll::SOON, || {
            (pod.netns.run(|| client::sockets_in_state(LAST_ACK)) == 0).then_some(())
        });
        assert!(left.is_some(), "{}: sockets stay in LAST_ACK", pod.name);
        let report = tap.stop();
        assert_eq!(report.plaintext().count(), 0, "{}: {:?}", pod.name, report.plaintext().next());
    }
}

#[test]
fn an_app_that_is_not_there_is_an_error_to_the_client() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let port = App::start(&topology.b1.netns, Behaviour::Echo).unwrap().port();
    for family in Family::BOTH {
        let address = topology.b1.at(family, port);
        let (reply, took) =
            poll::timed(|| topology.a1.netns.run(|| client::exchange(address, b"anyone?")));
        assert!(reply.is_err(), "{family:?}: {reply:?}");
        // A refusal is known at once; the dial's deadline must not be what ends it.
        assert!(took < poll::patient(Duration::from_secs(3)), "{family:?}: {took:?}");
        mesh.b.flow("the refusal by the app", |flow| {
            flow.goes(Direction::Inbound)
                && flow.is("dst.hbone_addr", &address.to_string())
                && flow.error().is_some()
        });
        mesh.a.flow("the status that says so", |flow| {
            flow.goes(Direction::Outbound)
                && flow.is("dst.hbone_addr", &address.to_string())
                && flow.error().is_some_and(|error| error.contains("503"))
        });
    }
}

#[test]
fn a_peer_that_cannot_be_reached_is_an_error_within_the_deadline() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (x, node) = (&topology.x, &topology.b);
    let file = MeshFile::new(&topology).workload(x, node, Protocol::Hbone);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    // Both at once, as each takes as long as the deadline.
    let dials = Family::BOTH.map(|family| {
        // Without any answer, not even an ICMP one.
        node.netns.ip(&format!("route replace blackhole {}\n", x.ip(family))).unwrap();
        let address = x.at(family, 8080);
        let dial = move || poll::timed(|| client::exchange(address, b"anyone?"));
        (address, topology.a1.netns.start(dial))
    });
    for (address, dial) in dials {
        let (reply, took) = dial.join().unwrap();
        assert!(reply.is_err(), "{address}: {reply:?}");
        assert!(took < poll::patient(Duration::from_secs(15)), "{address}: {took:?}");
        mesh.a.flow("the dial that timed out", |flow| {
            flow.goes(Direction::Outbound)
                && flow.is("dst.hbone_addr", &address.to_string())
                && flow.error().is_some()
        });
    }
}
