//! TCP sockets with the options that the data path needs; whoever calls decides addresses and marks.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
    time::Duration,
};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// Istio's keepalive on every proxied socket: first probe after 180 s, then each 180 s, 9 times.
const KEEPALIVE: Duration = Duration::from_mins(3);
const KEEPALIVE_RETRIES: u32 = 9;

/// `SO_NETNS_COOKIE` of `asm-generic/socket.h`, Linux 5.14; libc lacks it for some targets.
const SO_NETNS_COOKIE: libc::c_int = 71;
/// `SO_ORIGINAL_DST` of `linux/netfilter_ipv4.h`, and `IP6T_SO_ORIGINAL_DST`, which has the same number.
const SO_ORIGINAL_DST: libc::c_int = 80;

/// How to open a listener.
#[derive(Clone, Copy, Debug)]
pub struct ListenOptions {
    /// `IP_TRANSPARENT`/`IPV6_TRANSPARENT`: bind to, and answer for, addresses that are not local.
    pub transparent: bool,
    /// `SO_REUSEPORT`: share the port with another process of the same user.
    pub reuse_port: bool,
    /// Length of the accept queue.
    pub backlog: i32,
}

/// Opens a non-blocking listener in the calling thread's namespace.
///
/// `SO_REUSEADDR` is always set: accepted sockets inherit it, and without it an application could not open its own
/// listener again while a captured connection holds its port. An IPv6 listener takes IPv6 only.
pub fn listen(addr: SocketAddr, options: ListenOptions) -> io::Result<TcpListener> {
    let socket = tcp(addr)?;
    socket.set_reuse_address(true)?;
    if options.reuse_port {
        socket.set_reuse_port(true)?;
    }
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if options.transparent {
        set_transparent(&socket, addr)?;
    }
    socket.bind(&addr.into())?;
    socket.listen(options.backlog)?;
    Ok(socket.into())
}

/// How to open a socket that will dial.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOptions {
    /// `SO_MARK`.
    pub mark: Option<u32>,
    /// Dial from this address, which need not be local. Port 0 is the kernel's choice when it connects; any other may be
    /// shared with sockets to other destinations, and `EADDRINUSE` or `EADDRNOTAVAIL` says that it cannot be had.
    pub source: Option<SocketAddr>,
}

/// Opens a non-blocking TCP socket for dialling `dst` in the calling thread's namespace, with no delay and keepalive.
pub fn stream(dst: SocketAddr, options: StreamOptions) -> io::Result<Socket> {
    let socket = tcp(dst)?;
    socket.set_tcp_nodelay(true)?;
    keepalive(&socket)?;
    if let Some(mark) = options.mark {
        socket.set_mark(mark)?;
    }
    if let Some(source) = options.source {
        set_transparent(&socket, dst)?;
        // Without either a bind would hold its port for all destinations, and one client could use up all of them.
        if source.port() == 0 {
            set_int(socket.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
        } else {
            socket.set_reuse_address(true)?;
        }
        socket.bind(&source.into())?;
    }
    Ok(socket)
}

/// Sets no delay and keepalive on an accepted socket.
pub fn tune(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    keepalive(&socket)
}

/// Makes the coming close a reset: the peer gets RST, and data not sent yet is dropped.
pub fn reset_on_close(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_linger(Some(Duration::ZERO))
}

/// An IPv4 address in its v4-mapped form becomes the IPv4 address; all others stay.
pub fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, addr.port()),
        // Whole: a link-local address is nothing without its scope.
        IpAddr::V6(_) => addr,
    }
}

/// The destination before an iptables `REDIRECT`.
pub fn original_dst(socket: &impl AsFd) -> io::Result<SocketAddr> {
    let fd = socket.as_fd();
    match original_dst_v4(fd) {
        Ok(addr) => Ok(addr),
        Err(_) => original_dst_v6(fd),
    }
}

/// The cookie of the namespace that a socket lives in; `None` on kernels before 5.14.
pub fn netns_cookie(socket: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    match option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE, 0_u64) {
        Ok(cookie) => Ok(Some(cookie)),
        Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        Err(e) => Err(e),
    }
}

fn tcp(addr: SocketAddr) -> io::Result<Socket> {
    Socket::new(Domain::for_address(addr), Type::STREAM.nonblocking(), Some(Protocol::TCP))
}

