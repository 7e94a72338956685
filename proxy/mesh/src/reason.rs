//! The closed set of reasons by which telemetry tells how a connection ended.
//! Recording them is left to `culvert-observe`.

use std::fmt;

/// The value of the `response_flags` label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResponseFlag {
    /// Nothing went wrong.
    #[default]
    None,
    /// Authorization policy denied it.
    Deny,
    /// The destination could not be connected to.
    Connect,
    /// The TLS handshake failed.
    TlsFailure,
    /// The HTTP/2 connection failed.
    H2HandshakeFailure,
    /// The destination did not answer: most often a network policy drops HBONE's port.
    NetworkPolicy,
    /// Our own certificate could not be had.
    IdentityError,
    /// The peer's certificate was revoked.
    CertRevoked,
    /// The mesh has no way to the destination, or does not know the one that was asked for.
    NoRoute,
}

impl ResponseFlag {
    /// The label's text. Dashboards depend on it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::Deny => "DENY",
            Self::Connect => "CONNECT",
            Self::TlsFailure => "TLS_FAILURE",
            Self::H2HandshakeFailure => "H2_HANDSHAKE_FAILURE",
            Self::NetworkPolicy => "NETWORK_POLICY",
            Self::IdentityError => "IDENTITY_ERROR",
            Self::CertRevoked => "CERT_REVOKED",
            Self::NoRoute => "NO_ROUTE",
        }
    }
}

impl fmt::Display for ResponseFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
