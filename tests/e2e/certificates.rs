//! Certificates in the life of a node: rotation under load, revocation, trust domains.

use std::{collections::BTreeSet, net::SocketAddr, thread};

use culvert_tests::{
    apps::{App, Behaviour},
    ca::Validity,
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    hbone::{Answer, Peer},
    load::Load,
    mesh_file::{MeshFile, replace},
    poll,
    process::finish,
    tap::HBONE_PORT,
    topology::{Family, Topology},
};

use crate::third_party::{have_python, python_command};

const FRIEND: &str = "spiffe://cluster.local/ns/friends/sa/peer";

/// How many different tunnels the node's deliveries came by.
fn tunnels(mesh: &Mesh<'_>) -> usize {
    let flows = mesh.b.flows();
    let inbound = flows.iter().filter(|flow| flow.goes(Direction::Inbound));
    inbound.filter_map(|flow| flow.field("src.addr")).collect::<BTreeSet<_>>().len()
}

#[test]
fn rotation_under_load_fails_no_connection_and_leaves_long_ones_alone() {
    let Some(topology) = Topology::with_culvert() else { return };
    let file = MeshFile::new(&topology);
    let mesh =
        Mesh::start_with(&topology, &file, Remains::Nothing, &["--secret-ttl", "10s"]).unwrap();
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let to = Family::BOTH.map(|family| b1.at(family, app.port()));
    let mut long = a1.netns.run(|| client::dial(to[0])).unwrap();
    assert_eq!(client::ping(&mut long, b"before").unwrap(), b"before");
    let load = Load::start(&a1.netns, &to, 4);
    // Two families, each with tunnels under three certificates at least.
    poll::until(poll::SOON * 6, "tunnels under the third certificate", || {
        (tunnels(&mesh) >= 6).then_some(())
    });
    let tally = load.stop();
    assert_eq!(tally.failed(), 0, "of {}: {:#?}", tally.total(), tally.notes);
    assert_eq!(client::ping(&mut long, b"after").unwrap(), b"after");
    assert_eq!(client::converse(&mut long, b"the end").unwrap(), b"the end");
    for flow in mesh.a.flows().into_iter().chain(mesh.b.flows()) {
        assert_eq!(flow.error(), None, "{flow:?}");
    }
}

#[test]
fn a_revoked_peer_is_cut_off_where_it_is_connected_and_gets_in_no_more() {
    if !have_python() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let lists = topology.dir().join("crl.pem");
    let more = ["--crl", lists.to_str().unwrap()];
    let file = MeshFile::new(&topology);
    let mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &more).unwrap();
    let (x, b1) = (&topology.x, &topology.b1);
    let [revoked, good] = [(); 2].map(|()| mesh.ca.issue(FRIEND, Validity::Current).unwrap());
    // It answers at the end of the stream only, which Python waits for the answer to send.
    let silent = App::start(&b1.netns, Behaviour::Sink).unwrap();
    let to = b1.at(Family::V4, silent.port());
    let mut command = python_command(&topology, &mesh.ca, &revoked, b1.ip(Family::V4), to, "end");
    let finished = thread::scope(|scope| {
        let python = scope.spawn(|| finish(&x.netns, &mut command, poll::SOON * 4).unwrap());
        poll::until(poll::SOON, "Python's tunnel", || {
            let metrics = mesh.b.metrics().ok()?;
            let to_b1 = [("reporter", "destination")];
            (metrics.sum("istio_tcp_received_bytes_total", &to_b1) > 0.0).then_some(())
        });
        replace(&lists, &mesh.ca.revoke(&[&revoked]).unwrap()).unwrap();
        python.join().unwrap()
    });
    assert!(finished.stdout.ends_with("status 200\n"), "{}", finished.stdout);
    assert_ne!(finished.code, 0, "{}", finished.stdout);
    mesh.b.flow("the tunnel that was cut", |flow| {
        flow.goes(Direction::Inbound)
            && flow.error().is_some_and(|error| error == "peer certificate revoked by CRL")
    });

    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let connect = |leaf| {
        let peer = Peer::new(&mesh.ca, Some(leaf)).unwrap();
        let to: SocketAddr = b1.at(Family::V6, HBONE_PORT);
        let authority = b1.at(Family::V6, app.port()).to_string();
        x.netns.run(|| peer.connect(to, &authority, b"again")).unwrap()
    };
    assert!(matches!(connect(&revoked), Answer::Closed(_)));
    assert_eq!(connect(&good), Answer::Status(200, b"again".to_vec()));
    assert_eq!(app.seen().len(), 1);
}

#[test]
fn a_peer_of_another_trust_domain_is_let_in_where_that_is_an_alias() {
    let Some(topology) = Topology::with_culvert() else { return };
    let more = ["--trust-domain-alias", "old.example"];
    let file = MeshFile::new(&topology);
    let mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &more).unwrap();
    let b1 = &topology.b1;
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    for (domain, status) in [("old.example", Some(200)), ("other.example", None)] {
        let spiffe = format!("spiffe://{domain}/ns/friends/sa/peer");
        let leaf = mesh.ca.issue(&spiffe, Validity::Current).unwrap();
        let peer = Peer::new(&mesh.ca, Some(&leaf)).unwrap();
        let to = b1.at(Family::V4, HBONE_PORT);
        let authority = b1.at(Family::V4, app.port()).to_string();
        let answer = topology.x.netns.run(|| peer.connect(to, &authority, b"hello")).unwrap();
        assert_eq!(answer.status(), status, "{domain}: {answer:?}");
    }
}

#[test]
fn a_mesh_of_post_quantum_nodes_talks() {
    let Some(topology) = Topology::with_culvert() else { return };
    let more = ["--compliance-policy", "pqc"];
    let file = MeshFile::new(&topology);
    let mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &more).unwrap();
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    for family in Family::BOTH {
        let to = topology.b1.at(family, app.port());
        crate::talk::talks(&topology.a1, to, "post-quantum");
        crate::talk::carried(&mesh.a, 0, Direction::Outbound, to);
    }
}
