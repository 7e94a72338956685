//! A pod's listeners, and the captured connections that they accept.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::{Arc, Weak},
    time::Duration,
};

use culvert_abi::{HBONE_PORT, Slot};
use culvert_sys::{
    netns::Netns,
    socket::{self, ListenOptions},
};
use nix::errno::Errno;
use tokio::net::TcpStream;

use crate::{
    error::{CaptureError, InNetns as _},
    interfaces::Family,
    node::Steering,
    pod::Addresses,
};

/// Never routed (RFC 7600 §4.8, RFC 6666 §2): a listener that is found by its socket alone cannot be reached by a packet
/// that BPF did not give it, and leaves all addresses of the pod to the pod.
const UNREACHABLE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 8));
const UNREACHABLE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 8));

/// Istio's ports, where iptables rules redirect to.
const REDIRECT_OUTBOUND: u16 = 15001;
const REDIRECT_INBOUND: u16 = 15006;
const REDIRECT_DNS: u16 = 15053;

const BACKLOG: i32 = 4096;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a listener is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Connections that the pod makes.
    Outbound,
    /// Plaintext connections to the pod.
    Inbound,
    /// HBONE connections to the pod's port 15008.
    Hbone,
    /// Connections that the pod makes to name servers, where its DNS is captured; they come with the pod's
    /// [`Dns`](crate::Dns).
    Dns,
}

impl Role {
    /// Those that a pod has; rules of others redirect no DNS to us.
    const fn all(steering: Steering) -> &'static [Self] {
        match steering {
            Steering::Ebpf => &[Self::Outbound, Self::Inbound, Self::Hbone, Self::Dns],
            Steering::Redirect => &[Self::Outbound, Self::Inbound, Self::Hbone],
        }
    }

    const fn slot(self, family: Family) -> Slot {
        match (self, family) {
            (Self::Outbound, Family::V4) => Slot::OutboundV4,
            (Self::Outbound, Family::V6) => Slot::OutboundV6,
            (Self::Inbound, Family::V4) => Slot::InboundV4,
            (Self::Inbound, Family::V6) => Slot::InboundV6,
            (Self::Hbone, Family::V4) => Slot::HboneV4,
            (Self::Hbone, Family::V6) => Slot::HboneV6,
            (Self::Dns, Family::V4) => Slot::DnsTcpV4,
            (Self::Dns, Family::V6) => Slot::DnsTcpV6,
        }
    }

    const fn redirect_port(self) -> u16 {
        match self {
            Self::Outbound => REDIRECT_OUTBOUND,
            Self::Inbound => REDIRECT_INBOUND,
            Self::Hbone => HBONE_PORT,
            Self::Dns => REDIRECT_DNS,
        }
    }
}

/// A connection as the application on one side of it meant it.
#[derive(Debug)]
pub struct Captured {
    /// Towards whoever connected.
    pub stream: TcpStream,
    /// Who connected; IPv4 never in its v4-mapped form.
    pub peer: SocketAddr,
    /// Where it wanted to go, in the same form.
    pub orig_dst: SocketAddr,
}

/// One listener in a pod's network namespace. Once it is dropped its slot is empty, and new connections are held.
#[derive(Debug)]
pub struct Listener {
    role: Role,
    slot: Slot,
    steering: Steering,
    addresses: Addresses,
    socket: Arc<tokio::net::TcpListener>,
}

/// What puts a socket into its slot, for as long as there is one.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) slot: Slot,
    socket: PlaceOf,
}

#[derive(Clone, Debug)]
enum PlaceOf {
    Listener(Weak<tokio::net::TcpListener>),
    Queries(Weak<tokio::net::UdpSocket>),
}

impl Place {
    pub(crate) fn of_queries(slot: Slot, socket: &Arc<tokio::net::UdpSocket>) -> Self {
        Self { slot, socket: PlaceOf::Queries(Arc::downgrade(socket)) }
    }

