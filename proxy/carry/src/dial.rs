//! Every dial of the proxy: from the pod's namespace, with the marks that keep it out of capture.
//!
//! Which address to dial, and whether the source may be preserved, is the caller's decision.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream as StdStream, UdpSocket},
    ops::RangeInclusive,
    time::Duration,
};

use culvert_sys::{
    datagram,
    netns::Netns,
    socket::{self, StreamOptions},
};
use rand::Rng as _;
use tokio::{
    net::{TcpSocket, TcpStream},
    time::timeout,
};

#[cfg(test)]
mod tests;

const fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Source ports of deliveries. In the pod's namespace both the client's own connection and its delivery are between the
/// client's address and the application's, so that one with the port of another would be taken for it. These are above
/// those that Linux gives to clients by default (`ip_local_port_range`).
const DELIVERY_PORTS: RangeInclusive<u16> = 61000..=65535;
/// How many of them are tried: with a quarter of them in use by one client, one in 65,000 dials finds none.
const PORT_TRIES: u32 = 8;

/// What a dialled connection is for; it decides mark and source address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    /// Plain TCP to a destination outside of the mesh, or one that speaks no HBONE.
    Passthrough,
    /// The TCP connection under an HBONE tunnel.
    Hbone,
    /// To an application of this pod, which is to see `client` as the source.
    Delivery {
        /// The address of the client's application, or of the peer that speaks for it.
        client: IpAddr,
    },
    /// To an application of this pod by its loopback interface, which is told of the client in other ways.
    Loopback,
}

/// Dials for one pod.
#[derive(Clone, Debug)]
pub struct Dialer {
    /// The pod's network namespace, where every socket is made.
    pub netns: Netns,
    /// The namespace that the dialling threads are in.
    pub home: Netns,
    /// `SO_MARK` of passthrough and HBONE legs; `None` where the socket's cgroup already tells it is ours.
    pub proxy_mark: Option<u32>,
    /// `SO_MARK` of deliveries, which routes the application's replies back to the proxy.
    pub delivery_mark: Option<u32>,
    /// Bound of one dial.
    pub timeout: Duration,
}

/// Why a dial failed.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No answer in time.
    #[error("connect to {address}: no answer within {}{}", .after.as_secs_f32(), hint(*.leg))]
    Timeout {
        /// What was dialled.
        address: SocketAddr,
        /// What for.
        leg: Leg,
        /// How long it was waited for.
        after: Duration,
    },
    /// The destination answered with a reset: nothing listens there.
    #[error("connect to {address}: refused")]
    Refused {
        /// What was dialled.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No route, or a router on the way said so.
    #[error("connect to {address}: unreachable")]
    Unreachable {
        /// What was dialled.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The connection could not be made for another reason.
    #[error("connect to {address}")]
    Failed {
        /// What was dialled.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No socket could be made in the pod's namespace.
    #[error(
        "open a socket to {address} in the pod's namespace; the proxy needs CAP_NET_ADMIN and CAP_SYS_ADMIN"
    )]
    Socket {
        /// What was to be dialled.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl Dialer {
    /// Connects to `dst`, within [`Dialer::timeout`]. Dropping the future closes the socket.
    pub async fn dial(&self, dst: SocketAddr, leg: Leg) -> Result<TcpStream, DialError> {
        for _ in 0..PORT_TRIES {
            let port = rand::rng().random_range(DELIVERY_PORTS);
            let options = self.options(dst, leg, port);
            match self.connect(dst, leg, options).await {
                Err(error) if options.source.is_some() && error.is_taken_port() => {}
                done => return done,
            }
        }
        // One client has most of the ports: better one that may collide than none.
        self.connect(dst, leg, self.options(dst, leg, 0)).await
    }

    /// A non-blocking UDP socket that sends to `dst` and hears nobody else.
    pub fn datagrams(&self, dst: SocketAddr) -> io::Result<UdpSocket> {
        self.netns.run_from(&self.home, || datagram::connected(dst, self.proxy_mark)).flatten()
    }

    async fn connect(
        &self,
        dst: SocketAddr,
        leg: Leg,
        options: StreamOptions,
    ) -> Result<TcpStream, DialError> {
        let socket = self
            .netns
            .run_from(&self.home, || socket::stream(dst, options))
            .flatten()
            .map_err(|source| DialError::Socket { address: dst, source })?;
        let socket = TcpSocket::from_std_stream(StdStream::from(socket));
        match timeout(self.timeout, socket.connect(dst)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(source)) => Err(self.refused(dst, leg, source)),
            Err(_elapsed) => Err(DialError::Timeout { address: dst, leg, after: self.timeout }),
        }
    }

    fn options(&self, dst: SocketAddr, leg: Leg, port: u16) -> StreamOptions {
        match leg {
            Leg::Passthrough | Leg::Hbone => StreamOptions { mark: self.proxy_mark, source: None },
            Leg::Loopback => StreamOptions { mark: self.delivery_mark, source: None },
            Leg::Delivery { client } => {
                let client = client.to_canonical();
                // A pod that calls itself would connect a socket to its own 4-tuple's mirror.
                let keep = client != dst.ip() && client.is_ipv4() == dst.is_ipv4();
                // Nor do replies to a link-local client find the way back: the kernel sends them to the link.
                let keep = keep && !is_link_local(client);
                let source = keep.then_some(SocketAddr::new(client, port));
                StreamOptions { mark: self.delivery_mark, source }
            }
        }
    }

    fn refused(&self, address: SocketAddr, leg: Leg, source: io::Error) -> DialError {
        match source.kind() {
            io::ErrorKind::ConnectionRefused => DialError::Refused { address, source },
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
                DialError::Unreachable { address, source }
            }
            io::ErrorKind::TimedOut => DialError::Timeout { address, leg, after: self.timeout },
            _ => DialError::Failed { address, source },
        }
    }
}

impl DialError {
    /// Whether another socket has the source port, to the same destination.
    fn is_taken_port(&self) -> bool {
        match self {
            Self::Failed { source, .. } | Self::Socket { source, .. } => {
                matches!(source.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable)
            }
            Self::Timeout { .. } | Self::Refused { .. } | Self::Unreachable { .. } => false,
        }
    }
}

fn hint(leg: Leg) -> &'static str {
    match leg {
        Leg::Hbone => "; does a network policy block its HBONE port?",
        Leg::Passthrough | Leg::Delivery { .. } | Leg::Loopback => "",
    }
}
