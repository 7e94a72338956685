use std::{
    io,
    net::Ipv4Addr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::{
    io::{DuplexStream, duplex},
    time::Instant,
};

use super::*;
use crate::{
    hbone::{
        client,
        server::{Incoming, Phase, serve},
    },
    testing::LONG,
};

/// A pool whose peers run in memory, so that the clock can be paused.
struct Lab {
    pool: Pool<u32>,
    dials: AtomicUsize,
    phase: watch::Sender<Phase>,
    peers: Mutex<JoinSet<()>>,
    /// Whether the address that all connections so far are from has gone.
    moved: Arc<AtomicBool>,
    fate: watch::Sender<Fate>,
}

/// What becomes of connections that are up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fate {
    Kept,
    Retired,
    Cut,
}

/// Where connections are from before and after the move.
const BEFORE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 8));
const AFTER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9));

/// What the peer behind a dial does.
#[derive(Clone, Copy)]
enum Peer {
    /// Accepts each CONNECT and keeps the tunnel until it is reset.
    Accepts,
    /// Answers with this status.
    Refuses(u16),
    /// Keeps the connection and never reads it.
    Dead,
    /// There is none, which turns out after a second.
    Absent,
    /// Takes the request and never answers it.
    Silent,
}

impl Lab {
    fn new(options: PoolOptions) -> Self {
        let (phase, _) = watch::channel(Phase::Serving);
        let moved = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&moved);
        Self {
            pool: Pool::new(options, move |ip| ip != BEFORE || !gone.load(Ordering::Relaxed)),
            moved,
            fate: watch::Sender::new(Fate::Kept),
            dials: AtomicUsize::new(0),
            phase,
            peers: Mutex::default(),
        }
    }

    async fn open(&self, peer: Peer) -> Result<Tunnel, OpenError> {
        self.open_key(1, peer).await
    }

    async fn open_key(&self, key: u32, peer: Peer) -> Result<Tunnel, OpenError> {
        let connect = || {
            self.dials.fetch_add(1, Ordering::Relaxed);
            let (near, far) = duplex(1 << 20);
            if !matches!(peer, Peer::Absent) {
                self.peers.lock().unwrap().spawn(run_peer(far, peer, self.phase.subscribe()));
            }
            let fate = |fate| {
                let mut now = self.fate.subscribe();
                async move { drop(now.wait_for(|now| *now >= fate).await) }
            };
            let (retired, cut) = (fate(Fate::Retired), fate(Fate::Cut));
            let local = if self.moved.load(Ordering::Relaxed) { AFTER } else { BEFORE };
            async move {
                sleep(Duration::from_secs(1)).await;
                if matches!(peer, Peer::Absent) {
                    return Err(ConnectError::Tls(io::ErrorKind::ConnectionReset.into()));
                }
                let established = client::handshake(near, &Timeouts::default()).await?;
                Ok(Established { local: Some(local), ..established }.until(retired, cut))
            }
        };
        let authority = Authority::from_static("10.0.0.1:80");
        self.pool.open(key, connect, Connect { authority, headers: HeaderMap::new() }).await
    }

    fn dialled(&self) -> usize {
        self.dials.load(Ordering::Relaxed)
    }

    /// Waits until so many connections are in rotation.
    async fn settle(&self, connections: usize) {
        let settled = async {
            while self.pool.connections() != connections {
                sleep(Duration::from_secs(1)).await;
            }
        };
        timeout(Duration::from_hours(1), settled).await.unwrap();
    }
}

async fn run_peer(io: DuplexStream, peer: Peer, phase: watch::Receiver<Phase>) {
    if matches!(peer, Peer::Dead) {
        sleep(Duration::from_hours(24)).await;
        return;
    }
    let timeouts = Timeouts::default();
    let end = serve(io, phase, &timeouts, |Incoming { respond, .. }| async move {
        match peer {
            Peer::Accepts => {
                let mut tunnel = respond.accept(HeaderMap::new()).unwrap();
                drop(tunnel.recv.data().await);
                tunnel.end();
            }
            Peer::Refuses(status) => respond.refuse(StatusCode::from_u16(status).unwrap()),
            Peer::Silent => {
                sleep(Duration::from_hours(24)).await;
                drop(respond);
            }
            Peer::Dead | Peer::Absent => {}
        }
    });
    drop(end.await);
}

fn small(streams: usize, connections: usize) -> PoolOptions {
    PoolOptions { streams, connections, timeouts: Timeouts::default() }
}

async fn open_many(lab: &Arc<Lab>, n: usize, peer: Peer) -> Vec<Result<Tunnel, OpenError>> {
    let mut tasks = JoinSet::new();
    for _ in 0..n {
        let lab = Arc::clone(lab);
        tasks.spawn(async move { lab.open(peer).await });
    }
    tasks.join_all().await
}

