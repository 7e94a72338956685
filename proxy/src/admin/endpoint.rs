//! The listening sockets of the endpoints, which another process of the node may be lent.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// Which endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Loopback only.
    Admin,
    /// Metrics.
    Stats,
    /// Readiness.
    Readiness,
}

impl Endpoint {
    /// As the log, errors and other processes call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Stats => "metrics",
            Self::Readiness => "readiness",
        }
    }

    /// The inverse of [`Self::name`].
    pub(crate) fn parse(name: &str) -> Option<Self> {
        [Self::Admin, Self::Stats, Self::Readiness].into_iter().find(|one| one.name() == name)
    }

    pub(super) const fn flag(self) -> &'static str {
        match self {
            Self::Admin => "--admin-port",
            Self::Stats => "--stats-port",
            Self::Readiness => "--readiness-port",
        }
    }
}

/// A port that could not be had.
#[derive(Debug, thiserror::Error)]
#[error("listen on {addr} for {what}: set {flag} to another port, or stop what holds it")]
pub struct BindError {
    addr: SocketAddr,
    what: &'static str,
    flag: &'static str,
    source: io::Error,
}

/// A listening socket from which this process accepts while it is not lent.
#[derive(Clone, Debug)]
pub(crate) struct Socket {
    listener: Arc<TcpListener>,
    lent: watch::Sender<bool>,
}

impl Socket {
    /// Takes the socket of a process before, else binds one.
    pub(super) async fn open(
        endpoint: Endpoint,
        addr: SocketAddr,
        inherited: &mut Vec<(Endpoint, std::net::TcpListener)>,
    ) -> Result<Self, BindError> {
        let found = inherited.iter().position(|(of, socket)| {
            *of == endpoint && socket.local_addr().is_ok_and(|local| local.port() == addr.port())
        });
        let (what, flag) = (endpoint.name(), endpoint.flag());
        let listener =
            match found {
                Some(found) => adopt(inherited.swap_remove(found).1)
                    .map_err(|source| BindError { addr, what, flag, source })?,
                None => bind(addr, what, flag).await?,
            };
        Ok(listener.into())
    }

    /// The next connection, as soon as the socket is not lent. Cancel-safe.
    pub(super) async fn accept(&self) -> io::Result<TcpStream> {
        let mut lent = self.lent.subscribe();
        loop {
            // This half of the channel keeps it open.
            drop(lent.wait_for(|lent| !lent).await);
            tokio::select! {
                biased;
                _ = lent.wait_for(|lent| *lent) => {}
                accepted = self.listener.accept() => return accepted.map(|(stream, _)| stream),
            }
        }
    }

    /// Accepts no more, where the socket has this port.
    pub(super) fn lend(&self, port: u16) -> Option<Arc<TcpListener>> {
        if !self.listener.local_addr().is_ok_and(|local| local.port() == port) {
            return None;
        }
        self.give_up();
        Some(Arc::clone(&self.listener))
    }

    /// Accepts no more.
    pub(super) fn give_up(&self) {
        self.lent.send_replace(true);
    }

    pub(super) fn take_back(&self) {
        self.lent.send_replace(false);
    }
}

impl From<TcpListener> for Socket {
    fn from(listener: TcpListener) -> Self {
        Self { listener: Arc::new(listener), lent: watch::Sender::new(false) }
    }
}

fn adopt(socket: std::net::TcpListener) -> io::Result<TcpListener> {
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket)
}

/// Binds a port that `flag` sets, for `what`.
pub(crate) async fn bind(
    addr: SocketAddr,
    what: &'static str,
    flag: &'static str,
) -> Result<TcpListener, BindError> {
    let bound = match TcpListener::bind(addr).await {
        // A node without IPv6 has no [::], but it has 0.0.0.0.
        Err(e) if addr.is_ipv6() && e.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, addr.port())).await
        }
        other => other,
    };
    bound.map_err(|source| BindError { addr, what, flag, source })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use futures::FutureExt as _;

    use super::*;

    const LOCAL: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    #[tokio::test]
    async fn a_taken_port_names_the_flag() {
        let holder = TcpListener::bind(LOCAL).await.unwrap();
        let addr = holder.local_addr().unwrap();
        let error = Socket::open(Endpoint::Admin, addr, &mut Vec::new()).await.unwrap_err();
        assert!(error.to_string().contains("--admin-port"), "{error}");
    }

    #[tokio::test]
    async fn a_socket_is_accepted_from_by_who_has_it() {
        let elder = Socket::open(Endpoint::Stats, LOCAL, &mut Vec::new()).await.unwrap();
        let addr = elder.listener.local_addr().unwrap();
        assert!(elder.lend(addr.port().wrapping_add(1)).is_none());
        let lent = elder.lend(addr.port()).unwrap();
        let copy = lent.as_fd().try_clone_to_owned().unwrap();
        let mut inherited = vec![(Endpoint::Stats, copy.into())];
        let newer = Socket::open(Endpoint::Stats, addr, &mut inherited).await.unwrap();
        assert!(inherited.is_empty());

        let client = std::net::TcpStream::connect(addr).unwrap();
        assert!(elder.accept().now_or_never().is_none());
        let accepted = newer.accept().await.unwrap();
        assert_eq!(accepted.peer_addr().unwrap(), client.local_addr().unwrap());
        // The successor goes; what is in the queue is not lost.
        let client = std::net::TcpStream::connect(addr).unwrap();
        drop(newer);
        elder.take_back();
        let accepted = elder.accept().await.unwrap();
        assert_eq!(accepted.peer_addr().unwrap(), client.local_addr().unwrap());
    }
}
