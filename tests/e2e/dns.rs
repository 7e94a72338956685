//! Names: what pods are told when they ask name servers, and by whom.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use culvert_tests::{
    apps::{App, Behaviour},
    culvert::{Mesh, Remains},
    dns::{self, Asked, BIG, BIG_TEXTS, NameServer, WHO, question},
    mesh_file::{MeshFile, VIP_PORT, VIP_V4, VIP_V6},
    poll,
    process::finish,
    require,
    topology::{Family, Topology},
};
use hickory_proto::{op::ResponseCode, rr::RecordType};

const LEDGER: &str = "ledger.bank.svc.cluster.local.";
const NODE_B: [&str; 2] = ["10.0.0.2", "fd00:10::2"];

const fn record_type(family: Family) -> RecordType {
    match family {
        Family::V4 => RecordType::A,
        Family::V6 => RecordType::AAAA,
    }
}

fn vip(family: Family) -> IpAddr {
    match family {
        Family::V4 => VIP_V4,
        Family::V6 => VIP_V6,
    }
    .parse()
    .unwrap()
}

/// A name server outside of the mesh, at x.
fn server(topology: &Topology) -> NameServer {
    let x = &topology.x;
    NameServer::start(&x.netns, &Family::BOTH.map(|family| x.ip(family))).unwrap()
}

/// The mesh with the service `ledger`, which b1 provides.
fn with_ledger<'t>(topology: &'t Topology, port: u16, more: &[&str]) -> Mesh<'t> {
    let file = MeshFile::new(topology).service(&topology.b1, port);
    Mesh::start_with(topology, &file, Remains::Pins, more).unwrap()
}

#[test]
fn names_of_the_mesh_are_told_whichever_server_is_asked() {
    let Some(topology) = Topology::with_culvert() else { return };
    let server = server(&topology);
    let mesh = with_ledger(&topology, 8080, &[]);
    let (a1, x) = (&topology.a1, &topology.x);
    // Nobody is there to be asked: the second of them does not even exist.
    let nowhere = ["192.0.2.53", "2001:db8::53"].map(|ip| ip.parse().unwrap());
    for (family, nowhere) in Family::BOTH.into_iter().zip(nowhere) {
        for asked in [x.ip(family), nowhere] {
            for kind in Family::BOTH {
                let question = question(LEDGER, record_type(kind));
                let answer = a1.netns.run(|| dns::ask(asked, &question)).unwrap();
                assert_eq!(answer.metadata.id, question.metadata.id);
                assert_eq!(dns::addresses(&answer), [vip(kind)], "{asked}");
                assert_eq!(answer.answers[0].ttl, 30);
                let by_tcp = a1.netns.run(|| dns::ask_by_tcp(asked, &[question])).unwrap();
                assert_eq!(dns::addresses(&by_tcp[0]), [vip(kind)], "{asked} by TCP");
            }
        }
    }
    // That there is no record of a type is no denial of the name, whatever the server says.
    let https = question(LEDGER, RecordType::HTTPS);
    let answer = a1.netns.run(|| dns::ask(x.ip(Family::V4), &https)).unwrap();
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    let asked = server.asked();
    assert!(matches!(&asked[..], [Asked { record_type: RecordType::HTTPS, .. }]), "{asked:?}");

    let metrics = mesh.a.metrics().unwrap();
    let udp = [("request_protocol", "udp"), ("source_canonical_service", "a1")];
    assert_eq!(metrics.sum("istio_dns_requests_total", &udp).to_string(), "9");
    assert_eq!(
        metrics.sum("istio_dns_requests_total", &[("request_protocol", "tcp")]).to_string(),
        "8"
    );
    assert_eq!(metrics.sum("istio_dns_upstream_requests_total", &[]).to_string(), "1");
}

