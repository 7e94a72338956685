use http::{HeaderMap, uri::Authority};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split},
    sync::{mpsc, watch},
    task::JoinSet,
    time::timeout,
};

use super::*;
use crate::{
    Timeouts,
    hbone::{
        Connect, Pool, PoolOptions, client,
        server::{Incoming, Phase, serve},
    },
    testing::LONG,
};

/// A tunnel within a tunnel to an echo, and how its far end saw each end.
struct Lab {
    stream: TunnelStream,
    ends: mpsc::UnboundedReceiver<io::Result<u64>>,
    _pool: Pool<u32>,
    _phase: watch::Sender<Phase>,
    _gateway: JoinSet<()>,
}

impl Lab {
    async fn new() -> Self {
        let (near, far) = duplex(1 << 16);
        let (phase, phases) = watch::channel(Phase::Serving);
        let (told, ends) = mpsc::unbounded_channel();
        let mut gateway = JoinSet::new();
        gateway.spawn(async move {
            let (within, timeouts) = (phases.clone(), Timeouts::default());
            let outer = serve(far, phases, &timeouts, move |outer: Incoming| {
                let (phases, told) = (within.clone(), told.clone());
                async move {
                    let stream = TunnelStream::new(outer.respond.accept(HeaderMap::new()).unwrap());
                    let echo = move |inner| echo(inner, told.clone());
                    drop(serve(stream, phases, &Timeouts::default(), echo).await);
                }
            });
            drop(outer.await);
        });
        let pool = Pool::new(PoolOptions::default(), |_| true);
        let request = || Connect {
            authority: Authority::from_static("ledger.bank:80"),
            headers: HeaderMap::new(),
        };
        let outer = || async { client::handshake(near, &Timeouts::default()).await };
        let outer = pool.open(1, outer, request()).await.unwrap();
        let inner =
            || async { client::handshake(TunnelStream::new(outer), &Timeouts::default()).await };
        let stream = TunnelStream::new(pool.open(2, inner, request()).await.unwrap());
        Self { stream, ends, _pool: pool, _phase: phase, _gateway: gateway }
    }
}

async fn echo(incoming: Incoming, told: mpsc::UnboundedSender<io::Result<u64>>) {
    let tunnel = incoming.respond.accept(HeaderMap::new()).unwrap();
    let (mut from, mut to) = split(TunnelStream::new(tunnel));
    let end = tokio::io::copy(&mut from, &mut to).await;
    drop(to.shutdown().await);
    drop(told.send(end));
}

#[tokio::test]
async fn more_than_all_windows_crosses_both_ways_and_each_direction_ends_by_itself() {
    const LENGTH: usize = 40 << 20;
    let mut lab = Lab::new().await;
    let (mut from, mut to) = split(lab.stream);
    let send = async {
        let chunk: Vec<u8> = (0..64 * 1024).map(|i| u8::try_from(i % 251).unwrap()).collect();
        for _ in 0..LENGTH / chunk.len() {
            to.write_all(&chunk).await.unwrap();
        }
        to.shutdown().await.unwrap();
        chunk
    };
    let mut received = Vec::with_capacity(LENGTH);
    let exchange = async { tokio::join!(send, from.read_to_end(&mut received)) };
    let (chunk, read) = timeout(LONG, exchange).await.unwrap();
    assert_eq!(read.unwrap(), LENGTH);
    assert!(received.chunks(chunk.len()).all(|got| got == chunk));
    assert_eq!(lab.ends.recv().await.unwrap().unwrap(), LENGTH as u64);
}

#[tokio::test]
async fn one_that_is_dropped_is_no_end_of_stream_to_the_other() {
    let mut lab = Lab::new().await;
    lab.stream.write_all(b"not all there is").await.unwrap();
    let mut back = [0; 16];
    timeout(LONG, lab.stream.read_exact(&mut back)).await.unwrap().unwrap();
    drop(lab.stream);
    let end = timeout(LONG, lab.ends.recv()).await.unwrap().unwrap();
    assert!(end.is_err(), "{end:?}");
}
