//! The client's side of the load: blocking sockets on pinned threads inside a pod's namespace.
//!
//! What the server does with a connection is in the first byte it gets, see `serve`.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use culvert_tests::netns::Netns;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    cpu,
    serve::{CHUNK, ECHO, SINK},
};

/// What one socket call may take; far more than any of them should.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Connections that are open at once while new ones are counted.
pub(crate) const AT_ONCE: usize = 8;

/// Where load comes from and where it goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) from: &'a Netns,
    pub(crate) cpu: usize,
    pub(crate) to: SocketAddr,
}

/// What bulk streams got through.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) bytes: u64,
    pub(crate) elapsed: Duration,
}

impl Transfer {
    pub(crate) fn gbits(&self) -> f64 {
        self.bytes as f64 * 8e-9 / self.elapsed.as_secs_f64()
    }
}

impl Target<'_> {
    /// The median round trip of `count` messages of `size` bytes over one connection, in microseconds.
    pub(crate) fn round_trip(&self, size: usize, count: usize) -> Result<f64> {
        self.inside(|| {
            let mut stream = dial(self.to)?;
            let message = vec![ECHO; size];
            let mut reply = vec![0; size];
            let mut times = Vec::with_capacity(count);
            for index in 0..count + count / 10 {
                let start = Instant::now();
                stream.write_all(&message)?;
                stream.read_exact(&mut reply)?;
                // The first tenth grows windows and warms caches.
                if index >= count / 10 {
                    times.push(start.elapsed());
                }
            }
            times.sort_unstable();
            let median = times.get(count / 2).context("no round trips asked for")?;
            Ok(median.as_secs_f64() * 1e6)
        })
    }

    /// How many connections are opened a second, each with one byte each way, [`AT_ONCE`] at a time.
    pub(crate) fn connections(&self, count: usize) -> Result<f64> {
        self.inside(|| {
            let elapsed = together(AT_ONCE, |_| {
                for _ in 0..count / AT_ONCE {
                    let mut stream = dial(self.to)?;
                    stream.write_all(&[ECHO])?;
                    stream.read_exact(&mut [0])?;
                }
                Ok(0)
            })?
            .elapsed;
            Ok((count / AT_ONCE * AT_ONCE) as f64 / elapsed.as_secs_f64())
        })
    }

    /// Sends over `streams` connections for `time`, and waits until the server has it all.
    pub(crate) fn bulk(&self, streams: usize, time: Duration) -> Result<Transfer> {
        self.inside(|| {
            together(streams, |start| {
                let chunk = vec![SINK; CHUNK];
                let mut stream = dial(self.to)?;
                let mut sent = 0;
                while start.elapsed() < time {
                    stream.write_all(&chunk)?;
                    sent += chunk.len() as u64;
                }
                stream.shutdown(Shutdown::Write)?;
                let mut received = [0; 8];
                stream.read_exact(&mut received)?;
                let received = u64::from_le_bytes(received);
                ensure!(received == sent, "the server has {received} of {sent} bytes");
                Ok(sent)
            })
        })
    }

    fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.from
            .run(|| {
                cpu::pin(self.cpu)?;
                work()
            })
            .with_context(|| format!("load from {} to {}", self.from.name(), self.to))
    }
}

/// Runs `work` on `count` threads that start together; adds up what they sent, until the last has ended.
fn together(count: usize, work: impl Fn(Instant) -> Result<u64> + Sync) -> Result<Transfer> {
    let barrier = Barrier::new(count);
    let outcomes: Vec<Result<(Instant, u64)>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    let start = Instant::now();
                    Ok((start, work(start)?))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let end = Instant::now();
    let mut transfer = Transfer { bytes: 0, elapsed: Duration::ZERO };
    for outcome in outcomes {
        let (start, bytes) = outcome?;
        transfer.bytes += bytes;
        transfer.elapsed = transfer.elapsed.max(end - start);
    }
    Ok(transfer)
}

/// Connects with as few system calls as an ordinary client. `SO_SNDTIMEO` bounds connect(2) too.
fn dial(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_write_timeout(Some(LIMIT))?;
    socket.set_read_timeout(Some(LIMIT))?;
    socket.set_tcp_nodelay(true)?;
    socket.connect(&to.into())?;
    Ok(socket.into())
}
