//! Clients: blocking sockets used inside `Netns::run`, with a deadline on every call.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::{
    payload::{Digest, Source},
    poll,
};

/// What a socket call may take.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Connects; [`LIMIT`] bounds it and every later read and write.
pub fn dial(to: SocketAddr) -> io::Result<TcpStream> {
    dial_within(to, LIMIT)
}

/// Connects; `limit` bounds it and every later read and write.
pub fn dial_within(to: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    connect(Domain::for_address(to), to, limit)
}

/// Connects an IPv6 socket to `to`, an IPv4 address in its v4-mapped form.
pub fn dial_mapped(to: SocketAddr) -> io::Result<TcpStream> {
    let ip = match to.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    connect(Domain::IPV6, SocketAddr::new(ip.into(), to.port()), LIMIT)
}

fn connect(domain: Domain, to: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if domain == Domain::IPV6 {
        socket.set_only_v6(false)?;
    }
    finish(socket, to, limit)
}

fn finish(socket: Socket, to: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let limit = poll::patient(limit);
    socket.connect_timeout(&SockAddr::from(to), limit)?;
    socket.set_read_timeout(Some(limit))?;
    socket.set_write_timeout(Some(limit))?;
    Ok(socket.into())
}

/// Connects a socket that is bound to `interface`.
pub fn dial_through(interface: &str, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind_device(Some(interface.as_bytes()))?;
    finish(socket, to, LIMIT)
}

/// Connects a socket that `prepare` has marked, bound or otherwise set up.
pub fn dial_prepared(
    to: SocketAddr,
    prepare: impl FnOnce(&Socket) -> io::Result<()>,
) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    prepare(&socket)?;
    finish(socket, to, LIMIT)
}

/// Connects from `from`, also where other sockets have that address.
pub fn dial_from(from: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    dial_prepared(to, |socket| {
        socket.set_reuse_address(true)?;
        socket.bind(&from.into())
    })
}

/// Connects, sends `text`, ends its direction and returns all that came back.
pub fn exchange(to: SocketAddr, text: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = dial(to)?;
    converse(&mut stream, text)
}

/// Sends `text`, ends its direction and returns all that comes back.
pub fn converse(stream: &mut TcpStream, text: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(text)?;
    stream.shutdown(Shutdown::Write)?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply)?;
    Ok(reply)
}

/// Sends `text` and reads as many bytes back, without ending anything.
pub fn ping(stream: &mut TcpStream, text: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(text)?;
    let mut reply = vec![0; text.len()];
    stream.read_exact(&mut reply)?;
    Ok(reply)
}

/// Sends `length` bytes of [`Source`], ends its direction, and returns the reply.
pub fn upload(stream: &mut TcpStream, length: usize) -> io::Result<String> {
    let mut source = Source::new(length);
    while let Some(chunk) = source.next_chunk() {
        stream.write_all(chunk)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply)
}

/// Reads to the end of stream.
pub fn download(stream: &mut TcpStream) -> io::Result<Digest> {
    let mut digest = Digest::default();
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let length = stream.read(&mut chunk)?;
        if length == 0 {
            return Ok(digest);
        }
        digest.update(chunk.get(..length).unwrap_or_default());
    }
}

/// Closes the connection with a RST.
pub fn reset(stream: TcpStream) -> io::Result<()> {
    let socket = Socket::from(stream);
    socket.set_linger(Some(Duration::ZERO))?;
    drop(socket);
    Ok(())
}

/// Waits for the other end to do something and says what: bytes, end of stream (empty), or the error.
pub fn next_event(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut chunk = vec![0; 64 * 1024];
    let length = stream.read(&mut chunk)?;
    chunk.truncate(length);
    Ok(chunk)
}

/// How many TCP sockets of the calling thread's namespace are in `state`, as `/proc/net/tcp` spells it in hex.
pub fn sockets_in_state(state: &str) -> usize {
    ["tcp", "tcp6"]
        .iter()
        .filter_map(|table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")).ok())
        .map(|table| {
            table.lines().filter(|line| line.split_whitespace().nth(3) == Some(state)).count()
        })
        .sum()
}

/// A counter of TCP in the calling thread's namespace, as `/proc/net/netstat` calls it.
pub fn tcp_counter(counter: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap_or_default();
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    let found = pairs.find(|(name, _)| *name == counter);
    found.and_then(|(_, value)| value.parse().ok()).unwrap_or_default()
}

/// Counts SYNs that were sent again because no answer came in time.
pub const REPEATED_SYNS: &str = "TCPSynRetrans";

/// The state `LAST_ACK` in `/proc/net/tcp`.
pub const LAST_ACK: &str = "09";
