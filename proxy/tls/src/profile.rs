//! What all TLS of a node has in common: algorithms, trusted domains and revocation lists.
//!
//! Certificates and whom a connection expects are [`crate::Credential`]'s.

use std::sync::Arc;

use rustls::crypto::aws_lc_rs::{self, cipher_suite, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};

use crate::revocation::Revocations;

/// How the keys of a connection are agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyExchange {
    /// Whatever both ends support, hybrid with ML-KEM first.
    #[default]
    Any,
    /// X25519MLKEM768 or no connection, against those who record today to decipher later.
    PostQuantum,
}

/// The settings that every [`crate::Credential`] of a node shares.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) aliases: Arc<[String]>,
    pub(crate) revocations: Option<Revocations>,
}

impl Profile {
    /// HBONE's algorithms: TLS 1.3 with AES-GCM, and `key_exchange`.
    pub fn new(key_exchange: KeyExchange) -> Self {
        let provider = aws_lc_rs::default_provider();
        let kx_groups: Vec<&'static dyn SupportedKxGroup> = match key_exchange {
            KeyExchange::Any => provider.kx_groups,
            KeyExchange::PostQuantum => vec![kx_group::X25519MLKEM768],
        };
        let cipher_suites =
            vec![cipher_suite::TLS13_AES_256_GCM_SHA384, cipher_suite::TLS13_AES_128_GCM_SHA256];
        let provider = Arc::new(CryptoProvider { cipher_suites, kx_groups, ..provider });
        Self { provider, aliases: Arc::default(), revocations: None }
    }

    /// Inbound peers of these trust domains are accepted like those of our own. They must still chain to our roots.
    #[must_use]
    pub fn with_trust_domain_aliases(self, aliases: impl Into<Arc<[String]>>) -> Self {
        Self { aliases: aliases.into(), ..self }
    }

    /// Peers whose certificate is on one of the lists are refused, in both directions.
    #[must_use]
    pub fn with_revocations(self, revocations: Revocations) -> Self {
        Self { revocations: Some(revocations), ..self }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::new(KeyExchange::Any)
    }
}
