//! Identity proof: the certificates of the node's workloads and the verification of their peers.
//!
//! [`Certificates`] holds one [`Credential`] an identity and renews it before it ends; a [`Credential`] gives rustls
//! configurations that speak HBONE's TLS profile (TLS 1.3, ALPN `h2`, both sides with SPIFFE certificates); an
//! [`Issuer`] makes new certificates, [`Authority`] being the one that is embedded. Dialling, accepting and deadlines
//! of handshakes are the caller's, and so is the choice of which identity a connection uses.
//!
//! Invariants: no private key is ever formatted or returned; no credential is served outside of its validity; a peer is
//! accepted only when its certificate chains to our own roots and names a SPIFFE identity that the side expects.
//! A verification that cannot be completed is a refusal: everything here fails closed.

#![forbid(unsafe_code)]

mod authority;
mod certificates;
mod credential;
mod handshake;
mod issuer;
mod lifetime;
mod peer;
mod profile;
mod revocation;
mod x509;

pub use authority::{Authority, AuthorityError, Rotated, Signed};
pub use certificates::{
    CertificateDump, Certificates, IdentityDump, IdentityError, Retained, State,
};
pub use credential::{Credential, CredentialError};
pub use handshake::{HandshakeError, RefusedPeer};
pub use issuer::{Issued, Issuer, IssuerError, Issuing};
pub use lifetime::Lifetime;
pub use peer::peer_identity;
pub use profile::{KeyExchange, Profile};
pub use revocation::{RevocationError, Revocations};