#[test]
fn an_application_reaches_a_service_of_the_mesh_by_its_name() {
    let Some(topology) = Topology::with_culvert() else { return };
    if !require::tool("/usr/bin/python3", &["--version"]) || !require::tool("unshare", &["-V"]) {
        return;
    }
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let _server = server(&topology);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let mesh = with_ledger(&topology, app.port(), &[]);
    let resolv_conf = topology.dir().join("resolv.conf");
    let text = format!(
        "nameserver {}\nsearch shop.svc.cluster.local svc.cluster.local cluster.local\n\
         options ndots:5 timeout:20\n",
        x.ip(Family::V4)
    );
    std::fs::write(&resolv_conf, text).unwrap();
    let program = "import socket, sys\n\
        for family in (socket.AF_INET, socket.AF_INET6):\n\
        \x20   to = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), family, socket.SOCK_STREAM)[0][4]\n\
        \x20   s = socket.create_connection(to[:2], 20)\n\
        \x20   s.sendall(b'hello'); s.shutdown(1)\n\
        \x20   print(to[0], s.makefile().read())\n";
    let run = format!(
        "mount --bind {} /etc/resolv.conf && exec /usr/bin/python3 -c \"$0\" \"$@\"",
        resolv_conf.display()
    );
    for name in ["ledger.bank", "ledger.bank.svc.cluster.local", "ledger.bank.svc.cluster.local."] {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &run, program, name, &VIP_PORT.to_string()]);
        let finished = finish(&a1.netns, &mut command, Duration::from_mins(1)).unwrap();
        assert_eq!(
            finished.stdout,
            format!("{VIP_V4} hello\n{VIP_V6} hello\n"),
            "{name}: {finished:?}"
        );
    }
    // Six connections, each through HBONE under a1's identity.
    let flows = poll::until(poll::SOON, "six flows to the ledger", || {
        let mut flows = mesh.a.flows();
        flows.retain(|flow| flow.field("dst.service").is_some_and(|s| s.starts_with("ledger")));
        (flows.len() >= 6).then_some(flows)
    });
    for flow in flows {
        assert_eq!(flow.field("dst.identity"), Some(b1.identity()));
    }
}

#[test]
fn other_names_are_told_by_the_server_that_was_asked() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, x) = (&topology.a1, &topology.x);
    let at_x = server(&topology);
    let on_node_b = NODE_B.map(|ip| ip.parse::<IpAddr>().unwrap());
    let at_b = NameServer::start(&topology.b.netns, &on_node_b).unwrap();
    let _mesh = with_ledger(&topology, 8080, &[]);
    for (family, node_b) in Family::BOTH.into_iter().zip(on_node_b) {
        let servers = [x.ip(family), node_b];
        let who = question(WHO, record_type(family));
        // One socket, two servers, twice: the answer is from whom it was asked, and says so.
        a1.netns.run(|| {
            let socket = dns::socket(servers[0]).unwrap();
            for server in servers.into_iter().chain(servers) {
                let (from, answer) = dns::ask_from(&socket, server, &who).unwrap();
                assert_eq!((from.ip(), from.port()), (server, 53));
                assert_eq!(dns::addresses(&answer), [server]);
            }
        });
        for server in servers {
            let answer = a1.netns.run(|| dns::ask(server, &who)).unwrap();
            assert_eq!(dns::addresses(&answer), [server]);
            let unknown = question("unknown.test.", RecordType::A);
            let denied = a1.netns.run(|| dns::ask(server, &unknown)).unwrap();
            assert_eq!(denied.metadata.response_code, ResponseCode::NXDomain);
            // An answer that is too long for a datagram is asked for again by TCP, between other questions.
            let big = question(BIG, RecordType::TXT);
            let cut = a1.netns.run(|| dns::ask(server, &big)).unwrap();
            assert!(cut.metadata.truncation && cut.answers.is_empty());
            let questions = [big, who.clone(), question(LEDGER, record_type(family))];
            let mut answers = a1.netns.run(|| dns::ask_by_tcp(server, &questions)).unwrap();
            let place = |answer: &_| questions.iter().position(|q| q.metadata.id == id(answer));
            answers.sort_by_key(place);
            assert_eq!(answers[0].answers.len(), BIG_TEXTS);
            assert_eq!(dns::addresses(&answers[1]), [server]);
            assert_eq!(dns::addresses(&answers[2]), [vip(family)]);
        }
    }
    // Of the five times that each was asked by UDP, a server has heard of one: its answer is good for a minute.
    for server in [&at_x, &at_b] {
        let asked = server.asked_about(WHO);
        assert_eq!(asked.iter().filter(|one| !one.tcp).count(), 2, "{asked:?}");
        assert!(server.asked_about(LEDGER).is_empty());
        let own = Family::BOTH.map(|family| a1.ip(family));
        assert!(asked.iter().all(|one| own.contains(&one.client.ip())), "{asked:?}");
    }
}

