//! What the admin interface shows of the store: certificates and their state, never keys.

use std::fmt;
use std::time::SystemTime;

use culvert_mesh::Identity;
use culvert_mesh::error::chain;
use rustls_pki_types::CertificateDer;

use super::{Certificates, IdentityError};
use crate::x509;

/// Whether an identity has a certificate.
#[derive(Clone, Debug)]
pub enum State {
    /// The first one is being issued.
    Initializing,
    /// One is held and valid.
    Available,
    /// None is held that is valid, and the latest attempt failed.
    Unavailable(IdentityError),
}

/// As `istioctl ztunnel-config certificates` expects it.
impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Initializing => f.write_str("Initializing"),
            Self::Available => f.write_str("Available"),
            Self::Unavailable(error) => write!(f, "Unavailable: {}", chain(error)),
        }
    }
}

/// One identity of the store.
#[derive(Clone, Debug)]
pub struct IdentityDump {
    /// Whose certificate it is.
    pub identity: Identity,
    /// Whether it can be served.
    pub state: State,
    /// The certificate, then its intermediates; empty when none is held.
    pub chain: Vec<CertificateDump>,
    /// The roots that peers are verified against.
    pub roots: Vec<CertificateDump>,
}

/// One certificate as the admin interface shows it.
#[derive(Clone, Debug)]
pub struct CertificateDump {
    /// The certificate as PEM text.
    pub pem: String,
    /// Its serial number, decimal.
    pub serial: String,
    /// It is not valid before this.
    pub not_before: SystemTime,
    /// It is not valid from this on.
    pub not_after: SystemTime,
}

impl Certificates {
    /// Every identity of the store, in the order of identities.
    pub fn dump(&self) -> Vec<IdentityDump> {
        let now = (self.clock)();
        let entries = self.entries.load();
        let dump = entries.values().map(|entry| {
            let state = match (entry.valid(now), entry.failure()) {
                (Some(_), _) => State::Available,
                (None, Some(failure)) => State::Unavailable(failure.error),
                (None, None) => State::Initializing,
            };
            let held = entry.held.load();
            let (chain, roots) = held.as_ref().map_or_else(Default::default, |held| {
                (certificates(held.credential.chain()), certificates(held.credential.roots()))
            });
            IdentityDump { identity: entry.identity.clone(), state, chain, roots }
        });
        dump.collect()
    }
}

/// Roots that cannot be parsed are not shown: they are not used either.
fn certificates(ders: &[CertificateDer<'_>]) -> Vec<CertificateDump> {
    let dump = ders.iter().filter_map(|der| {
        let certificate = x509::parse(der).ok()?;
        let (not_before, not_after) = x509::validity(&certificate);
        let pem = pem::encode_config(
            &pem::Pem::new("CERTIFICATE", der.as_ref()),
            pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF),
        );
        Some(CertificateDump {
            pem,
            serial: certificate.tbs_certificate.serial.to_string(),
            not_before,
            not_after,
        })
    });
    dump.collect()
}
