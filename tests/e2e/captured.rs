//! Connections between captured pods: carried by HBONE, with both identities, whatever socket the app uses.

use culvert_tests::{
    apps::{App, Behaviour, GREETING},
    client,
    culvert::{Culvert, Mesh, Remains},
    flow_log::Direction,
    mesh_file::{MeshFile, VIP_PORT, VIP_V4, VIP_V6},
    poll,
    tap::{Tap, WIRE},
    topology::{Family, Pod, Topology},
};

const NEEDLE: &[u8] = b"the needle that must not be seen";

/// Both ends of one connection are in the node's log, with the identities that mutual TLS proved.
#[track_caller]
fn carried_with_identities(culvert: &Culvert<'_>, direction: Direction, from: &Pod, to: &Pod) {
    let identities = (from.identity(), to.identity());
    culvert.flow(&format!("{direction:?} {} -> {} by mutual TLS", from.name, to.name), |flow| {
        flow.goes(direction)
            && flow.error().is_none()
            && flow.identities().as_ref() == Some(&identities)
    });
}

#[test]
fn a_captured_pod_reaches_one_on_the_other_node_and_the_wire_carries_only_tls() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (from, to) = (&topology.a1, &topology.b1);
    let app = App::start(&to.netns, Behaviour::Echo).unwrap();
    let wire = Tap::start(&topology.wire, WIRE, &[NEEDLE]).unwrap();

    for family in Family::BOTH {
        let address = to.at(family, app.port());
        let reply = from.netns.run(|| client::exchange(address, NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{family:?}");
    }

    carried_with_identities(&mesh.a, Direction::Outbound, from, to);
    carried_with_identities(&mesh.b, Direction::Inbound, from, to);
    for (node, reporter) in [(&mesh.a, "source"), (&mesh.b, "destination")] {
        let (source, destination) = (from.identity(), to.identity());
        let labels = [
            ("reporter", reporter),
            ("source_principal", source.as_str()),
            ("destination_principal", destination.as_str()),
            ("connection_security_policy", "mutual_tls"),
        ];
        poll::until(
            poll::SOON,
            &format!("both connections in the metrics of the {reporter}"),
            || {
                let metrics = node.metrics().ok()?;
                let twice = |name| (metrics.sum(name, &labels) - 2.0).abs() < f64::EPSILON;
                (twice("istio_tcp_connections_opened_total")
                    && twice("istio_tcp_connections_closed_total"))
                .then_some(())
            },
        );
    }
    let report = wire.stop();
    assert_eq!(report.missed, 0);
    assert_eq!(report.plaintext().count(), 0);
    assert_eq!(report.needles().count(), 0);
    assert_eq!(report.not_tls(), Vec::<String>::new());
    assert!(report.tls_records() > 0);
}

#[test]
fn captured_pods_on_one_node_speak_with_identities_and_nothing_leaves_the_pod_in_plaintext() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (from, to) = (&topology.a1, &topology.a2);
    let app = App::start(&to.netns, Behaviour::Echo).unwrap();
    let wire = Tap::start(&topology.wire, WIRE, &[]).unwrap();
    let eth0 = Tap::start(&from.netns, "eth0", &[NEEDLE]).unwrap();

    for family in Family::BOTH {
        let address = to.at(family, app.port());
        let reply = from.netns.run(|| client::exchange(address, NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{family:?}");
    }

    carried_with_identities(&mesh.a, Direction::Outbound, from, to);
    assert_eq!(wire.stop().segments, []);
    let report = eth0.stop();
    assert_eq!((report.plaintext().count(), report.needles().count()), (0, 0));
}

#[test]
fn a_service_address_reaches_the_pod_behind_it() {
    let Some(topology) = Topology::with_culvert() else { return };
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let file = MeshFile::new(&topology).service(&topology.b1, app.port());
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();

    for vip in [VIP_V4, VIP_V6] {
        let address = format!("{vip}:{VIP_PORT}").parse();
        let address = address.or_else(|_| format!("[{vip}]:{VIP_PORT}").parse()).unwrap();
        let reply = topology.a1.netns.run(|| client::exchange(address, b"to the service"));
        assert_eq!(reply.unwrap(), b"to the service", "{vip}");
    }
    carried_with_identities(&mesh.a, Direction::Outbound, &topology.a1, &topology.b1);
    mesh.a
        .flow("the service's name", |flow| flow.is("dst.service", "ledger.bank.svc.cluster.local"));
}

#[test]
fn ipv4_ipv6_and_v4_mapped_sockets_are_all_captured() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let to = &topology.b1;
    let app = App::start(&to.netns, Behaviour::Echo).unwrap();
    let wire = Tap::start(&topology.wire, WIRE, &[NEEDLE]).unwrap();
    let port = app.port();

    let streams = topology.a1.netns.run(|| {
        [
            ("IPv4", client::dial(to.at(Family::V4, port))),
            ("IPv6", client::dial(to.at(Family::V6, port))),
            ("v4-mapped", client::dial_mapped(to.at(Family::V4, port))),
        ]
    });
    for (kind, stream) in streams {
        let reply = stream.and_then(|mut stream| client::converse(&mut stream, NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{kind}");
    }

    carried_with_identities(&mesh.b, Direction::Inbound, &topology.a1, to);
    assert_eq!(wire.stop().plaintext().count(), 0);
}

#[test]
fn an_app_that_speaks_first_is_heard() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for to in [&topology.b1, &topology.a2, &topology.x] {
        let app = App::start(&to.netns, Behaviour::ServerFirst).unwrap();
        for family in Family::BOTH {
            let address = to.at(family, app.port());
            let greeting =
                topology.a1.netns.run(|| client::next_event(&mut client::dial(address)?));
            assert_eq!(greeting.unwrap(), GREETING, "{} by {family:?}", to.name);
        }
    }
}

#[test]
fn the_app_sees_the_address_of_the_client() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    for (count, (from, family)) in [&topology.a1, &topology.x]
        .into_iter()
        .flat_map(|from| Family::BOTH.map(|family| (from, family)))
        .enumerate()
    {
        let address = topology.b1.at(family, app.port());
        from.netns.run(|| client::exchange(address, b"who am I?")).unwrap();
        let seen = app.ended(count + 1);
        assert_eq!(seen[count].peer.ip(), from.ip(family), "{} by {family:?}", from.name);
    }
}

#[test]
fn a_socket_bound_to_its_interface_is_captured_too() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let eth0 = Tap::start(&topology.a1.netns, "eth0", &[NEEDLE]).unwrap();
    for family in Family::BOTH {
        let address = topology.b1.at(family, app.port());
        let reply = topology
            .a1
            .netns
            .run(|| client::converse(&mut client::dial_through("eth0", address)?, NEEDLE));
        assert_eq!(reply.unwrap(), NEEDLE, "{family:?}");
    }
    assert_eq!(eth0.stop().plaintext().count(), 0);
}