    /// The socket, unless it has been closed.
    pub(crate) fn socket(&self) -> Option<Placed> {
        Some(match &self.socket {
            PlaceOf::Listener(socket) => Placed::Listener(socket.upgrade()?),
            PlaceOf::Queries(socket) => Placed::Queries(socket.upgrade()?),
        })
    }
}

/// A socket that is open for as long as the value lives.
#[derive(Debug)]
pub(crate) enum Placed {
    Listener(Arc<tokio::net::TcpListener>),
    Queries(Arc<tokio::net::UdpSocket>),
}

impl AsRawFd for Placed {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Listener(socket) => socket.as_raw_fd(),
            Self::Queries(socket) => socket.as_raw_fd(),
        }
    }
}

impl Listener {
    /// What the listener is for.
    pub const fn role(&self) -> Role {
        self.role
    }

    /// The next connection. Failures that concern one connection are passed over, and while the process is out of
    /// descriptors or memory it waits; an error means that the listener is of no more use. Cancel-safe.
    pub async fn accept(&self) -> io::Result<Captured> {
        let mut exhaustion = Exhaustion::default();
        loop {
            match self.socket.accept().await {
                Ok((stream, peer)) => match self.captured(stream, peer) {
                    Ok(captured) => return Ok(captured),
                    Err(error) => {
                        tracing::debug!(%error, role = ?self.role, "accepted connection is of no use");
                    }
                },
                Err(e) => match Trouble::of(&e) {
                    Trouble::Connection => {}
                    Trouble::Exhausted => exhaustion.pause(&e, "accept").await,
                    Trouble::Listener => return Err(e),
                },
            }
        }
    }

    pub(crate) fn place(&self) -> Place {
        Place { slot: self.slot, socket: PlaceOf::Listener(Arc::downgrade(&self.socket)) }
    }

    fn captured(&self, stream: TcpStream, peer: SocketAddr) -> io::Result<Captured> {
        let local = socket::canonical(stream.local_addr()?);
        let orig_dst = match self.steering {
            Steering::Ebpf if matches!(self.role, Role::Outbound | Role::Dns) => {
                self.scoped(local, peer.ip())
            }
            Steering::Ebpf => local,
            // A transparent rule changes no address, so that there is none to recover.
            Steering::Redirect => socket::original_dst(&stream).map_or(local, socket::canonical),
        };
        if self.steering == Steering::Redirect
            && self.role != Role::Hbone
            && orig_dst.port() == self.role.redirect_port()
            && orig_dst == local
        {
            return Err(io::Error::other("it was made to the listener itself"));
        }
        socket::tune(&stream)?;
        Ok(Captured { stream, peer: socket::canonical(peer), orig_dst })
    }

    /// A link-local destination means a host on the link that the pod dialled it by, not on `lo` that it has come by:
    /// the link of the address that the pod has chosen as source. The scope is 0 where several links have that.
    fn scoped(&self, dst: SocketAddr, source: IpAddr) -> SocketAddr {
        match dst {
            SocketAddr::V6(mut dst) if dst.ip().is_unicast_link_local() => {
                dst.set_scope_id(self.addresses.interface_of(source).unwrap_or(0));
                dst.into()
            }
            _ => dst,
        }
    }
}

/// Pauses, each longer than the one before, while the process lacks what the kernel has.
#[derive(Debug)]
pub(crate) struct Exhaustion {
    pause: Duration,
}

impl Default for Exhaustion {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE }
    }
}

impl Exhaustion {
    pub(crate) async fn pause(&mut self, error: &io::Error, attempt: &'static str) {
        tracing::warn!(%error, pause = ?self.pause, "cannot {attempt}");
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

/// What a failed accept(2) or recvmsg(2) is about.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    Connection,
    Exhausted,
    Listener,
}

impl Trouble {
    pub(crate) fn of(error: &io::Error) -> Self {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM) => Self::Exhausted,
            Some(Errno::EBADF | Errno::EINVAL | Errno::ENOTSOCK | Errno::EOPNOTSUPP) | None => {
                Self::Listener
            }
            // accept(2) also reports what had happened to the connection before it was accepted.
            Some(_) => Self::Connection,
        }
    }
}

