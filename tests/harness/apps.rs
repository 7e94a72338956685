//! Servers that run in a pod's namespace, one for each way an application can behave on a connection.
//!
//! Leaves the other end to `client`.

use std::{
    net::{Ipv6Addr, SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::oneshot,
};

use crate::{http, netns::Netns, payload, poll};

/// What a server-first app says before it has heard anything.
pub const GREETING: &[u8] = b"220 culvert test app, go ahead\r\n";

/// What an app does with each connection.
#[derive(Debug, Clone)]
pub enum Behaviour {
    /// Sends back what it reads until the client's end of stream, then ends its own.
    Echo,
    /// Sends [`GREETING`] first, then does as `Echo`.
    ServerFirst,
    /// Reads to the client's end of stream, only then replies with what [`payload::Digest`] it saw, and ends.
    Sink,
    /// Sends this many bytes of [`payload::Source`], then ends its direction and reads to the client's end.
    Source(usize),
    /// Sends [`GREETING`] and ends its direction at once, then reads on to the client's end of stream.
    HalfClose,
    /// Reads one chunk and resets the connection.
    ResetAfterRead,
    /// Reads one chunk, replies with it and closes both directions before the client does.
    CloseFirst,
    /// Answers HTTP/1.1 requests with this text.
    Http(String),
    /// An HTTP/1.1 forward proxy that knows CONNECT only: dials this, or else what it is asked for, and carries bytes
    /// both ways.
    ConnectProxy(Option<SocketAddr>),
}

/// How a connection ended, as the app saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client ended its direction.
    Eof,
    /// The client reset the connection.
    Reset,
    /// The app did it itself.
    Own,
    /// Any other error.
    Failed,
}

/// What the app knows of one connection.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// The client's address, as `getpeername` tells it; v4-mapped addresses as IPv4.
    pub peer: SocketAddr,
    /// Bytes read.
    pub read: usize,
    /// `None` while it is open.
    pub end: Option<End>,
}

/// A running app; dropping it closes its listener and connections.
#[derive(Debug)]
pub struct App {
    port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl App {
    /// Starts an app on a free port of all addresses of both families.
    pub fn start(netns: &Netns, behaviour: Behaviour) -> Result<Self> {
        Self::start_on(netns, 0, behaviour)
    }

    /// Starts an app on `port` of all addresses of both families.
    pub fn start_on(netns: &Netns, port: u16, behaviour: Behaviour) -> Result<Self> {
        let listener =
            netns.run(|| listen(port)).with_context(|| format!("listen on port {port}"))?;
        let port = listener.local_addr()?.port();
        let seen = Arc::default();
        let (stop, stopped) = oneshot::channel();
        let log = Arc::clone(&seen);
        let thread = netns.start(move || run(listener, &behaviour, &log, stopped));
        Ok(Self { port, seen, stop: Some(stop), thread: Some(thread) })
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// All connections so far, in the order of their arrival.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.seen).clone()
    }

    /// Waits until `count` connections have ended and returns them all.
    ///
    /// # Panics
    /// When they have not within [`poll::SOON`].
    #[track_caller]
    pub fn ended(&self, count: usize) -> Vec<Seen> {
        let what = format!("{count} connections to end at the app");
        poll::until(poll::SOON, &what, || {
            let seen = self.seen();
            (seen.iter().filter(|one| one.end.is_some()).count() >= count).then_some(seen)
        })
    }
}

impl Drop for App {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("the app on port {} panicked", self.port);
        }
    }
}

