//! Why a TLS handshake failed, in words that an access log can show; how the peer is verified is `peer`'s.

use std::io;
use std::sync::Arc;

use culvert_mesh::Identity;
use rustls::{AlertDescription, CertificateError, Error};

/// A peer whose certificate is sound, but who is not whom this side talks to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedPeer {
    /// No URI name of the certificate is a SPIFFE identity.
    #[error("peer certificate has no spiffe identity")]
    NoIdentity,
    /// An inbound peer of another trust domain.
    #[error("peer {identity} is not of trust domain {}", own.trust_domain())]
    TrustDomain {
        /// Who the peer proved to be.
        identity: Identity,
        /// Our own identity, whose trust domain is accepted inbound beside its aliases.
        own: Identity,
    },
    /// An outbound peer that is none of the expected identities.
    #[error("peer is {identity}, expected {}", list(expected))]
    Unexpected {
        /// Who the peer proved to be.
        identity: Identity,
        /// Whom the connection was for.
        expected: Arc<[Identity]>,
    },
}

fn list(identities: &[Identity]) -> String {
    match identities {
        [] => "nobody: the destination has no identity".to_owned(),
        some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or "),
    }
}

/// Why a TLS handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The peer's certificate does not chain to any of our roots.
    #[error("peer certificate has an unknown issuer: it chains to none of our roots")]
    UnknownIssuer,
    /// The peer's certificate has ended.
    #[error("peer certificate has expired")]
    Expired,
    /// The peer's certificate is not valid yet.
    #[error("peer certificate is not valid yet; compare both nodes' clocks")]
    NotValidYet,
    /// The peer's certificate, or one above it, is on a revocation list.
    #[error("peer certificate revoked by CRL")]
    Revoked,
    /// The peer sent no certificate.
    #[error("peer sent no certificate")]
    NoCertificate,
    /// The peer's certificate is sound, but not for whom we expect.
    #[error(transparent)]
    Refused(#[from] RefusedPeer),
    /// The peer refused us; its own log has the reason.
    #[error("peer refused the handshake with alert {}", alert(*.0))]
    Alert(AlertDescription),
    /// The peer closed the connection before the handshake was complete.
    #[error("peer closed the connection during the handshake")]
    Closed,
    /// Anything else that rustls refused.
    #[error("tls handshake")]
    Tls(#[source] Error),
    /// The connection under the handshake failed.
    #[error("tls handshake")]
    Io(#[source] io::Error),
}

fn alert(description: AlertDescription) -> String {
    description.as_str().map_or_else(|| u8::from(description).to_string(), ToOwned::to_owned)
}

impl From<Error> for HandshakeError {
    fn from(error: Error) -> Self {
        match error {
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::AlertReceived(description) => Self::Alert(description),
            Error::InvalidCertificate(ref cause) => match cause {
                CertificateError::UnknownIssuer => Self::UnknownIssuer,
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    Self::Expired
                }
                CertificateError::Revoked => Self::Revoked,
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    Self::NotValidYet
                }
                CertificateError::Other(other) => match other.0.downcast_ref::<RefusedPeer>() {
                    Some(refused) => Self::Refused(refused.clone()),
                    None => Self::Tls(error),
                },
                _ => Self::Tls(error),
            },
            error => Self::Tls(error),
        }
    }
}

/// Reads the error of a handshake done over an I/O stream, also when it only shows at the first read: a TLS 1.3 client
/// has finished before the server judges its certificate (RFC 8446 §4.4.2).
impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Self::Closed;
        }
        match error.downcast::<Error>() {
            Ok(error) => error.into(),
            Err(error) => Self::Io(error),
        }
    }
}
