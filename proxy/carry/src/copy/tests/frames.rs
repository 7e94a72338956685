//! What the frames of one stream may do to the connection that others share.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

#[tokio::test]
async fn small_frames_for_a_slow_reader_do_not_end_the_connection_that_others_share() {
    const WORDS: Bytes = Bytes::from_static(&[7; 64]);
    const FRAMES: usize = 60_000;
    let mut mesh = Mesh::new(PoolOptions::default());
    let (listener, addr) = crate::testing::listen();
    let authority = addr.to_string();
    let (slow, app) = tokio::join!(mesh.open(&authority), listener.accept());
    let (mut slow, (mut app, _)) = (slow.unwrap(), app.unwrap());
    let (mut client, mut server) = mesh.connect().await;
    for _ in 0..FRAMES {
        slow.send.reserve_capacity(WORDS.len());
        while slow.send.capacity() < WORDS.len() {
            poll_fn(|cx| slow.send.poll_capacity(cx)).await.unwrap().unwrap();
        }
        slow.send.send_data(WORDS, false).unwrap();
    }
    exchange(&mut client, &mut server, b"still here").await;
    slow.send.send_data(Bytes::new(), true).unwrap();
    let (data, end) = read_all(&mut app).await;
    assert_eq!((data.len(), end), (FRAMES * WORDS.len(), None));
    slow.end();
}

/// Carries both directions of an HTTP/2 connection, and counts the DATA frames of the client that hold nothing and end
/// nothing.
async fn count_empty_frames(client: DuplexStream, server: DuplexStream, empty: &AtomicUsize) {
    const PREFACE: usize = 24;
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let up = async {
        let mut preface = [0; PREFACE];
        from_client.read_exact(&mut preface).await?;
        to_server.write_all(&preface).await?;
        loop {
            // RFC 9113 §4.1: length, type, flags, stream.
            let mut header = [0; 9];
            from_client.read_exact(&mut header).await?;
            let [a, b, c, kind, flags, ..] = header;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            from_client.read_exact(&mut payload).await?;
            if kind == 0 && payload.is_empty() && flags & 1 == 0 {
                empty.fetch_add(1, Ordering::Relaxed);
            }
            to_server.write_all(&header).await?;
            to_server.write_all(&payload).await?;
        }
    };
    let down = tokio::io::copy(&mut from_server, &mut to_client);
    let _ended: (io::Result<()>, _) = tokio::join!(up, down);
}

#[tokio::test]
async fn a_reset_sends_no_frame_that_peers_take_for_a_flood() {
    let (near, tapped) = duplex(1 << 20);
    let (onward, far) = duplex(1 << 20);
    let mut tasks = JoinSet::new();
    let empty = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&empty);
    tasks.spawn(async move { count_empty_frames(tapped, onward, &counting).await });
    let (gone, mut resets) = tokio::sync::mpsc::unbounded_channel();
    let (_phase, phases) = watch::channel(Phase::Serving);
    tasks.spawn(async move {
        let handler = |incoming: Incoming| {
            let gone = gone.clone();
            async move {
                let mut tunnel = incoming.respond.accept(HeaderMap::new()).unwrap();
                tunnel.recv.data().await.unwrap().unwrap();
                let reset = poll_fn(|cx| tunnel.send.poll_reset(cx)).await;
                gone.send(reset.unwrap()).unwrap();
            }
        };
        drop(serve(far, phases, &Timeouts::default(), handler).await);
    });
    let pool = Pool::new(PoolOptions::default(), |_| true);
    let mut near = Some(near);
    for _ in 0..2 {
        let near = near.take();
        let connect = || async { client::handshake(near.unwrap(), &Timeouts::default()).await };
        let authority = "10.0.0.1:80".parse().unwrap();
        let request = Connect { authority, headers: HeaderMap::new() };
        let peer = pool.open((), connect, request).await.unwrap();
        let (mut app, captured) = pair().await;
        tasks.spawn(async move {
            tunnel(captured, peer, &Count::default(), &Timeouts::default()).await;
        });
        app.write_all(b"words").await.unwrap();
        app.set_zero_linger().unwrap();
        drop(app);
        let reset = timeout(LONG, resets.recv()).await.unwrap();
        assert_eq!(reset, Some(Reason::CONNECT_ERROR));
    }
    assert_eq!(empty.load(Ordering::Relaxed), 0);
}
