//! What `--when-down` promises: what becomes of connections after the proxy was killed, and once it is back. Holding
//! them is the default, and most of `restart` is about it.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::MeshFile,
    poll,
    tap::{HBONE_PORT, Tap},
    topology::{Family, Pod, Topology},
};

use crate::talk::{await_filters, carried, talks};

/// Long enough for whatever is refused or connected at once, too short for a SYN that is sent again.
const AT_ONCE: Duration = Duration::from_millis(700);

fn dial(from: &Pod, to: SocketAddr, within: Duration) -> Result<(), ErrorKind> {
    let dialled = from.netns.run(|| client::dial_within(to, within));
    dialled.map(drop).map_err(|error: io::Error| error.kind())
}

/// Kills the proxy and waits until the kernel has taken away what was the process's own.
fn kill(mesh: &mut Mesh<'_>, outside: &Pod, inside: SocketAddr, wanted: Result<(), ErrorKind>) {
    mesh.a.kill();
    poll::until(poll::SOON, "the kernel to notice that the proxy is dead", || {
        (dial(outside, inside, AT_ONCE) == wanted).then_some(())
    });
}

#[test]
fn refuse_answers_at_once_and_lets_nothing_out() {
    let Some(topology) = Topology::with_culvert() else { return };
    let more = ["--when-down", "refuse"];
    let file = MeshFile::new(&topology);
    let mut mesh = Mesh::start_with(&topology, &file, Remains::Pins, &more).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let apps = [a1, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1, on_x] = apps.each_ref().map(App::port);
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();

    kill(&mut mesh, x, a1.at(Family::V4, on_a1), Err(ErrorKind::ConnectionRefused));
    for family in Family::BOTH {
        for port in [on_a1, HBONE_PORT] {
            let to = a1.at(family, port);
            assert_eq!(dial(x, to, AT_ONCE), Err(ErrorKind::ConnectionRefused), "x -> {to}");
        }
        // The kernel refuses in the name of the pod alone, which over IPv6 is nobody's concern.
        let wanted = match family {
            Family::V4 => ErrorKind::TimedOut,
            Family::V6 => ErrorKind::ConnectionRefused,
        };
        for to in [b1.at(family, on_b1), x.at(family, on_x)] {
            assert_eq!(dial(a1, to, AT_ONCE), Err(wanted), "a1 -> {to}");
        }
    }
    let own = Family::BOTH.map(|family| a1.ip(family));
    let opened = |segment: &&culvert_tests::tap::Segment| {
        segment.opens() && own.contains(&segment.src.ip()) && !segment.has_port(HBONE_PORT)
    };
    assert_eq!(eth0.stop().segments.iter().find(opened), None, "a SYN left the pod");
    assert!(apps.iter().all(|app| app.seen().is_empty()));

    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    for family in Family::BOTH {
        talks(a1, b1.at(family, on_b1), "captured again");
        talks(x, a1.at(family, on_a1), "captured again");
    }
}

#[test]
fn open_lets_connections_around_a_dead_proxy_and_captures_again_after() {
    let Some(topology) = Topology::with_culvert() else { return };
    let more = ["--when-down", "open"];
    let file = MeshFile::new(&topology);
    let mut mesh = Mesh::start_with(&topology, &file, Remains::Pins, &more).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let apps = [a1, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1, on_x] = apps.each_ref().map(App::port);

    for round in 0..2 {
        for family in Family::BOTH {
            let since = mesh.a.flows().len();
            talks(a1, b1.at(family, on_b1), "captured");
            carried(&mesh.a, since, Direction::Outbound, b1.at(family, on_b1));
            talks(x, a1.at(family, on_a1), "captured");
            carried(&mesh.a, since, Direction::Inbound, a1.at(family, on_a1));
        }
        let logged = mesh.a.flows().len();
        mesh.a.kill();
        poll::until(poll::SOON, "the kernel to notice that the proxy is dead", || {
            dial(a1, x.at(Family::V4, on_x), AT_ONCE).ok()
        });
        let mut kept = Vec::new();
        for family in Family::BOTH {
            talks(a1, x.at(family, on_x), "around the proxy");
            // Its own proxy lives, and takes it for one from outside of the mesh.
            talks(a1, b1.at(family, on_b1), "around the proxy");
            talks(x, a1.at(family, on_a1), "around the proxy");
            // Of a pod that speaks HBONE, its proxy takes nothing less.
            let reply = b1.netns.run(|| client::exchange(a1.at(family, on_a1), b"in plaintext?"));
            assert!(reply.is_err(), "b1 reached a1 around the proxy of a");
            let hbone = a1.at(family, HBONE_PORT);
            assert_eq!(dial(x, hbone, AT_ONCE), Err(ErrorKind::ConnectionRefused), "{hbone}");
            let stream = a1.netns.run(|| client::dial(x.at(family, on_x))).unwrap();
            kept.push(stream);
            kept.push(x.netns.run(|| client::dial(a1.at(family, on_a1))).unwrap());
        }
        mesh.a.launch().unwrap();
        mesh.a.wait_ready().unwrap();
        assert_eq!(mesh.a.flows().len(), logged, "round {round}");
        for mut stream in kept {
            let reply = client::ping(&mut stream, b"still around it").unwrap();
            assert_eq!(reply, b"still around it", "round {round}");
        }
    }
}

