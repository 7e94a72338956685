use std::net::{Ipv4Addr, TcpListener};

use super::*;

const HOUR: Duration = Duration::from_hours(1);

fn dialer(timeout: Duration) -> Dialer {
    let netns = Netns::current().unwrap();
    Dialer { home: netns.clone(), netns, proxy_mark: None, delivery_mark: None, timeout }
}

fn is_root() -> bool {
    culvert_sys::caps::Effective::read().unwrap().has(culvert_sys::caps::Capability::NetAdmin)
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_listener_is_reached() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let dst = listener.local_addr().unwrap();
    let stream = dialer(HOUR).dial(dst, Leg::Passthrough).await.unwrap();
    assert_eq!(stream.peer_addr().unwrap(), dst);
    assert!(stream.nodelay().unwrap());
}

#[tokio::test]
async fn a_closed_port_refuses_and_the_text_names_it() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let dst = listener.local_addr().unwrap();
    drop(listener);
    let error = dialer(HOUR).dial(dst, Leg::Hbone).await.unwrap_err();
    assert!(matches!(error, DialError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains(&dst.to_string()), "{error}");
}

#[tokio::test]
async fn a_dial_ends_at_its_deadline() {
    // The accept queue of a listener that never accepts takes backlog + 1 connections; the next SYN is dropped.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(addr("127.0.0.1:0")).unwrap();
    let listener = socket.listen(0).unwrap();
    let dst = listener.local_addr().unwrap();
    let _filler = dialer(HOUR).dial(dst, Leg::Passthrough).await.unwrap();
    let error = loop {
        match dialer(Duration::from_millis(50)).dial(dst, Leg::Hbone).await {
            Ok(stream) => stream.set_zero_linger().unwrap(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, DialError::Timeout { leg: Leg::Hbone, .. }), "{error:?}");
}

#[tokio::test]
async fn one_client_gets_a_port_for_each_of_many_deliveries() {
    if !is_root() {
        println!("skipped: IP_TRANSPARENT needs CAP_NET_ADMIN");
        return;
    }
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let dst = listener.local_addr().unwrap();
    let client = "127.0.0.9".parse().unwrap();
    let mut held = Vec::new();
    for _ in 0..1000 {
        held.push(dialer(HOUR).dial(dst, Leg::Delivery { client }).await.unwrap());
        let (_, peer) = listener.accept().await.unwrap();
        assert!(peer.ip() == client && DELIVERY_PORTS.contains(&peer.port()), "{peer}");
    }
}

#[tokio::test]
async fn only_deliveries_keep_the_client_and_only_where_it_can_be() {
    let dialer = Dialer { proxy_mark: Some(1), delivery_mark: Some(2), ..dialer(HOUR) };
    let delivery = |client: &str| Leg::Delivery { client: client.parse().unwrap() };
    let client = "192.0.2.1:61001".parse().ok();
    for (dst, leg, mark, source) in [
        ("10.0.0.1:80", Leg::Passthrough, 1, None),
        ("10.0.0.1:80", Leg::Hbone, 1, None),
        ("10.0.0.1:80", delivery("192.0.2.1"), 2, client),
        ("10.0.0.1:80", delivery("::ffff:192.0.2.1"), 2, client),
        ("10.0.0.1:80", delivery("10.0.0.1"), 2, None),
        ("10.0.0.1:80", delivery("2001:db8::1"), 2, None),
        ("[2001:db8::2]:80", delivery("2001:db8::1"), 2, "[2001:db8::1]:61001".parse().ok()),
    ] {
        let options = dialer.options(addr(dst), leg, 61001);
        assert_eq!((options.mark, options.source), (Some(mark), source), "{dst} {leg:?}");
    }
}