fn keepalive(socket: &Socket) -> io::Result<()> {
    let schedule = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&schedule)
}

pub(crate) fn set_transparent(socket: &Socket, addr: SocketAddr) -> io::Result<()> {
    if addr.is_ipv4() {
        socket.set_ip_transparent_v4(true)
    } else {
        set_int(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, 1)
    }
}

fn original_dst_v4(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    // SAFETY: all-zero bytes are a valid `sockaddr_in`.
    #[expect(unsafe_code, reason = "libc's structs have no safe constructor")]
    let zero: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    let raw = option(fd, libc::SOL_IP, SO_ORIGINAL_DST, zero)?;
    let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
    Ok(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
}

fn original_dst_v6(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    // SAFETY: all-zero bytes are a valid `sockaddr_in6`.
    #[expect(unsafe_code, reason = "libc's structs have no safe constructor")]
    let zero: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    let raw = option(fd, libc::SOL_IPV6, SO_ORIGINAL_DST, zero)?;
    let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
    Ok(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), 0, raw.sin6_scope_id).into())
}

/// `getsockopt(2)` for a plain value; `into` must have no padding and no invalid bit pattern.
fn option<T: Copy>(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    mut into: T,
) -> io::Result<T> {
    let mut len = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    // SAFETY: `into` is valid for `len` bytes, and the kernel writes no more than that.
    #[expect(unsafe_code, reason = "neither nix nor socket2 reads these options")]
    let rc = unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut into).cast(), &raw mut len)
    };
    if rc == 0 { Ok(into) } else { Err(io::Error::last_os_error()) }
}

fn set_int(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(0);
    // SAFETY: `value` lives through the call and `len` is its size.
    #[expect(unsafe_code, reason = "neither nix nor socket2 sets these options")]
    let rc =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    const PLAIN: ListenOptions =
        ListenOptions { transparent: false, reuse_port: false, backlog: 16 };

    fn accept(listener: &TcpListener) -> std::net::TcpStream {
        listener.set_nonblocking(false).unwrap();
        listener.accept().unwrap().0
    }

    #[test]
    fn reset_on_close_is_seen_as_a_reset() {
        let listener = listen(ANY, PLAIN).unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = accept(&listener);
        reset_on_close(&server).unwrap();
        drop(server);
        let error = client.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_dialled_socket_has_no_delay_and_keepalive() {
        let listener = listen(ANY, PLAIN).unwrap();
        let socket = stream(listener.local_addr().unwrap(), StreamOptions::default()).unwrap();
        assert!(socket.tcp_nodelay().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), KEEPALIVE_RETRIES);
    }

    #[test]
    fn a_source_that_is_not_local_can_be_bound() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: IP_TRANSPARENT needs CAP_NET_ADMIN");
            return;
        }
        for (source, dst) in [("192.0.2.7", "192.0.2.8:1"), ("2001:db8::7", "[2001:db8::8]:1")] {
            for port in [0, 61234] {
                let source = SocketAddr::new(source.parse().unwrap(), port);
                let options = StreamOptions { mark: Some(0x53a), source: Some(source) };
                let socket = stream(dst.parse().unwrap(), options).unwrap();
                assert_eq!(socket.mark().unwrap(), 0x53a);
                assert_eq!(socket.local_addr().unwrap().as_socket().unwrap(), source);
                let again = stream(dst.parse().unwrap(), options);
                assert!(again.is_ok(), "a port was held for all destinations");
            }
        }
    }

    #[test]
    fn a_transparent_listener_binds_a_foreign_address() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: IP_TRANSPARENT needs CAP_NET_ADMIN");
            return;
        }
        let options = ListenOptions { transparent: true, ..PLAIN };
        for addr in ["192.0.0.8:0", "[100::8]:0"] {
            listen(addr.parse().unwrap(), options).unwrap();
        }
    }

    #[test]
    fn a_socket_without_redirect_has_no_original_destination() {
        let listener = listen(ANY, PLAIN).unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(b"x").unwrap();
        assert!(original_dst(&client).is_err());
    }

    #[test]
    fn mapped_addresses_become_ipv4() {
        let mapped: SocketAddr = "[::ffff:192.0.2.1]:80".parse().unwrap();
        assert_eq!(canonical(mapped), "192.0.2.1:80".parse().unwrap());
    }
}
