//! One identity's certificate and the TLS configurations made from it; when to renew it is decided by `certificates`.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::SystemTime;

use culvert_mesh::Identity;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite};
use rustls::server::VerifierBuilderError;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::CertificateDer;
use x509_parser::error::X509Error;

use crate::issuer::Issued;
use crate::peer::{InboundVerifier, OutboundVerifier};
use crate::x509;

/// HBONE's ALPN protocol (RFC 9113 §3.1).
const ALPN: &[u8] = b"h2";

static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    let cipher_suites =
        vec![cipher_suite::TLS13_AES_256_GCM_SHA384, cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..aws_lc_rs::default_provider() })
});

/// Why an issued certificate cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CredentialError {
    /// The issuer answered without a certificate.
    #[error("issued chain is empty")]
    Empty,
    /// The certificate cannot be read.
    #[error("parse issued certificate")]
    Parse(#[source] X509Error),
    /// The certificate is for somebody else.
    #[error("issued certificate is for {}, not {expected}", found.as_ref().map_or_else(|| "nobody".to_owned(), ToString::to_string))]
    Subject {
        /// Whom the certificate names.
        found: Option<Identity>,
        /// Whom it was asked for.
        expected: Identity,
    },
    /// The key is not the certificate's, or of a kind that cannot sign.
    #[error("issued key does not fit its certificate")]
    Key(#[source] rustls::Error),
    /// No root to verify peers with.
    #[error("none of the {0} issued roots can be used")]
    Roots(usize),
    /// rustls refused the profile.
    #[error("configure tls")]
    Tls(#[source] rustls::Error),
    /// rustls refused the roots.
    #[error("configure verification of peers")]
    Verifier(#[source] VerifierBuilderError),
}

/// An identity's certificate, private key and roots, and what TLS needs of them.
///
/// `not_before < not_after`; the leaf's first SPIFFE name is `identity`.
pub struct Credential {
    identity: Identity,
    generation: u64,
    not_before: SystemTime,
    not_after: SystemTime,
    chain: Vec<CertificateDer<'static>>,
    roots: Vec<CertificateDer<'static>>,
    anchors: Arc<RootCertStore>,
    server: Arc<ServerConfig>,
    client: ClientConfig,
}

impl Credential {
    /// Checks that `issued` is a usable certificate for `identity` and builds the TLS configurations.
    ///
    /// `generation` tells this credential from others of the same identity. Roots that cannot be read are skipped with a
    /// warning, as long as one is left.
    pub fn new(
        identity: &Identity,
        generation: u64,
        issued: Issued,
    ) -> Result<Self, CredentialError> {
        let Issued { chain, key, roots } = issued;
        let (found, (not_before, not_after)) = {
            let leaf = x509::parse(chain.first().ok_or(CredentialError::Empty)?)
                .map_err(CredentialError::Parse)?;
            (x509::identities(&leaf).into_iter().next(), x509::validity(&leaf))
        };
        if found.as_ref() != Some(identity) {
            return Err(CredentialError::Subject { found, expected: identity.clone() });
        }

        let mut anchors = RootCertStore::empty();
        let (added, skipped) = anchors.add_parsable_certificates(roots.iter().cloned());
        if added == 0 {
            return Err(CredentialError::Roots(roots.len()));
        }
        if skipped > 0 {
            tracing::warn!(%identity, added, skipped, "skipped roots that cannot be parsed");
        }
        let anchors = Arc::new(anchors);

        let provider = Arc::clone(&PROVIDER);
        let certified =
            CertifiedKey::from_der(chain.clone(), key, &provider).map_err(CredentialError::Key)?;
        let certified = Arc::new(SingleCertAndKey::from(certified));
        let verifier =
            InboundVerifier::new(Arc::clone(&anchors), Arc::clone(&provider), identity.clone())
                .map_err(CredentialError::Verifier)?;

        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(CredentialError::Tls)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::<SingleCertAndKey>::clone(&certified));
        server.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would outlive the verification of its certificate.
        server.send_tls13_tickets = 0;

        let nobody = OutboundVerifier::new(Arc::clone(&anchors), Arc::clone(&provider), &[]);
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(CredentialError::Tls)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(nobody))
            .with_client_cert_resolver(certified);
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.enable_sni = false;
        client.resumption = Resumption::disabled();

        Ok(Self {
            identity: identity.clone(),
            generation,
            not_before,
            not_after,
            chain,
            roots,
            anchors,
            server: Arc::new(server),
            client,
        })
    }

    /// Whose certificate it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Grows with every certificate of a store; pools key connections with it.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The certificate is not valid before this.
    pub fn not_before(&self) -> SystemTime {
        self.not_before
    }

    /// The certificate is not valid from this on.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Whether the certificate may be used at `now`.
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// For connections that peers open to us: they must prove an identity of our own trust domain.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// For connections that we open: the peer must prove one of `expected`; if that is empty every peer is refused.
    ///
    /// The server name given to rustls is neither sent nor verified, so any will do.
    pub fn client_config(&self, expected: &[Identity]) -> Arc<ClientConfig> {
        let mut config = self.client.clone();
        let verifier =
            OutboundVerifier::new(Arc::clone(&self.anchors), Arc::clone(&PROVIDER), expected);
        config.dangerous().set_certificate_verifier(Arc::new(verifier));
        Arc::new(config)
    }

    /// The certificate and the intermediates sent with it.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// The roots that peers are verified against, as issued.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }
}

/// Written by hand, so that no private key can reach a log through a derived one.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("identity", &self.identity)
            .field("generation", &self.generation)
            .field("not_before", &self.not_before)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
