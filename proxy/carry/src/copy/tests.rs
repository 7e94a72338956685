use std::{io::ErrorKind, sync::Arc, time::Duration};

use bytes::Bytes;
use h2::Reason;
use http::HeaderMap;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
    sync::{Notify, watch},
    task::JoinSet,
};

use super::*;
use crate::{
    hbone::{
        Connect, Pool, PoolOptions, client,
        server::{Incoming, Phase, serve},
    },
    testing::{Count, LONG, Mesh, pair, read_all},
};

mod frames;

const RESET: Option<ErrorKind> = Some(ErrorKind::ConnectionReset);

/// The two ways that a connection is carried.
enum Carrier {
    Plain(JoinSet<()>),
    Hbone(Box<Mesh>),
}

impl Carrier {
    fn both() -> [Self; 2] {
        [Self::Plain(JoinSet::new()), Self::Hbone(Box::new(Mesh::new(PoolOptions::default())))]
    }

    /// A connection of two applications: the client's end and the server's.
    async fn connect(&mut self) -> (TcpStream, TcpStream) {
        match self {
            Self::Plain(tasks) => {
                let ((client, captured), (leg, server)) = tokio::join!(pair(), pair());
                tasks.spawn(async move {
                    plain(captured, leg, &Count::default(), &Timeouts::default()).await;
                });
                (client, server)
            }
            Self::Hbone(mesh) => mesh.connect().await,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Plain(_) => "plain",
            Self::Hbone(_) => "hbone",
        }
    }
}

