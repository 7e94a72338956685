//! Why an inbound connection was refused before policy was asked.

use std::io;

use culvert_abi::MARK_MASK;
use culvert_carry::{dial::DialError, hbone::server::AcceptError};
use culvert_tls::HandshakeError;
use http::Method;
use socket2::SockRef;
use tokio::net::TcpStream;

/// The delivery of one connection was captured as another.
#[derive(Debug, thiserror::Error)]
#[error("the proxy's own delivery was captured; is mark_own attached to this process's cgroup?")]
pub(super) struct Looped;

impl Looped {
    /// Whether `stream` was opened by our own delivery: accepted sockets inherit the mark of the SYN
    /// (`tcp_fwmark_accept`), and a mark never crosses from one namespace to another.
    pub(super) fn is(stream: &TcpStream, delivery_mark: Option<u32>) -> bool {
        let mark = SockRef::from(stream).mark().ok().map(|mark| mark & MARK_MASK);
        delivery_mark.is_some() && mark == delivery_mark
    }
}

/// As many peers as may be are in their handshake.
#[derive(Debug, thiserror::Error)]
#[error("too many peers are in their handshake with this pod")]
pub(super) struct Overloaded;

/// The peer did not become one.
#[derive(Debug, thiserror::Error)]
pub(super) enum Handshake {
    #[error("TLS handshake with the peer")]
    Tls(#[source] HandshakeError),
    #[error(transparent)]
    Timeout(AcceptError),
}

impl From<AcceptError> for Handshake {
    fn from(error: AcceptError) -> Self {
        match error {
            AcceptError::Tls(error) => Self::Tls(error.into()),
            AcceptError::TlsTimeout(_) => Self::Timeout(error),
        }
    }
}

/// The peer gave the CONNECT up.
#[derive(Debug, thiserror::Error)]
#[error("the peer gave the request up before it was answered")]
pub(super) struct Withdrawn;

/// The peer's certificate was revoked while it was connected.
#[derive(Debug, thiserror::Error)]
#[error("peer certificate revoked by CRL")]
pub(super) struct Revoked;

/// The request is no CONNECT.
#[derive(Debug, thiserror::Error)]
#[error("{method} is not a plain CONNECT with an authority")]
pub(super) struct NotConnect {
    pub(super) method: Method,
}

/// What is not delivered.
#[derive(Debug, thiserror::Error)]
pub(super) enum Undeliverable {
    #[error(
        "the authority names a service without a virtual address, so that its connection has no destination to tell"
    )]
    NoAddress,
    #[error("port {0} belongs to the proxy itself")]
    ProxyPort(u16),
}

/// The application did not get its connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Undelivered {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the application did not take the PROXY header")]
    Header(#[source] io::Error),
}