/// Opens the pod's listeners; none for IPv6 where the kernel has none. Must run in a tokio runtime.
pub(crate) fn open(
    netns: &Netns,
    steering: Steering,
    addresses: &Addresses,
) -> Result<Vec<Listener>, CaptureError> {
    let pod = netns.inode();
    let mut listeners = Vec::new();
    for family in Family::ALL {
        for role in Role::all(steering).iter().copied() {
            let (addr, options) = plan(role, family, steering);
            let socket = match netns.run(|| socket::listen(addr, options)).and_then(|s| s) {
                Ok(socket) => socket,
                Err(e)
                    if family == Family::V6
                        && e.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) =>
                {
                    continue;
                }
                Err(e) => return Err(e).in_netns(pod, format!("listen on {addr}")),
            };
            check_netns(&socket, netns).in_netns(pod, "check the listener")?;
            let socket = tokio::net::TcpListener::from_std(socket)
                .in_netns(pod, format!("listen on {addr}"))?;
            let (slot, socket) = (role.slot(family), Arc::new(socket));
            let addresses = addresses.clone();
            listeners.push(Listener { role, slot, steering, addresses, socket });
        }
    }
    Ok(listeners)
}

fn plan(role: Role, family: Family, steering: Steering) -> (SocketAddr, ListenOptions) {
    // No SO_MARK: the accepted socket must inherit the SYN's, so that every packet of it finds `lo`.
    let options = ListenOptions { transparent: true, reuse_port: false, backlog: BACKLOG };
    match steering {
        Steering::Ebpf => (SocketAddr::new(unreachable(family), 0), options),
        Steering::Redirect => {
            let ip = match family {
                Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            let options = ListenOptions { reuse_port: true, ..options };
            (SocketAddr::new(ip, role.redirect_port()), options)
        }
    }
}

/// Where a socket that is found by our programs alone is bound to.
pub(crate) const fn unreachable(family: Family) -> IpAddr {
    match family {
        Family::V4 => UNREACHABLE_V4,
        Family::V6 => UNREACHABLE_V6,
    }
}

/// The kernel does not ask whether a socket in a SOCKMAP lives in the namespace whose connections it is given.
pub(crate) fn check_netns(socket: &impl AsFd, netns: &Netns) -> io::Result<()> {
    if socket::netns_cookie(socket.as_fd())? == netns.cookie()? {
        Ok(())
    } else {
        Err(io::Error::other("it lives in another network namespace"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_broken_listener_ends_the_accept_loop() {
        let table = [
            (Errno::EMFILE, Trouble::Exhausted),
            (Errno::ENOMEM, Trouble::Exhausted),
            (Errno::ECONNABORTED, Trouble::Connection),
            (Errno::EHOSTUNREACH, Trouble::Connection),
            (Errno::EINVAL, Trouble::Listener),
        ];
        for (errno, want) in table {
            assert_eq!(Trouble::of(&errno.into()), want, "{errno}");
        }
    }

    #[test]
    fn steering_decides_where_a_pod_listens() {
        let addr = |role, family, steering| plan(role, family, steering).0.to_string();
        assert_eq!(addr(Role::Hbone, Family::V4, Steering::Ebpf), "192.0.0.8:0");
        assert_eq!(addr(Role::Outbound, Family::V6, Steering::Ebpf), "[100::8]:0");
        assert_eq!(addr(Role::Inbound, Family::V4, Steering::Redirect), "0.0.0.0:15006");
        assert_eq!(addr(Role::Hbone, Family::V6, Steering::Redirect), "[::]:15008");
    }
}
