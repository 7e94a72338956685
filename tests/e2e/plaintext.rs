//! Connections with one end outside the mesh: carried as they are, and judged by policy where they come in.

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::{Action, MeshFile, Policy},
    tap::{Tap, WIRE},
    topology::{Family, Topology},
};

const NEEDLE: &[u8] = b"readable by anyone on the way";

#[test]
fn a_captured_pod_reaches_one_outside_the_mesh_in_plaintext() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&topology.x.netns, Behaviour::Echo).unwrap();
    let wire = Tap::start(&topology.wire, WIRE, &[NEEDLE]).unwrap();

    for family in Family::BOTH {
        let address = topology.x.at(family, app.port());
        let reply = topology.a1.netns.run(|| client::exchange(address, NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{family:?}");
        mesh.a.flow("the passthrough", |flow| {
            flow.goes(Direction::Outbound)
                && flow.is("dst.addr", &address.to_string())
                && flow.error().is_none()
                && flow.identities().is_none()
        });
    }
    let report = wire.stop();
    assert_eq!(report.needles().count(), 4, "there and back, by both families");
    assert_eq!(report.hbone().count(), 0);
}

#[test]
fn a_pod_outside_the_mesh_reaches_a_captured_one_where_policy_allows_it() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (x, b1) = (&topology.x, &topology.b1);
    let open = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let closed = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let policy = Policy::new("closed-port", "bank", Action::Deny).port(closed.port());
    let file = MeshFile::new(&topology).policy(&policy);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();

    for family in Family::BOTH {
        let reply = x.netns.run(|| client::exchange(b1.at(family, open.port()), NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{family:?}");

        let address = b1.at(family, closed.port());
        let refused = x.netns.run(|| client::exchange(address, NEEDLE));
        assert!(!refused.is_ok_and(|reply| !reply.is_empty()), "{family:?} came through");
        mesh.b.flow("the denial", |flow| {
            flow.goes(Direction::Inbound)
                && flow.is("dst.addr", &address.to_string())
                && flow.error().is_some_and(|error| error.contains("bank/closed-port"))
        });
    }
    assert_eq!(closed.seen().len(), 0);
}

#[test]
fn an_allow_policy_for_identities_keeps_plaintext_out() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, x, b1) = (&topology.a1, &topology.x, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let policy = Policy::new("mesh-only", "bank", Action::Allow).any_principal();
    let file = MeshFile::new(&topology).policy(&policy);
    let _mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();

    for family in Family::BOTH {
        let address = b1.at(family, app.port());
        let refused = x.netns.run(|| client::exchange(address, NEEDLE));
        assert!(!refused.is_ok_and(|reply| !reply.is_empty()), "{family:?} came through");
        let reply = a1.netns.run(|| client::exchange(address, NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{family:?}");
    }
    assert_eq!(app.seen().len(), 2);
}

#[test]
fn connections_inside_a_pod_stay_inside() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let a1 = &topology.a1;
    let app = App::start(&a1.netns, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        let loopback: std::net::IpAddr = match family {
            Family::V4 => std::net::Ipv4Addr::LOCALHOST.into(),
            Family::V6 => std::net::Ipv6Addr::LOCALHOST.into(),
        };
        for ip in [loopback, a1.ip(family)] {
            let reply = a1.netns.run(|| client::exchange((ip, app.port()).into(), b"myself"));
            assert_eq!(reply.unwrap(), b"myself", "{ip}");
        }
        let (from, to) = ((loopback, 0).into(), a1.at(family, app.port()));
        let mut stream = a1.netns.run(|| client::dial_from(from, to)).unwrap();
        assert_eq!(
            client::converse(&mut stream, b"myself").unwrap(),
            b"myself",
            "{loopback} -> {to}"
        );
    }
    // A connection that is carried, so that the log is known to be complete up to it.
    let outside = App::start(&topology.x.netns, Behaviour::Echo).unwrap();
    let address = topology.x.at(Family::V4, outside.port());
    a1.netns.run(|| client::exchange(address, b"out")).unwrap();
    mesh.a.flow("the carried one", |flow| flow.is("dst.addr", &address.to_string()));
    assert_eq!(mesh.a.flows().len(), 1);
}
