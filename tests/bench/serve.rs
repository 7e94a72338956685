//! The server's side of the load. The first byte on a connection says what is done with it: [`ECHO`] or [`SINK`].

use std::{
    io::{self, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::Result;
use nix::sys::socket::{Shutdown, shutdown};

use crate::{
    cpu,
    load::{AT_ONCE, LIMIT},
};

/// Everything is sent back, this byte included, until the client's end of stream.
pub(crate) const ECHO: u8 = b'e';
/// Everything is read until the client's end of stream, then answered with the number of bytes, 8 in little endian.
pub(crate) const SINK: u8 = b's';

/// What both ends read and write at once.
pub(crate) const CHUNK: usize = 64 * 1024;

/// Where connections are served.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cpus {
    /// All on one.
    One(usize),
    /// Round trips on one, bulk on another.
    ByKind { echo: usize, sink: usize },
}

/// A running server; dropping it closes its port.
#[derive(Debug)]
pub(crate) struct Server {
    listener: Arc<TcpListener>,
    workers: Vec<JoinHandle<()>>,
}

impl Server {
    /// Serves with a thread for each of the connections that are open at once and some to spare, so that no
    /// connection waits for a thread to be made.
    pub(crate) fn start(listener: TcpListener, cpus: Cpus) -> Self {
        let listener = Arc::new(listener);
        let workers = (0..2 * AT_ONCE)
            .map(|_| {
                let listener = Arc::clone(&listener);
                thread::spawn(move || accept(&listener, cpus))
            })
            .collect();
        Self { listener, workers }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Wakes every thread that waits in accept(2).
        if let Err(error) = shutdown(self.listener.as_raw_fd(), Shutdown::Both) {
            eprintln!("close a port of the load: {error}");
            return;
        }
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                eprintln!("a server thread panicked");
            }
        }
    }
}

fn accept(listener: &TcpListener, cpus: Cpus) {
    if let Cpus::One(cpu) = cpus
        && let Err(error) = cpu::pin(cpu)
    {
        eprintln!("{error:#}");
    }
    let mut buffer = vec![0; CHUNK];
    while let Ok((stream, _)) = listener.accept() {
        if let Err(error) = serve(stream, &mut buffer, cpus) {
            eprintln!("a load connection ended early: {error:#}");
        }
    }
}

/// Serves one connection to its end, on the processor for what it asks for.
pub(crate) fn serve(mut stream: TcpStream, buffer: &mut [u8], cpus: Cpus) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let length = stream.read(buffer)?;
    let Some(kind) = buffer.get(..length).and_then(<[u8]>::first).copied() else { return Ok(()) };
    if let Cpus::ByKind { echo, sink } = cpus {
        cpu::pin(if kind == ECHO { echo } else { sink })?;
    }
    match kind {
        ECHO => echo(&mut stream, buffer, length)?,
        _ => sink(&mut stream, buffer, length as u64)?,
    }
    Ok(())
}

fn echo(stream: &mut TcpStream, buffer: &mut [u8], mut length: usize) -> io::Result<()> {
    while length > 0 {
        stream.write_all(buffer.get(..length).unwrap_or_default())?;
        length = stream.read(buffer)?;
    }
    Ok(())
}

fn sink(stream: &mut TcpStream, buffer: &mut [u8], mut received: u64) -> io::Result<()> {
    loop {
        match stream.read(buffer)? {
            0 => return stream.write_all(&received.to_le_bytes()),
            length => received += length as u64,
        }
    }
}
