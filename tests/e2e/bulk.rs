//! Much data and many connections.

use std::{
    sync::{Arc, Barrier},
    thread,
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    mesh_file::MeshFile,
    payload::Source,
    topology::{Family, Topology},
};

const BULK: usize = 100 << 20;

#[test]
fn a_hundred_mebibytes_arrive_whole_in_both_directions() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (from, to) = (&topology.a1, &topology.b1);
    let sink = App::start(&to.netns, Behaviour::Sink).unwrap();
    let source = App::start(&to.netns, Behaviour::Source(BULK)).unwrap();
    let want = Source::digest(BULK).report();
    for family in Family::BOTH {
        let address = to.at(family, sink.port());
        let report = from.netns.run(|| client::upload(&mut client::dial(address)?, BULK));
        assert_eq!(report.unwrap(), want, "upload by {family:?}");
        let address = to.at(family, source.port());
        let digest = from.netns.run(|| client::download(&mut client::dial(address)?));
        assert_eq!(digest.unwrap().report(), want, "download by {family:?}");
    }
}

#[test]
fn five_hundred_connections_are_open_at_once() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let open = Arc::new(Barrier::new(500));
    let clients: Vec<_> = (0..500)
        .map(|number| {
            let address = topology.b1.at(Family::BOTH[number % 2], app.port());
            let open = Arc::clone(&open);
            topology.a1.netns.start(move || {
                let text = format!("connection {number}");
                let first = client::dial(address).and_then(|mut stream| {
                    client::ping(&mut stream, text.as_bytes()).map(|reply| (stream, reply))
                });
                // Also a client that failed must let the others go on.
                open.wait();
                let (mut stream, reply) = first?;
                assert_eq!(reply, text.as_bytes());
                client::converse(&mut stream, text.as_bytes()).map(|reply| (text, reply))
            })
        })
        .collect();
    let replies = clients.into_iter().map(thread::JoinHandle::join);
    for (number, reply) in replies.enumerate() {
        let (text, reply) = reply.unwrap().unwrap_or_else(|e| panic!("connection {number}: {e}"));
        assert_eq!(reply, text.as_bytes());
    }
    assert_eq!(app.seen().len(), 500);
}
