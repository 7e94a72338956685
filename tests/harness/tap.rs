//! A packet tap: every TCP segment that passes one interface, with its flags and whether it holds a needle.
//!
//! Bounded: it keeps headers only, at most [`MAX_SEGMENTS`] of them, and says how many frames it missed.
//! Leaves the record check of encrypted streams to `tls_records`.

use std::{
    collections::HashMap,
    io::{self, IoSliceMut},
    net::SocketAddr,
    os::fd::AsRawFd as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::socket::{
    ControlMessageOwned, LinkAddr, MsgFlags, recvmsg, setsockopt,
    sockopt::{RcvBufForce, RxqOvfl},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{frame, netns::Netns, plane, tls_records::TlsRecords};

/// How many segments a tap keeps.
pub const MAX_SEGMENTS: usize = 500_000;

/// The interface of the wire that every frame between the nodes passes once.
pub const WIRE: &str = "to-a";

/// The port whose payload must be TLS.
pub const HBONE_PORT: u16 = 15008;

/// One TCP segment on the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Source address and port.
    pub src: SocketAddr,
    /// Destination address and port.
    pub dst: SocketAddr,
    /// SYN flag.
    pub syn: bool,
    /// ACK flag.
    pub ack: bool,
    /// Payload bytes; more than a packet's worth where the sender offloads segmentation.
    pub payload: usize,
    /// Whether the payload holds one of the needles.
    pub needle: bool,
}

impl Segment {
    /// Whether either end is an HBONE port.
    pub fn is_hbone(&self) -> bool {
        self.src.port() == HBONE_PORT || self.dst.port() == HBONE_PORT
    }

    /// Whether either end is `port`.
    pub fn has_port(&self, port: u16) -> bool {
        self.src.port() == port || self.dst.port() == port
    }

    /// Whether it asks for a new connection.
    pub fn opens(&self) -> bool {
        self.syn && !self.ack
    }
}

/// What a tap saw.
#[derive(Debug, Default)]
pub struct Report {
    /// TCP segments in the order of their arrival.
    pub segments: Vec<Segment>,
    /// Frames that the kernel could not queue, or that came after [`MAX_SEGMENTS`].
    pub missed: usize,
    streams: HashMap<(SocketAddr, SocketAddr), TlsRecords>,
}

impl Report {
    /// Segments of connections that are not HBONE.
    pub fn plaintext(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|segment| !segment.is_hbone())
    }

    /// Segments of HBONE connections.
    pub fn hbone(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|segment| segment.is_hbone())
    }

    /// Segments that hold one of the needles.
    pub fn needles(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|segment| segment.needle)
    }

    /// TLS records seen on HBONE connections, whole ones.
    pub fn tls_records(&self) -> usize {
        self.streams.values().map(TlsRecords::count).sum()
    }

    /// What on HBONE connections was not a TLS record, a line each.
    pub fn not_tls(&self) -> Vec<String> {
        self.streams
            .iter()
            .filter_map(|((src, dst), records)| {
                Some(format!("{src} -> {dst}: {}", records.violation()?))
            })
            .collect()
    }
}

/// A running tap; it ends when dropped or stopped.
#[derive(Debug)]
pub struct Tap {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    report: Mutex<Report>,
    needles: Vec<Vec<u8>>,
}

impl Tap {
    /// Listens on `interface` of `netns` from now on; `needles` are looked for in every payload.
    pub fn start(netns: &Netns, interface: &str, needles: &[&[u8]]) -> Result<Self> {
        let (socket, index) = netns
            .run(|| Ok::<_, io::Error>((open()?, nix::net::if_::if_nametoindex(interface)?)))
            .with_context(|| format!("tap {interface} in {}", netns.name()))?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            report: Mutex::default(),
            needles: needles.iter().map(|needle| needle.to_vec()).collect(),
        });
        let for_thread = Arc::clone(&shared);
        let index = usize::try_from(index)?;
        let thread = std::thread::spawn(move || listen(&socket, index, &for_thread));
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What it saw so far.
    pub fn look(&self) -> MutexGuard<'_, Report> {
        self.shared.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what is queued and ends it.
    pub fn stop(mut self) -> Report {
        self.end();
        std::mem::take(&mut *self.look())
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("a tap panicked");
        }
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.end();
    }
}

/// `ETH_P_ALL` in network order.
const ALL_PROTOCOLS: i32 = 0x0300;

/// Unbound, it hears all interfaces of its namespace; the address of each frame tells which.
fn open() -> io::Result<Socket> {
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(ALL_PROTOCOLS)))?;
    setsockopt(&socket, RcvBufForce, &(64 << 20))?;
    setsockopt(&socket, RxqOvfl, &1)?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    Ok(socket)
}

fn listen(socket: &Socket, index: usize, shared: &Shared) {
    // A frame may be as long as a segment that waits for offloading.
    let mut frame = vec![0; 128 * 1024];
    let mut space = nix::cmsg_space!(u32);
    loop {
        let stopping = shared.stop.load(Ordering::Relaxed);
        let mut slices = [IoSliceMut::new(&mut frame)];
        let received = recvmsg::<LinkAddr>(
            socket.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::empty(),
        );
        let (length, here, missed) = match &received {
            Ok(message) => (
                message.bytes,
                message.address.is_some_and(|address| address.ifindex() == index),
                message.cmsgs().ok().and_then(|mut all| {
                    all.find_map(|control| match control {
                        ControlMessageOwned::RxqOvfl(count) => usize::try_from(count).ok(),
                        _ => None,
                    })
                }),
            ),
            // The queue is empty.
            Err(nix::Error::EAGAIN) if stopping => return,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => continue,
            // The interface went away.
            Err(_) => return,
        };
        let mut report = shared.report.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(missed) = missed {
            report.missed = report.missed.max(missed);
        }
        if here && let Some(tcp) = frame.get(..length).and_then(frame::parse) {
            take_in(&mut report, &tcp, &shared.needles);
        }
    }
}

fn take_in(report: &mut Report, tcp: &frame::Tcp<'_>, needles: &[Vec<u8>]) {
    // What nodes and their control plane tell each other is no pod's.
    if [tcp.src, tcp.dst].contains(&plane::address()) {
        return;
    }
    if report.segments.len() >= MAX_SEGMENTS {
        report.missed += 1;
        return;
    }
    let segment = Segment {
        src: tcp.src,
        dst: tcp.dst,
        syn: tcp.has(frame::SYN),
        ack: tcp.has(frame::ACK),
        payload: tcp.payload.len(),
        needle: needles
            .iter()
            .any(|needle| tcp.payload.windows(needle.len()).any(|window| window == needle)),
    };
    if segment.is_hbone() {
        let records = report.streams.entry((tcp.src, tcp.dst)).or_default();
        if segment.syn {
            *records = TlsRecords::from_syn(tcp.sequence);
        }
        records.take_in(tcp.sequence, tcp.payload);
    }
    report.segments.push(segment);
}