fn lock(seen: &Mutex<Vec<Seen>>) -> std::sync::MutexGuard<'_, Vec<Seen>> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `SO_REUSEADDR` as servers do it, and a backlog for many connections at once.
fn listen(port: u16) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_only_v6(false)?;
    socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).into())?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn run(
    listener: TcpListener,
    behaviour: &Behaviour,
    seen: &Arc<Mutex<Vec<Seen>>>,
    stopped: oneshot::Receiver<()>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime needs only file descriptors");
    runtime.block_on(async {
        let listener =
            tokio::net::TcpListener::from_std(listener).expect("the listener is nonblocking");
        let serve = async {
            loop {
                let Ok((stream, peer)) = listener.accept().await else {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                let index = {
                    let mut seen = lock(seen);
                    seen.push(Seen { peer, read: 0, end: None });
                    seen.len() - 1
                };
                let (behaviour, seen) = (behaviour.clone(), Arc::clone(seen));
                tokio::spawn(async move {
                    let mut connection = Connection { stream, seen: &seen, index };
                    let end = match behaviour {
                        Behaviour::Http(text) => {
                            http::serve(connection.stream, peer, &text).await;
                            End::Own
                        }
                        other => connection.act(&other).await.unwrap_or_else(|e| ending(&e)),
                    };
                    if let Some(one) = lock(&seen).get_mut(index) {
                        one.end = Some(end);
                    }
                });
            }
        };
        tokio::select! {
            () = serve => {}
            _ = stopped => {}
        }
    });
}

fn ending(error: &std::io::Error) -> End {
    match error.kind() {
        std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => End::Reset,
        _ => End::Failed,
    }
}

struct Connection<'a> {
    stream: TcpStream,
    seen: &'a Mutex<Vec<Seen>>,
    index: usize,
}

impl Connection<'_> {
    async fn act(&mut self, behaviour: &Behaviour) -> std::io::Result<End> {
        match behaviour {
            Behaviour::Echo => self.echo().await,
            Behaviour::ServerFirst => {
                self.stream.write_all(GREETING).await?;
                self.echo().await
            }
            Behaviour::Sink => {
                let mut digest = payload::Digest::default();
                self.drain(|chunk| digest.update(chunk)).await?;
                self.stream.write_all(digest.report().as_bytes()).await?;
                self.stream.shutdown().await?;
                Ok(End::Eof)
            }
            Behaviour::Source(length) => {
                let mut source = payload::Source::new(*length);
                while let Some(chunk) = source.next_chunk() {
                    self.stream.write_all(chunk).await?;
                }
                self.stream.shutdown().await?;
                self.drain(|_| ()).await
            }
            Behaviour::HalfClose => {
                self.stream.write_all(GREETING).await?;
                self.stream.shutdown().await?;
                self.drain(|_| ()).await
            }
            Behaviour::ResetAfterRead => {
                self.read(&mut [0; 1024]).await?;
                self.stream.set_zero_linger()?;
                Ok(End::Own)
            }
            Behaviour::CloseFirst => {
                let mut chunk = [0; 1024];
                let length = self.read(&mut chunk).await?;
                self.stream.write_all(chunk.get(..length).unwrap_or_default()).await?;
                Ok(End::Own)
            }
            Behaviour::ConnectProxy(onward) => self.forward(*onward).await,
            Behaviour::Http(_) => Ok(End::Own),
        }
    }

    async fn forward(&mut self, onward: Option<SocketAddr>) -> std::io::Result<End> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            if self.read(&mut byte).await? == 0 {
                return Ok(End::Eof);
            }
            head.extend_from_slice(&byte);
        }
        let head = String::from_utf8_lossy(&head);
        let target = head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next());
        let Some(target) = target else {
            self.stream.write_all(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n").await?;
            return Ok(End::Own);
        };
        let mut onward = match onward {
            Some(onward) => TcpStream::connect(onward).await?,
            None => TcpStream::connect(target).await?,
        };
        self.stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        tokio::io::copy_bidirectional(&mut self.stream, &mut onward).await?;
        Ok(End::Eof)
    }

    async fn echo(&mut self) -> std::io::Result<End> {
        let mut chunk = vec![0; 64 * 1024];
        loop {
            let length = self.read(&mut chunk).await?;
            if length == 0 {
                self.stream.shutdown().await?;
                return Ok(End::Eof);
            }
            self.stream.write_all(chunk.get(..length).unwrap_or_default()).await?;
        }
    }

    async fn drain(&mut self, mut each: impl FnMut(&[u8])) -> std::io::Result<End> {
        let mut chunk = vec![0; 64 * 1024];
        loop {
            let length = self.read(&mut chunk).await?;
            if length == 0 {
                return Ok(End::Eof);
            }
            each(chunk.get(..length).unwrap_or_default());
        }
    }

    async fn read(&mut self, chunk: &mut [u8]) -> std::io::Result<usize> {
        let length = self.stream.read(chunk).await?;
        if let Some(one) = lock(self.seen).get_mut(self.index) {
            one.read += length;
        }
        Ok(length)
    }
}