#[tokio::test(start_paused = true)]
async fn callers_at_once_share_one_dial() {
    let lab = Arc::new(Lab::new(PoolOptions::default()));
    let tunnels = open_many(&lab, 50, Peer::Accepts).await;
    assert!(tunnels.iter().all(Result::is_ok));
    assert_eq!((lab.dialled(), lab.pool.connections()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_failed_dial_fails_all_who_wait_at_once() {
    let lab = Arc::new(Lab::new(PoolOptions::default()));
    let before = Instant::now();
    let tunnels = open_many(&lab, 50, Peer::Absent).await;
    assert!(tunnels.iter().all(|t| matches!(t, Err(OpenError::Connect(_)))));
    assert_eq!((lab.dialled(), lab.pool.connections()), (1, 0));
    assert!(before.elapsed() < Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn a_dial_goes_on_without_the_caller_that_began_it() {
    let lab = Lab::new(PoolOptions::default());
    let given_up = timeout(Duration::from_millis(500), lab.open(Peer::Accepts)).await;
    assert!(given_up.is_err());
    lab.open(Peer::Accepts).await.unwrap();
    assert_eq!(lab.dialled(), 1);
}

#[tokio::test(start_paused = true)]
async fn streams_beyond_the_limit_get_another_connection() {
    let lab = Arc::new(Lab::new(small(10, 100)));
    let mut tunnels = open_many(&lab, 25, Peer::Accepts).await;
    assert!(tunnels.iter().all(Result::is_ok));
    assert_eq!(lab.dialled(), 3);
    // A saturated connection is used again once it has room.
    tunnels.truncate(5);
    let more = open_many(&lab, 20, Peer::Accepts).await;
    assert!(more.iter().all(Result::is_ok));
    assert_eq!(lab.dialled(), 3);
}

#[tokio::test(start_paused = true)]
async fn keys_share_nothing() {
    let lab = Lab::new(PoolOptions::default());
    let (a, b) = tokio::join!(lab.open_key(1, Peer::Accepts), lab.open_key(2, Peer::Accepts));
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(lab.dialled(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_released_and_one_in_use_is_not() {
    let lab = Lab::new(PoolOptions::default());
    let tunnel = lab.open(Peer::Accepts).await.unwrap();
    sleep(Duration::from_hours(1)).await;
    assert_eq!(lab.pool.connections(), 1);
    drop(tunnel);
    sleep(Duration::from_mins(4)).await;
    assert_eq!(lab.pool.connections(), 1);
    sleep(Duration::from_mins(7)).await;
    assert_eq!(lab.pool.connections(), 0);
    // Its end was an agreed one: the peer's task is done as well.
    let mut peers = std::mem::take(&mut *lab.peers.lock().unwrap());
    timeout(LONG, peers.join_next()).await.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_the_peer_drains_is_replaced_and_its_tunnels_go_on() {
    let lab = Lab::new(PoolOptions::default());
    let mut old = lab.open(Peer::Accepts).await.unwrap();
    lab.phase.send_replace(Phase::Draining);
    sleep(Duration::from_secs(1)).await;
    lab.phase.send_replace(Phase::Serving);
    let new = lab.open(Peer::Accepts).await.unwrap();
    assert_eq!((lab.dialled(), lab.pool.connections()), (2, 1));
    old.send.send_data(bytes::Bytes::from_static(b"x"), true).unwrap();
    old.end();
    assert!(timeout(LONG, old.recv.data()).await.unwrap().is_none_or(|end| end.is_err()));
    drop(new);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_broke_is_replaced() {
    let lab = Lab::new(PoolOptions::default());
    lab.open(Peer::Accepts).await.unwrap();
    lab.peers.lock().unwrap().abort_all();
    lab.open(Peer::Accepts).await.unwrap();
    assert_eq!(lab.dialled(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_dead_peer_is_noticed_by_its_missing_pong() {
    let lab = Lab::new(PoolOptions::default());
    let before = Instant::now();
    let error = lab.open(Peer::Dead).await.unwrap_err();
    // One second of dialling, then the deadline of the answer.
    assert!(matches!(error, OpenError::Timeout(_)), "{error:?}");
    assert_eq!(before.elapsed().as_secs(), 21);
    lab.settle(0).await;
    assert!(before.elapsed() <= Duration::from_secs(33), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_connect_without_an_answer_ends_at_its_deadline() {
    let lab = Lab::new(PoolOptions::default());
    let error = lab.open(Peer::Silent).await.unwrap_err();
    assert!(matches!(error, OpenError::Timeout(_)), "{error:?}");
    // It may be that nobody is there any more: the next request gets a connection of its own.
    lab.settle(0).await;
    assert_eq!(lab.dialled(), 1);
    assert!(lab.open(Peer::Accepts).await.is_ok());
    assert_eq!(lab.dialled(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_tells_its_status_and_is_not_tried_again() {
    let lab = Lab::new(PoolOptions::default());
    for status in [400, 401, 503, 204] {
        let error = lab.open(Peer::Refuses(status)).await.unwrap_err();
        assert!(matches!(error, OpenError::Refused(s) if s.as_u16() == status), "{error:?}");
        // The status is of the peer that was dialled first, so each needs a pool entry of its own.
        lab.settle(1).await;
        lab.settle(0).await;
    }
    assert_eq!(lab.dialled(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_full_pool_releases_idle_connections_and_only_those() {
    let lab = Lab::new(small(1, 2));
    let first = lab.open_key(1, Peer::Accepts).await.unwrap();
    let _second = lab.open_key(2, Peer::Accepts).await.unwrap();
    let error = lab.open_key(3, Peer::Accepts).await.unwrap_err();
    assert!(matches!(error, OpenError::Full(2)), "{error:?}");
    drop(first);
    let _third = lab.open_key(3, Peer::Accepts).await.unwrap();
    assert_eq!(lab.pool.connections(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_full_pool_keeps_the_idle_connection_that_is_asked_for() {
    let lab = Lab::new(small(1, 2));
    for key in [1, 2, 1, 2] {
        drop(lab.open_key(key, Peer::Accepts).await.unwrap());
    }
    assert_eq!((lab.dialled(), lab.pool.connections()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_connection_whose_address_has_gone_is_replaced_and_its_tunnels_are_left_alone() {
    let lab = Lab::new(PoolOptions::default());
    let mut old = lab.open(Peer::Accepts).await.unwrap();
    lab.moved.store(true, Ordering::Relaxed);
    let new = lab.open(Peer::Accepts).await.unwrap();
    assert_eq!((lab.dialled(), lab.pool.connections()), (2, 1));
    old.send.send_data(bytes::Bytes::from_static(b"x"), true).unwrap();
    old.end();
    assert!(timeout(LONG, old.recv.data()).await.unwrap().is_none_or(|end| end.is_err()));
    // The old one was closed with its last stream, the new one is kept.
    drop(old);
    lab.open(Peer::Accepts).await.unwrap();
    let mut peers = std::mem::take(&mut *lab.peers.lock().unwrap());
    timeout(LONG, peers.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!((lab.dialled(), peers.len()), (2, 1));
    drop(new);
}

#[tokio::test(start_paused = true)]
async fn a_request_does_not_wait_on_a_connection_whose_address_goes_meanwhile() {
    let lab = Lab::new(PoolOptions::default());
    let before = Instant::now();
    let (first, ()) = tokio::join!(lab.open(Peer::Silent), async {
        sleep(Duration::from_secs(2)).await;
        lab.moved.store(true, Ordering::Relaxed);
    });
    // It was the one that dialled, and dials no second time.
    assert!(matches!(first, Err(OpenError::Stale)), "{first:?}");
    assert!(before.elapsed() <= Duration::from_secs(2) + STALE_CHECK);

    lab.moved.store(false, Ordering::Relaxed);
    let _pooled = lab.open(Peer::Accepts).await.unwrap();
    lab.moved.store(true, Ordering::Relaxed);
    assert!(lab.open(Peer::Accepts).await.is_ok());
    assert_eq!(lab.dialled(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_retired_connection_is_replaced_and_closed_with_its_last_tunnel() {
    let lab = Lab::new(PoolOptions::default());
    let mut old = lab.open(Peer::Accepts).await.unwrap();
    lab.fate.send_replace(Fate::Retired);
    lab.settle(0).await;
    lab.fate.send_replace(Fate::Kept);
    let new = lab.open(Peer::Accepts).await.unwrap();
    assert_eq!((lab.dialled(), lab.pool.connections()), (2, 1));
    // Its tunnel goes on for as long as it wants.
    sleep(Duration::from_hours(1)).await;
    old.send.send_data(bytes::Bytes::from_static(b"x"), true).unwrap();
    old.end();
    assert!(timeout(LONG, old.recv.data()).await.unwrap().is_none_or(|end| end.is_err()));
    drop(old);
    let mut peers = std::mem::take(&mut *lab.peers.lock().unwrap());
    timeout(LONG, peers.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(peers.len(), 1);
    drop(new);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_cut_leaves_no_tunnel_also_once_it_is_retired() {
    for retired in [false, true] {
        let lab = Lab::new(PoolOptions::default());
        let mut tunnel = lab.open(Peer::Accepts).await.unwrap();
        if retired {
            lab.fate.send_replace(Fate::Retired);
            lab.settle(0).await;
        }
        lab.fate.send_replace(Fate::Cut);
        let end = timeout(LONG, tunnel.recv.data()).await.unwrap();
        assert!(end.is_none_or(|end| end.is_err()));
        lab.settle(0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_the_pool_ends_its_tunnels() {
    let Lab { pool, .. } = {
        let lab = Lab::new(PoolOptions::default());
        let mut tunnel = lab.open(Peer::Accepts).await.unwrap();
        let Lab { pool, .. } = lab;
        drop(pool);
        let end = timeout(LONG, tunnel.recv.data()).await.unwrap();
        assert!(end.is_none_or(|end| end.is_err()));
        Lab::new(PoolOptions::default())
    };
    assert_eq!(pool.connections(), 0);
}
