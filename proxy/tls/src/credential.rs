//! One identity's certificate and the TLS configurations made from it; when to renew it is decided by `certificates`.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use culvert_mesh::Identity;
use rustls::client::Resumption;
use rustls::server::VerifierBuilderError;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::CertificateDer;
use webpki::KeyUsage;
use x509_parser::error::X509Error;

use crate::issuer::Issued;
use crate::lifetime::Lifetime;
use crate::peer::{InboundVerifier, OutboundVerifier};
use crate::profile::Profile;
use crate::x509;

/// HBONE's ALPN protocol (RFC 9113 §3.1).
const ALPN: &[u8] = b"h2";

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
    profile: Profile,
    server: Arc<ServerConfig>,
    client: ClientConfig,
}

impl Credential {
    /// Checks that `issued` is a usable certificate for `identity` and builds the TLS configurations.
    ///
    /// `generation` tells this credential from others of the same identity. Roots that cannot be read are skipped with a
    /// warning, as long as one is left.
    pub fn new(
        profile: &Profile,
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

        let provider = Arc::clone(&profile.provider);
        let certified =
            CertifiedKey::from_der(chain.clone(), key, &provider).map_err(CredentialError::Key)?;
        let certified = Arc::new(SingleCertAndKey::from(certified));
        let verifier =
            InboundVerifier::new(Arc::clone(&anchors), profile.clone(), identity.clone())
                .map_err(CredentialError::Verifier)?;

        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(CredentialError::Tls)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::<SingleCertAndKey>::clone(&certified));
        server.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would outlive the verification of its certificate.
        server.send_tls13_tickets = 0;

        let nobody = OutboundVerifier::new(Arc::clone(&anchors), profile.clone(), &[]);
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
            profile: profile.clone(),
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

    /// For connections that peers open to us: they must prove an identity of our own trust domain or of an alias.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// For connections that we open: the peer must prove one of `expected`; if that is empty every peer is refused.
    ///
    /// The server name given to rustls is neither sent nor verified, so any will do.
    pub fn client_config(&self, expected: &[Identity]) -> Arc<ClientConfig> {
        let mut config = self.client.clone();
        let verifier =
            OutboundVerifier::new(Arc::clone(&self.anchors), self.profile.clone(), expected);
        config.dangerous().set_certificate_verifier(Arc::new(verifier));
        Arc::new(config)
    }

    /// How long a connection may last whose peer proved `chain` when it connected to us.
    pub fn inbound_lifetime(&self, chain: &[CertificateDer<'static>]) -> Lifetime {
        self.lifetime(chain, KeyUsage::client_auth())
    }

    /// How long a connection may last whose peer proved `chain` when we connected to it.
    pub fn outbound_lifetime(&self, chain: &[CertificateDer<'static>]) -> Lifetime {
        self.lifetime(chain, KeyUsage::server_auth())
    }

    fn lifetime(&self, chain: &[CertificateDer<'static>], usage: KeyUsage) -> Lifetime {
        let Profile { provider, revocations, .. } = &self.profile;
        Lifetime::new(chain, usage, &self.anchors, provider, revocations.as_ref())
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
pub(crate) mod tests;
