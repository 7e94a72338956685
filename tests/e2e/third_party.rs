//! Peers that share no code with culvert or this harness: Python's h2 as a client, nghttpx as a server.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    process::Command,
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    ca::{Ca, Leaf, Validity},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::{MeshFile, Protocol},
    poll,
    process::{Finished, Process, finish},
    require,
    tap::HBONE_PORT,
    topology::{Family, Pod, Topology},
};

/// Debian's python3-h2 belongs to Debian's interpreter, which another one may hide.
const PYTHON: &str = "/usr/bin/python3";

/// CONNECT by way of `to`'s HBONE port, by Python in pod x, with an identity of the mesh.
fn python(
    topology: &Topology,
    ca: &Ca,
    to: &Pod,
    family: Family,
    authority: SocketAddr,
    then: &str,
) -> Finished {
    let leaf = ca.issue("spiffe://cluster.local/ns/friends/sa/python", Validity::Current).unwrap();
    let mut command = python_command(topology, ca, &leaf, to.ip(family), authority, then);
    finish(&topology.x.netns, &mut command, poll::SOON * 2).unwrap()
}

/// The same as a command, with `leaf` as its certificate.
pub(crate) fn python_command(
    topology: &Topology,
    ca: &Ca,
    leaf: &Leaf,
    to: IpAddr,
    authority: SocketAddr,
    then: &str,
) -> Command {
    let (cert, key) = leaf.write(topology.dir(), "python").unwrap();
    let mut command = Command::new(PYTHON);
    command
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/connect.py"))
        .args([to.to_string(), HBONE_PORT.to_string(), authority.to_string()])
        .args([&ca.dir().join("ca.pem"), &cert, &key])
        .args(["hello from python", then]);
    command
}

/// nghttpx on the HBONE port of a pod with the pod's identity: it ends TLS and HTTP/2, and hands each CONNECT to a
/// forward proxy that dials the authority, or one thing always. Over the HTTP/1.1 between the two no direction can end
/// by itself.
pub(crate) struct Nghttpx {
    pub(crate) process: Process,
    pub(crate) onward: App,
}

impl Nghttpx {
    pub(crate) fn start(topology: &Topology, ca: &Ca, x: &Pod, to: Option<SocketAddr>) -> Self {
        let onward = App::start(&x.netns, Behaviour::ConnectProxy(to)).unwrap();
        let leaf = ca.issue(&x.identity(), Validity::Current).unwrap();
        let name = format!("nghttpx-{}", x.name);
        let (cert, key) = leaf.write(topology.dir(), &name).unwrap();
        let mut command = Command::new("nghttpx");
        command
            .args([
                "--conf=/dev/null",
                "--http2-proxy",
                "--workers=1",
                "--no-ocsp",
                "--verify-client",
            ])
            .arg(format!("--verify-client-cacert={}", ca.dir().join("ca.pem").display()))
            .arg(format!("--frontend=*,{HBONE_PORT}"))
            .arg(format!("--backend=127.0.0.1,{}", onward.port()))
            .args([&key, &cert]);
        let process = Process::spawn(&x.netns, topology.dir(), &name, &mut command).unwrap();
        for family in Family::BOTH {
            let to = x.at(family, HBONE_PORT);
            let listens = poll::within(poll::SOON, || {
                x.netns.run(|| client::dial_within(to, Duration::from_secs(1))).ok()
            });
            assert!(listens.is_some(), "nghttpx does not listen on {to}: {}", process.log());
        }
        Self { process, onward }
    }
}

pub(crate) fn have_python() -> bool {
    require::tool(PYTHON, &["-c", "import h2"])
}

pub(crate) fn have_nghttpx() -> bool {
    require::tool("nghttpx", &["--version"])
}

#[test]
fn the_third_parties_understand_each_other() {
    if !(have_python() && have_nghttpx() && require::netns()) {
        return;
    }
    let topology = Topology::build().unwrap();
    let ca = Ca::create(&topology.dir().join("ca")).unwrap();
    let x = &topology.x;
    let app = App::start(&x.netns, Behaviour::Echo).unwrap();
    let nghttpx = Nghttpx::start(&topology, &ca, x, None);
    for family in Family::BOTH {
        let finished = python(&topology, &ca, x, family, x.at(family, app.port()), "go");
        let want = format!("peer {}\nstatus 200\nreceived hello from python\n", x.identity());
        assert_eq!(finished.stdout, want, "{} {}", finished.stderr, nghttpx.process.log());
    }
}

#[test]
fn an_http2_client_written_in_python_is_served() {
    if !have_python() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let b1 = &topology.b1;
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let free = App::start(&b1.netns, Behaviour::Echo).unwrap().port();

    for family in Family::BOTH {
        for (authority, want) in [
            (b1.at(family, app.port()), "status 200\nreceived hello from python\nended\n"),
            (b1.at(family, free), "status 503\n"),
            (topology.a1.at(family, app.port()), "status 400\n"),
        ] {
            let finished = python(&topology, &mesh.ca, b1, family, authority, "end");
            let want = format!("peer {}\n{want}", b1.identity());
            assert_eq!((finished.stdout, finished.code), (want, 0), "{}", finished.stderr);
        }
    }
}

#[test]
fn culvert_is_served_by_nghttpx() {
    if !have_nghttpx() {
        return;
    }
    let Some(topology) = Topology::with_culvert() else { return };
    let x = &topology.x;
    let file = MeshFile::new(&topology).workload(x, &topology.b, Protocol::Hbone);
    let mesh = Mesh::start(&topology, &file, Remains::Nothing).unwrap();
    let app = App::start(&x.netns, Behaviour::CloseFirst).unwrap();
    let nghttpx = Nghttpx::start(&topology, &mesh.ca, x, None);
    for family in Family::BOTH {
        let address = x.at(family, app.port());
        let reply =
            topology.a1.netns.run(|| client::ping(&mut client::dial(address)?, b"hello nghttpx"));
        assert_eq!(reply.unwrap(), b"hello nghttpx", "{family:?}: {}", nghttpx.process.log());
    }
    mesh.a.flow("a connection to nghttpx's identity", |flow| {
        flow.goes(Direction::Outbound)
            && flow.error().is_none()
            && flow.identities() == Some((topology.a1.identity(), x.identity()))
    });
    assert_eq!(nghttpx.onward.seen().len(), 2, "the bytes went another way");
}
