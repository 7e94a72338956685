//! DNS queries of a pod, answered by a loop that knows no name: what is asked and by whom is its answer.

use std::{collections::BTreeSet, net::SocketAddr};

use culvert_capture::{Dns, Pod, Role, Settings};
use tokio::{io::AsyncWriteExt as _, task::JoinHandle};

use crate::world::{OUTSIDE_V4, OUTSIDE_V6, POD_V4, POD_V6, SOON, World, eventually};

/// Name servers beyond the outside, and on the pod's own link.
const SERVERS_V4: [&str; 3] = ["192.0.2.53:53", "169.254.20.10:53", "10.91.0.1:53"];
const SERVERS_V6: [&str; 2] = ["[2001:db8::53]:53", "[fd91::1]:53"];

fn captured() -> Settings {
    Settings { capture_dns: true, ..Settings::default() }
}

/// Answers all queries with the addresses of both sides, as they are seen here.
fn answer(world: &World, pod: &mut Pod) -> Vec<JoinHandle<()>> {
    let Dns { queries, listeners } = pod.take_dns();
    assert!(listeners.iter().all(|listener| listener.role() == Role::Dns));
    let handle = world.runtime.handle();
    let udp = queries.into_iter().map(|socket| {
        handle.spawn(async move {
            loop {
                let query = socket.next().await.unwrap();
                assert_eq!(query.message, b"name?");
                let message = format!("proxy to {}", query.client.ip());
                socket.answer(&query, message.as_bytes()).unwrap();
            }
        })
    });
    let tcp = listeners.into_iter().map(|listener| {
        handle.spawn(async move {
            loop {
                let mut captured = listener.accept().await.unwrap();
                assert_eq!(captured.orig_dst.port(), 53);
                captured.stream.write_all(b"t").await.unwrap();
            }
        })
    });
    udp.chain(tcp).collect()
}

fn own(server: &str) -> &'static str {
    if server.starts_with('[') { POD_V6 } else { POD_V4 }
}

#[test]
fn queries_are_answered_in_the_name_of_the_server_that_was_asked() {
    let Some(mut world) = World::new("dns") else { return };
    let node = world.start();
    let mut pod = world.enroll_with(&node, &captured());
    let _answering = answer(&world, &mut pod);
    // By a connected socket, which takes an answer from its peer alone.
    for server in SERVERS_V4.into_iter().chain(SERVERS_V6) {
        let ask = world.app.ask(&world.pod, server);
        assert_eq!(world.app.wait(ask, SOON), format!("{server}=proxy to {}", own(server)));
        let app = world.app.connect(&world.pod, server);
        assert_eq!(world.app.wait(app, SOON), format!("connected {server}"));
        assert_eq!(world.app.wait(app, SOON), "read t");
    }
    // By one socket that asks several.
    for servers in [SERVERS_V4.as_slice(), SERVERS_V6.as_slice()] {
        let ask = world.app.ask(&world.pod, &servers.join(","));
        let answers: BTreeSet<_> =
            servers.iter().map(|server| format!("{server}=proxy to {}", own(server))).collect();
        let want: Vec<_> = answers.into_iter().collect();
        assert_eq!(world.app.wait(ask, SOON), want.join(" "));
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn servers_within_the_pod_are_asked_themselves() {
    let Some(mut world) = World::new("dnsself") else { return };
    let node = world.start();
    let mut pod = world.enroll_with(&node, &captured());
    let _answering = answer(&world, &mut pod);
    let own_v4 = format!("{POD_V4}:53");
    let own_v6 = format!("[{POD_V6}]:53");
    for server in ["127.0.0.53:53", "[::1]:53", &own_v4, &own_v6] {
        world.app.answer(&world.pod, server);
        let ask = world.app.ask(&world.pod, server);
        assert_eq!(world.app.wait(ask, SOON), format!("{server}=app"));
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn dns_is_captured_and_let_go_without_another_enrolment() {
    let Some(mut world) = World::new("dnslive") else { return };
    let node = world.start();
    let mut pod = world.enroll_with(&node, &Settings::default());
    let _answering = answer(&world, &mut pod);
    let outside = [format!("{OUTSIDE_V4}:53"), format!("[{OUTSIDE_V6}]:53")];
    for server in &outside {
        world.app.answer(&world.outside, server);
    }
    for (settings, who) in [
        (Settings::default(), "app"),
        (captured(), "proxy"),
        (Settings::default(), "app"),
        (captured(), "proxy"),
    ] {
        pod.capture().configure(&settings).unwrap();
        for server in &outside {
            let ask = world.app.ask(&world.pod, server);
            let said = world.app.wait(ask, SOON);
            assert!(said.starts_with(&format!("{server}={who}")), "{settings:?}: {said}");
        }
    }
    // What the pod excludes is not captured.
    let networks = [format!("{OUTSIDE_V4}/32"), format!("{OUTSIDE_V6}/128")];
    let exclude_outbound_cidrs = networks.iter().map(|net| net.parse().unwrap()).collect();
    pod.capture().configure(&Settings { exclude_outbound_cidrs, ..captured() }).unwrap();
    for server in &outside {
        let ask = world.app.ask(&world.pod, server);
        assert_eq!(world.app.wait(ask, SOON), format!("{server}=app"));
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn queries_are_dropped_while_there_is_no_server() {
    let Some(mut world) = World::new("dnsheld") else { return };
    let node = world.start();
    let pod = world.enroll_with(&node, &captured());
    let server = format!("{OUTSIDE_V4}:53");
    world.app.answer(&world.outside, &server);
    drop(pod);
    let ask = world.app.ask(&world.pod, &server);
    let said = world.app.wait(ask, SOON);
    assert!(said.starts_with("failed "), "{said}");
    let held = || node.outcomes().unwrap().contains(&(culvert_abi::Outcome::GuardDnsHeld, 1));
    eventually("the query to be held", held);
    drop(node);
    drop(world);
}

#[test]
fn queries_of_the_proxy_itself_leave_the_pod() {
    let Some(mut world) = World::new("dnsown") else { return };
    let node = world.start();
    let mut pod = world.enroll_with(&node, &captured());
    let _answering = answer(&world, &mut pod);
    let server = format!("{OUTSIDE_V4}:53");
    world.app.answer(&world.outside, &server);
    let server: SocketAddr = server.parse().unwrap();
    let socket = pod.netns().run(|| std::net::UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.send_to(b"name?", server).unwrap();
    let mut buffer = [0; 64];
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    assert_eq!((buffer.get(..length), from), (Some(&b"app"[..]), server));
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}