#[test]
fn open_impostors_on_the_hbone_port_hear_nothing() {
    let Some(topology) = Topology::with_culvert() else { return };
    let more = ["--when-down", "open"];
    let file = MeshFile::new(&topology);
    let mut mesh = Mesh::start_with(&topology, &file, Remains::Pins, &more).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let impostor = App::start_on(&a1.netns, HBONE_PORT, Behaviour::Echo).unwrap();
    kill(&mut mesh, x, a1.at(Family::V4, app.port()), Ok(()));
    for family in Family::BOTH {
        let hbone = a1.at(family, HBONE_PORT);
        assert_eq!(dial(x, hbone, AT_ONCE), Err(ErrorKind::ConnectionRefused), "{hbone}");
    }
    assert_eq!(impostor.seen().len(), 0);
}

#[test]
fn a_proxy_that_is_stopped_opens_as_one_that_was_killed() {
    let Some(topology) = Topology::with_culvert() else { return };
    let more = ["--when-down", "open"];
    let file = MeshFile::new(&topology);
    let mut mesh = Mesh::start_with(&topology, &file, Remains::Pins, &more).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let inside = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let outside = App::start(&x.netns, Behaviour::Echo).unwrap();
    assert_eq!(mesh.a.terminate(Duration::from_secs(10)).unwrap().code(), Some(0));
    for family in Family::BOTH {
        talks(a1, x.at(family, outside.port()), "around a proxy that was stopped");
        talks(x, a1.at(family, inside.port()), "around a proxy that was stopped");
    }
}

#[test]
fn another_start_may_want_something_else() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    let (a1, x) = (&topology.a1, &topology.x);
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    let outside = App::start(&x.netns, Behaviour::Echo).unwrap();
    let held = Err(ErrorKind::TimedOut);
    for (when_down, filters, v4, v6) in [
        ("open", &["guard"][..], Ok(()), Ok(())),
        (
            "refuse",
            &["guard"],
            Err(ErrorKind::ConnectionRefused),
            Err(ErrorKind::ConnectionRefused),
        ),
        ("hold", &["guard", "hold_in"], held, held),
        ("open", &["guard"], Ok(()), Ok(())),
        ("hold", &["guard", "hold_in"], held, held),
    ] {
        mesh.a.kill();
        mesh.a.set_flag("--when-down", when_down);
        mesh.a.launch().unwrap();
        mesh.a.wait_ready().unwrap();
        await_filters(&a1.netns, "eth0", filters);
        for family in Family::BOTH {
            talks(a1, x.at(family, outside.port()), when_down);
        }
        kill(&mut mesh, x, a1.at(Family::V4, app.port()), v4);
        assert_eq!(dial(x, a1.at(Family::V6, app.port()), AT_ONCE), v6, "{when_down}");
        let out = dial(a1, x.at(Family::V4, outside.port()), AT_ONCE);
        assert_eq!(out.is_ok(), when_down == "open", "{when_down}: {out:?}");
    }
}