async fn exchange(from: &mut TcpStream, to: &mut TcpStream, text: &[u8]) {
    from.write_all(text).await.unwrap();
    let mut got = vec![0; text.len()];
    timeout(LONG, to.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(got, text);
}

#[tokio::test]
async fn bytes_go_both_ways() {
    for mut carrier in Carrier::both() {
        let (mut client, mut server) = carrier.connect().await;
        for round in 0..10 {
            exchange(&mut client, &mut server, format!("ping {round}").as_bytes()).await;
            exchange(&mut server, &mut client, format!("pong {round}").as_bytes()).await;
        }
    }
}

#[tokio::test]
async fn each_direction_ends_for_itself() {
    for mut carrier in Carrier::both() {
        for client_first in [true, false] {
            let (client, server) = carrier.connect().await;
            let (mut first, mut second) =
                if client_first { (client, server) } else { (server, client) };
            first.write_all(b"question").await.unwrap();
            first.shutdown().await.unwrap();
            assert_eq!(read_all(&mut second).await, (b"question".to_vec(), None));
            exchange(&mut second, &mut first, b"still open").await;
            second.write_all(b"answer").await.unwrap();
            drop(second);
            assert_eq!(
                read_all(&mut first).await,
                (b"answer".to_vec(), None),
                "{}",
                carrier.name()
            );
        }
    }
}

#[tokio::test]
async fn a_reset_arrives_as_a_reset_after_what_was_sent_before() {
    for mut carrier in Carrier::both() {
        for client_first in [true, false] {
            for half_closed in [true, false] {
                let (client, server) = carrier.connect().await;
                let (mut first, mut second) =
                    if client_first { (client, server) } else { (server, client) };
                exchange(&mut second, &mut first, b"hello").await;
                if half_closed {
                    second.shutdown().await.unwrap();
                    assert_eq!(read_all(&mut first).await, (vec![], None));
                }
                first.write_all(b"last words").await.unwrap();
                first.set_zero_linger().unwrap();
                drop(first);
                let case = format!("{} {client_first} {half_closed}", carrier.name());
                assert_eq!(read_all(&mut second).await, (b"last words".to_vec(), RESET), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn a_close_with_unread_data_arrives_as_a_reset() {
    for mut carrier in Carrier::both() {
        let (mut client, server) = carrier.connect().await;
        client.write_all(b"not read").await.unwrap();
        timeout(LONG, server.peek(&mut [0; 1])).await.unwrap().unwrap();
        drop(server);
        assert_eq!(read_all(&mut client).await, (vec![], RESET), "{}", carrier.name());
    }
}

#[tokio::test]
async fn a_reset_arrives_while_nobody_reads() {
    for mut carrier in Carrier::both() {
        let (mut client, server) = carrier.connect().await;
        fill(&mut client).await;
        client.set_zero_linger().unwrap();
        drop(client);
        // The server does not read: only an error wakes it.
        let failed = server.ready(tokio::io::Interest::ERROR);
        assert!(timeout(LONG, failed).await.is_ok(), "{}", carrier.name());
    }
}

#[tokio::test]
async fn a_slow_reader_slows_the_writer_and_loses_nothing() {
    for mut carrier in Carrier::both() {
        let (mut client, mut server) = carrier.connect().await;
        let written = fill(&mut client).await;
        // Up to six sockets of 128 KiB each way, one buffer each way, and the stream's window.
        let most = if let Carrier::Plain(_) = carrier { 1 << 20 } else { 6 << 20 };
        assert!(written < most, "{}: {written} bytes were taken", carrier.name());
        client.shutdown().await.unwrap();
        let (data, end) = read_all(&mut server).await;
        assert_eq!((data.len(), end), (written, None), "{}", carrier.name());
    }
}

/// Writes until nothing more is taken for half a second.
async fn fill(to: &mut TcpStream) -> usize {
    let block = vec![7; 64 << 10];
    let mut written = 0;
    while let Ok(result) = timeout(Duration::from_millis(500), to.write(&block)).await {
        written += result.unwrap();
    }
    written
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_data_arrives_unchanged_in_both_directions_at_once() {
    const TOTAL: usize = 100 << 20;
    for mut carrier in Carrier::both() {
        let (client, server) = carrier.connect().await;
        let mut tasks = JoinSet::new();
        for (seed, end) in [(1, client), (2, server)] {
            let (read, write) = end.into_split();
            tasks.spawn(send_pattern(write, seed, TOTAL));
            tasks.spawn(check_pattern(read, 3 - seed, TOTAL));
        }
        let done = timeout(Duration::from_mins(2), tasks.join_all()).await;
        assert!(done.is_ok(), "{}", carrier.name());
    }
}

/// Bytes whose period fits no buffer, so that a part lost, doubled or swapped shows.
fn pattern(seed: u8) -> Vec<u8> {
    (0..1_000_003_u32).map(|i| i.wrapping_mul(0x9e37_79b9).to_be_bytes()[0] ^ seed).collect()
}

async fn send_pattern(mut to: OwnedWriteHalf, seed: u8, total: usize) {
    let block = pattern(seed);
    let mut left = total;
    while left > 0 {
        let n = left.min(block.len());
        to.write_all(&block[..n]).await.unwrap();
        left -= n;
    }
    to.shutdown().await.unwrap();
}

async fn check_pattern(mut from: OwnedReadHalf, seed: u8, total: usize) {
    let want = pattern(seed);
    let mut got = vec![0; want.len()];
    let mut left = total;
    while left > 0 {
        let n = left.min(want.len());
        from.read_exact(&mut got[..n]).await.unwrap();
        assert!(got[..n] == want[..n], "changed within the last {left} bytes");
        left -= n;
    }
    assert_eq!(from.read(&mut got).await.unwrap(), 0);
}

#[tokio::test]
async fn a_copy_that_is_given_up_resets_both_ends() {
    let mut carrier = Carrier::both();
    for carrier in &mut carrier {
        let (mut client, mut server) = carrier.connect().await;
        exchange(&mut client, &mut server, b"hello").await;
        match carrier {
            Carrier::Plain(tasks) => tasks.abort_all(),
            Carrier::Hbone(mesh) => mesh.abandon(),
        }
        assert_eq!(read_all(&mut client).await, (vec![], RESET), "{}", carrier.name());
        assert_eq!(read_all(&mut server).await, (vec![], RESET), "{}", carrier.name());
    }
}

#[tokio::test]
async fn the_meter_and_the_outcome_tell_what_happened() {
    let (mut client, captured) = pair().await;
    let (leg, mut server) = pair().await;
    let count = Count::default();
    let talk = async {
        exchange(&mut client, &mut server, b"12345").await;
        exchange(&mut server, &mut client, b"123").await;
        server.set_zero_linger().unwrap();
        drop(server);
    };
    let timeouts = Timeouts::default();
    let (end, ()) = tokio::join!(plain(captured, leg, &count, &timeouts), talk);
    assert!(matches!(end.outcome, Outcome::ResetByPeer(_)), "{end:?}");
    assert_eq!((end.sent, end.received), (5, 3));
    assert_eq!((count.sent.into_inner(), count.received.into_inner()), (5, 3));
}

#[tokio::test]
async fn a_connection_costs_little_memory() {
    let (count, timeouts) = (Count::default(), Timeouts::default());
    let (one, two) = pair().await;
    let future = plain(one, two, &count, &timeouts);
    assert!(size_of_val(&future) <= 1024, "plain: {} bytes", size_of_val(&future));
    let mesh = Mesh::new(PoolOptions::default());
    let (listener, addr) = crate::testing::listen();
    let authority = addr.to_string();
    let (tunnel_end, _app) = tokio::join!(mesh.open(&authority), listener.accept());
    let (one, _two) = pair().await;
    let future = tunnel(one, tunnel_end.unwrap(), &count, &timeouts);
    assert!(size_of_val(&future) <= 1024, "tunnel: {} bytes", size_of_val(&future));
}

/// Serves one connection; each tunnel gets `words`, and once they are answered is reset for `reason`, or loses its
/// connection.
async fn reset_after(far: DuplexStream, words: &'static [u8], reason: Option<Reason>) {
    let (_phase, phases) = watch::channel(Phase::Serving);
    let timeouts = Timeouts::default();
    let lost = Arc::new(Notify::new());
    let handler = |incoming: Incoming| {
        let lost = Arc::clone(&lost);
        async move {
            let mut tunnel = incoming.respond.accept(HeaderMap::new()).unwrap();
            tunnel.send.send_data(Bytes::from_static(words), false).unwrap();
            tunnel.recv.data().await.unwrap().unwrap();
            let Some(reason) = reason else {
                lost.notify_one();
                return std::future::pending().await;
            };
            tunnel.send.send_reset(reason);
            tunnel.end();
        }
    };
    tokio::select! {
        end = serve(far, phases, &timeouts, handler) => drop(end),
        () = lost.notified() => {}
    }
}

#[tokio::test]
async fn what_the_peer_means_by_a_reset_is_what_the_application_sees() {
    for (reason, seen) in [
        (Some(Reason::NO_ERROR), None),
        (Some(Reason::CANCEL), None),
        (Some(Reason::CONNECT_ERROR), RESET),
        (Some(Reason::INTERNAL_ERROR), RESET),
        (Some(Reason::STREAM_CLOSED), RESET),
        (None, RESET),
    ] {
        let (near, far) = duplex(1 << 20);
        let mut tasks = JoinSet::new();
        tasks.spawn(reset_after(far, b"words", reason));
        let pool = Pool::new(PoolOptions::default(), |_| true);
        let connect = || async { client::handshake(near, &Timeouts::default()).await };
        let authority = "10.0.0.1:80".parse().unwrap();
        let request = Connect { authority, headers: HeaderMap::new() };
        let peer = pool.open((), connect, request).await.unwrap();
        let (mut app, captured) = pair().await;
        tasks.spawn(async move {
            tunnel(captured, peer, &Count::default(), &Timeouts::default()).await;
        });
        let mut words = [0; 5];
        app.read_exact(&mut words).await.unwrap();
        app.write_all(b"answer").await.unwrap();
        assert_eq!(read_all(&mut app).await, (vec![], seen), "{reason:?}");
    }
}
