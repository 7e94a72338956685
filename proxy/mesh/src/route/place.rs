//! Where something is: at an address, or where a name leads, which the caller has to find out.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

/// An address, or a name that stands for one. `Display` gives `ip:port`, `[ip]:port` or
/// `host:port`, the form of an `:authority`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Here.
    Address(SocketAddr),
    /// Where DNS says.
    Name {
        /// A DNS name, in lower case.
        host: Arc<str>,
        /// The port there.
        port: u16,
    },
}

impl Place {
    /// The address, if it is one.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Address(address) => Some(*address),
            Self::Name { .. } => None,
        }
    }

    /// The name that has to be resolved, if it is one.
    pub fn name(&self) -> Option<&Arc<str>> {
        match self {
            Self::Address(_) => None,
            Self::Name { host, .. } => Some(host),
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        match self {
            Self::Address(address) => address.port(),
            Self::Name { port, .. } => *port,
        }
    }

    /// This place, now that `name` is known to lead to `ip`.
    pub(super) fn resolved(self, name: &str, ip: IpAddr) -> Self {
        match self {
            Self::Name { host, port } if *host == *name => {
                Self::Address((ip.to_canonical(), port).into())
            }
            other => other,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Self {
        Self::Address(address)
    }
}
