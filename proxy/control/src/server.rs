//! A server of the control plane as it was configured, and connections to it: TCP, TLS, HTTP/2.
//! What is said over a connection, and when to make a new one, is left to its user.

mod address;
mod connection;
mod credentials;
mod verify;

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

pub use self::address::{Address, AddressError};
pub(crate) use self::connection::Channel;
pub use self::credentials::{CredentialsError, Roots, Token};

/// For all addresses of a host together.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// For TLS and the start of HTTP/2.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Where a server is, how it proves itself, and what is shown to it.
#[derive(Clone, Debug)]
pub struct Server {
    /// Where it listens.
    pub address: Address,
    /// Whose certificates prove it.
    pub roots: Roots,
    /// Another name that its certificate may have instead of the address's.
    pub alternative_name: Option<String>,
    /// What proves this node. `None`: nothing.
    pub token: Option<Token>,
    /// The cluster this node is in, as a header of each call.
    pub cluster_id: String,
    /// Further headers of each call.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// Why there is no connection to a server.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Its name has no address.
    #[error("resolve {address}")]
    Resolve {
        /// The server.
        address: Address,
        /// The resolver's reason.
        source: io::Error,
    },
    /// None of its addresses answers.
    #[error("connect to {address}")]
    Connect {
        /// The server.
        address: Address,
        /// What the last of its addresses said.
        source: io::Error,
    },
    /// It took too long.
    #[error("connect to {address}: no {what} within {} s", deadline.as_secs())]
    Deadline {
        /// The server.
        address: Address,
        /// What was awaited.
        what: &'static str,
        /// How long.
        deadline: Duration,
    },
    /// Roots or token cannot be used.
    #[error("prepare a connection to {address}")]
    Credentials {
        /// The server.
        address: Address,
        /// Which file, and what is wrong with it.
        source: CredentialsError,
    },
    /// It did not prove itself, or TLS failed in another way.
    #[error("handshake with {address}")]
    Tls {
        /// The server.
        address: Address,
        /// What TLS said.
        source: io::Error,
    },
    /// It does not speak HTTP/2.
    #[error("speak HTTP/2 with {address}")]
    Http {
        /// The server.
        address: Address,
        /// What HTTP/2 said.
        source: hyper::Error,
    },
}
