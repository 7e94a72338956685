//! Scripted HBONE peers at a captured pod's port 15008: who is let in, and what the others are told.

use std::net::SocketAddr;

use culvert_tests::{
    apps::{App, Behaviour},
    ca::{Ca, Validity},
    client,
    culvert::{Mesh, Remains},
    hbone::{Answer, Peer},
    mesh_file::{Action, MeshFile, Policy},
    tap::HBONE_PORT,
    topology::{Family, Topology},
};
use http::{Method, Request};

const FRIEND: &str = "spiffe://cluster.local/ns/friends/sa/peer";
const FOE: &str = "spiffe://cluster.local/ns/foes/sa/peer";

struct Scene {
    topology: Topology,
    app: App,
}

impl Scene {
    fn build() -> Option<Self> {
        let topology = Topology::with_culvert()?;
        let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
        Some(Self { topology, app })
    }

    fn mesh(&self) -> Mesh<'_> {
        let policy = Policy::new("no-foes", "bank", Action::Deny).principal(FOE);
        let file = MeshFile::new(&self.topology).policy(&policy);
        Mesh::start(&self.topology, &file, Remains::Nothing).unwrap()
    }

    fn authority(&self, family: Family) -> String {
        self.topology.b1.at(family, self.app.port()).to_string()
    }

    /// A CONNECT from pod x, by both families; both must have the same answer.
    fn connect(&self, peer: &Peer, authority: impl Fn(Family) -> String) -> Answer {
        let [v4, v6] = Family::BOTH.map(|family| {
            let to = self.topology.b1.at(family, HBONE_PORT);
            let authority = authority(family);
            self.topology.x.netns.run(|| peer.connect(to, &authority, b"through")).unwrap()
        });
        assert_eq!(v4.status(), v6.status(), "{v4:?} {v6:?}");
        v4
    }
}

fn peer(ca: &Ca, spiffe: &str) -> Peer {
    Peer::new(ca, Some(&ca.issue(spiffe, Validity::Current).unwrap())).unwrap()
}

#[test]
fn a_peer_of_the_mesh_is_let_through_to_the_app() {
    let Some(scene) = Scene::build() else { return };
    let mesh = scene.mesh();
    let answer = scene.connect(&peer(&mesh.ca, FRIEND), |family| scene.authority(family));
    assert_eq!(answer, Answer::Status(200, b"through".to_vec()));
}

#[test]
fn a_peer_that_policy_denies_is_told_401() {
    let Some(scene) = Scene::build() else { return };
    let mesh = scene.mesh();
    let answer = scene.connect(&peer(&mesh.ca, FOE), |family| scene.authority(family));
    assert_eq!(answer.status(), Some(401), "{answer:?}");
    assert_eq!(scene.app.seen().len(), 0);
}

#[test]
fn an_app_that_refuses_is_503() {
    let Some(scene) = Scene::build() else { return };
    let mesh = scene.mesh();
    let free = App::start(&scene.topology.b1.netns, Behaviour::Echo).unwrap().port();
    let answer = scene
        .connect(&peer(&mesh.ca, FRIEND), |family| scene.topology.b1.at(family, free).to_string());
    assert_eq!(answer.status(), Some(503), "{answer:?}");
}

#[test]
fn requests_that_make_no_sense_are_400() {
    let Some(scene) = Scene::build() else { return };
    let mesh = scene.mesh();
    let friend = peer(&mesh.ca, FRIEND);
    let other_pod = scene.topology.x.at(Family::V4, scene.app.port()).to_string();
    for authority in [other_pod.as_str(), "192.0.2.7:80", "[2001:db8::7]:80"] {
        let answer = scene.connect(&friend, |_| authority.to_owned());
        assert_eq!(answer.status(), Some(400), "{authority}: {answer:?}");
    }

    let request = Request::builder()
        .method(Method::GET)
        .uri(format!("https://{}/", scene.authority(Family::V4)))
        .body(())
        .unwrap();
    let to = scene.topology.b1.at(Family::V4, HBONE_PORT);
    let answer = scene.topology.x.netns.run(|| friend.ask(to, request, b"")).unwrap();
    assert_eq!(answer.status(), Some(400), "GET: {answer:?}");
    assert_eq!(scene.app.seen().len(), 0);
}

#[test]
fn peers_without_a_good_certificate_do_not_get_past_tls() {
    let Some(scene) = Scene::build() else { return };
    let mesh = scene.mesh();
    let ca = &mesh.ca;
    let stranger = Ca::create(&scene.topology.dir().join("strange-ca")).unwrap();
    let of_another_root = stranger.issue(FRIEND, Validity::Current).unwrap();
    let tls12 = [&rustls::version::TLS12];
    let current = ca.issue(FRIEND, Validity::Current).unwrap();
    for (what, peer) in [
        ("another trust domain", peer(ca, "spiffe://elsewhere.example/ns/friends/sa/peer")),
        ("no SPIFFE identity", peer(ca, "https://cluster.local/ns/friends/sa/peer")),
        ("an expired certificate", {
            Peer::new(ca, Some(&ca.issue(FRIEND, Validity::Expired).unwrap())).unwrap()
        }),
        ("another root", Peer::new(ca, Some(&of_another_root)).unwrap()),
        ("no certificate", Peer::new(ca, None).unwrap()),
        ("TLS 1.2", Peer::with_versions(ca, Some(&current), &tls12).unwrap()),
    ] {
        let answer = scene.connect(&peer, |family| scene.authority(family));
        assert!(matches!(answer, Answer::Closed(_)), "{what}: {answer:?}");
    }
    assert_eq!(scene.app.seen().len(), 0);
}

#[test]
fn plain_http_on_the_hbone_port_gets_no_answer() {
    let Some(scene) = Scene::build() else { return };
    let _mesh = scene.mesh();
    for family in Family::BOTH {
        let to: SocketAddr = scene.topology.b1.at(family, HBONE_PORT);
        let request = format!("CONNECT {0} HTTP/1.1\r\nhost: {0}\r\n\r\n", scene.authority(family));
        let reply = scene.topology.x.netns.run(|| client::exchange(to, request.as_bytes()));
        // A TLS alert (content type 21) at most.
        let answered = reply.is_ok_and(|reply| reply.first().is_some_and(|kind| *kind != 21));
        assert!(!answered, "{family:?}");
    }
    assert_eq!(scene.app.seen().len(), 0);
}