const fn id(message: &hickory_proto::op::Message) -> u16 {
    message.metadata.id
}

#[test]
fn questions_to_a_dead_proxy_leave_the_pod_unheard_and_are_answered_by_the_next_one() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, x) = (&topology.a1, &topology.x);
    let server = server(&topology);
    let mut mesh = with_ledger(&topology, 8080, &[]);
    mesh.a.kill();
    let to = x.ip(Family::V4);
    let tries = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&tries);
    // A client that asks again each second, as resolvers do.
    let client = a1.netns.start(move || {
        let socket = dns::socket(to).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        loop {
            count.fetch_add(1, Ordering::Relaxed);
            if let Ok((_, answer)) = dns::ask_from(&socket, to, &question(LEDGER, RecordType::A)) {
                return dns::addresses(&answer);
            }
        }
    });
    poll::until(poll::SOON, "three questions", || {
        (tries.load(Ordering::Relaxed) > 3).then_some(())
    });
    assert!(!client.is_finished(), "a question was answered without a proxy");
    assert!(server.asked().is_empty(), "{:?}", server.asked());
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    assert_eq!(client.join().unwrap(), [vip(Family::V4)]);
}

#[test]
fn without_capture_of_dns_questions_go_to_the_server_untouched() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, x) = (&topology.a1, &topology.x);
    let server = server(&topology);
    let mesh = with_ledger(&topology, 8080, &["--dns-capture", "false"]);
    for family in Family::BOTH {
        let to = x.ip(family);
        let port = a1.netns.run(|| {
            let socket = dns::socket(to).unwrap();
            let (from, answer) =
                dns::ask_from(&socket, to, &question(LEDGER, record_type(family))).unwrap();
            assert_eq!(from.ip(), to);
            assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
            socket.local_addr().unwrap().port()
        });
        let asked = server.asked_about(LEDGER);
        let last = asked.last().unwrap();
        assert_eq!((last.client.ip(), last.client.port()), (a1.ip(family), port));
        let who = question(WHO, record_type(family));
        let by_tcp = a1.netns.run(|| dns::ask_by_tcp(to, &[who])).unwrap();
        assert_eq!(dns::addresses(&by_tcp[0]), [to]);
    }
    let metrics = mesh.a.metrics().unwrap();
    assert_eq!(metrics.find("istio_dns_requests_total", &[]).count(), 0);
}

#[test]
fn a_name_server_in_a_pod_of_the_mesh_is_asked_by_tcp_through_hbone() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let ips = Family::BOTH.map(|family| b1.ip(family));
    let server = NameServer::start(&b1.netns, &ips).unwrap();
    let mesh = with_ledger(&topology, 8080, &[]);
    for family in Family::BOTH {
        let to = b1.ip(family);
        let who = question(WHO, record_type(family));
        let answers = a1.netns.run(|| dns::ask_by_tcp(to, &[who])).unwrap();
        assert_eq!(dns::addresses(&answers[0]), [to]);
        let authority = SocketAddr::new(to, 53).to_string();
        let flow = mesh.a.flow("the question", |flow| flow.is("dst.hbone_addr", &authority));
        assert_eq!(flow.field("dst.identity"), Some(b1.identity()));
    }
    assert_eq!(server.asked().len(), 2);
}
