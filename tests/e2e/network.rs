//! The network and the tools by themselves, without culvert: what every other scenario takes for granted.

use std::io::Write as _;

use culvert_tests::{
    apps::{App, Behaviour, End, GREETING},
    ca::{Ca, Validity},
    client,
    hbone::{Answer, Peer},
    http,
    payload::Source,
    poll, require,
    tap::{Tap, WIRE},
    topology::{Family, Topology},
};

#[test]
fn every_pod_reaches_every_pod_and_the_wire_is_seen_once() {
    if !require::netns() {
        return;
    }
    let topology = Topology::build().unwrap();
    let tap = Tap::start(&topology.wire, WIRE, &[b"needle in the hay"]).unwrap();
    for to in topology.pods() {
        let app = App::start(&to.netns, Behaviour::Echo).unwrap();
        for from in topology.pods() {
            for family in Family::BOTH {
                let address = to.at(family, app.port());
                let reply = from.netns.run(|| client::exchange(address, b"needle in the hay"));
                let (from, to) = (from.name, to.name);
                assert_eq!(reply.unwrap(), b"needle in the hay", "{from} -> {to} by {family:?}");
            }
        }
    }
    let report = tap.stop();
    assert_eq!(report.missed, 0);
    // Of 16 pairs 8 are on different nodes; each connection has one SYN and carries the needle there and back.
    assert_eq!(report.segments.iter().filter(|segment| segment.opens()).count(), 16);
    assert_eq!(report.needles().count(), 32);
}

#[test]
fn apps_and_clients_see_how_the_other_end_behaves() {
    if !require::netns() {
        return;
    }
    let topology = Topology::build().unwrap();
    let (server, from) = (&topology.b1, &topology.a1);
    let address = |app: &App| server.at(Family::V6, app.port());

    let app = App::start(&server.netns, Behaviour::ServerFirst).unwrap();
    let greeting = from.netns.run(|| client::next_event(&mut client::dial(address(&app))?));
    assert_eq!(greeting.unwrap(), GREETING);

    let app = App::start(&server.netns, Behaviour::ResetAfterRead).unwrap();
    let error = from.netns.run(|| {
        let mut stream = client::dial(address(&app))?;
        stream.write_all(b"x")?;
        client::next_event(&mut stream)
    });
    assert_eq!(error.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    let app = App::start(&server.netns, Behaviour::Echo).unwrap();
    from.netns
        .run(|| {
            let mut stream = client::dial(address(&app))?;
            client::ping(&mut stream, b"hello")?;
            client::reset(stream)
        })
        .unwrap();
    let seen = app.ended(1);
    assert_eq!((seen[0].end, seen[0].read), (Some(End::Reset), 5));
    assert_eq!(seen[0].peer.ip(), from.ip(Family::V6));

    let app = App::start(&server.netns, Behaviour::Sink).unwrap();
    let report = from.netns.run(|| client::upload(&mut client::dial(address(&app))?, 1 << 20));
    assert_eq!(report.unwrap(), Source::digest(1 << 20).report());

    let app = App::start(&server.netns, Behaviour::Source(1 << 20)).unwrap();
    let digest = from.netns.run(|| client::download(&mut client::dial(address(&app))?));
    assert_eq!(digest.unwrap().report(), Source::digest(1 << 20).report());

    let app = App::start(&server.netns, Behaviour::Http("hello".to_owned())).unwrap();
    let reply = from.netns.run(|| http::request("GET", address(&app), "/there")).unwrap();
    assert_eq!(
        (reply.status, reply.body),
        (200, "hello: GET /there for fd00:244:1::b\n".to_owned())
    );
}

#[test]
fn the_tap_tells_tls_from_anything_else() {
    if !require::netns() {
        return;
    }
    let topology = Topology::build().unwrap();
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let tap = Tap::start(&topology.wire, WIRE, &[]).unwrap();
    let app = App::start_on(&topology.b1.netns, 15008, Behaviour::Echo).unwrap();
    let to = topology.b1.at(Family::V4, app.port());

    // The app echoes the ClientHello, which is a record, though not the one that the peer expects.
    let leaf = ca.issue(&topology.a1.identity(), Validity::Current).unwrap();
    let peer = Peer::new(&ca, Some(&leaf)).unwrap();
    let answer = topology.a1.netns.run(|| peer.connect(to, "10.0.0.9:80", b"")).unwrap();
    assert!(matches!(answer, Answer::Closed(_)), "{answer:?}");
    poll::until(poll::SOON, "TLS records on the wire", || {
        (tap.look().tls_records() >= 2).then_some(())
    });
    assert_eq!(tap.look().not_tls(), Vec::<String>::new());

    topology.a1.netns.run(|| client::exchange(to, b"GET / HTTP/1.1\r\n\r\n")).unwrap();
    assert_eq!(tap.stop().not_tls().len(), 2);
}
