//! Verification of the other end's certificate: path to our roots, then its SPIFFE identity.
//!
//! Which identities are expected is the caller's decision; what a refusal looks like in a log is `handshake`'s.

use std::fmt;
use std::sync::Arc;

use culvert_mesh::Identity;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use webpki::KeyUsage;

use crate::handshake::RefusedPeer;
use crate::profile::Profile;
use crate::x509;

/// The identity of a verified peer: the first URI name of its own certificate that is a SPIFFE identity.
///
/// `certs` are those of a finished handshake (`peer_certificates()`); `None` when there is no such name.
pub fn peer_identity(certs: &[CertificateDer<'_>]) -> Option<Identity> {
    x509::identities(&x509::parse(certs.first()?).ok()?).into_iter().next()
}

/// Verifies who connects to us: any workload of our own trust domain, or of one of its aliases.
#[derive(Debug)]
pub(crate) struct InboundVerifier {
    path: Arc<dyn ClientCertVerifier>,
    roots: Arc<RootCertStore>,
    profile: Profile,
    own: Identity,
}

impl InboundVerifier {
    pub(crate) fn new(
        roots: Arc<RootCertStore>,
        profile: Profile,
        own: Identity,
    ) -> Result<Self, VerifierBuilderError> {
        // With root hints a peer of another mesh may send no certificate at all, which hides why it is refused.
        let path = WebPkiClientVerifier::builder_with_provider(
            Arc::clone(&roots),
            Arc::clone(&profile.provider),
        )
        .clear_root_hint_subjects()
        .build()?;
        Ok(Self { path, roots, profile, own })
    }

    fn is_trusted(&self, trust_domain: &str) -> bool {
        trust_domain == self.own.trust_domain()
            || self.profile.aliases.iter().any(|alias| alias == trust_domain)
    }
}

impl ClientCertVerifier for InboundVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.path.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified =
            self.path.verify_client_cert(end_entity, intermediates, now).map_err(unknown_issuer)?;
        let usage = KeyUsage::client_auth();
        refuse_revoked(&self.profile, &self.roots, end_entity, intermediates, now, usage)?;
        // The first one is who the peer is from here on, see `peer_identity`.
        match presented(end_entity)?.into_iter().next() {
            Some(identity) if self.is_trusted(identity.trust_domain()) => Ok(verified),
            Some(identity) => {
                Err(refuse(RefusedPeer::TrustDomain { identity, own: self.own.clone() }))
            }
            None => Err(refuse(RefusedPeer::NoIdentity)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.path.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.path.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.path.supported_verify_schemes()
    }
}

/// Verifies whom we connected to: one of the expected identities, whatever name was dialled.
///
/// An empty expected set refuses everybody.
pub(crate) struct OutboundVerifier {
    roots: Arc<RootCertStore>,
    profile: Profile,
    expected: Arc<[Identity]>,
}

impl OutboundVerifier {
    pub(crate) fn new(roots: Arc<RootCertStore>, profile: Profile, expected: &[Identity]) -> Self {
        Self { roots, profile, expected: expected.into() }
    }
}

impl fmt::Debug for OutboundVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundVerifier").field("expected", &self.expected).finish_non_exhaustive()
    }
}

impl ServerCertVerifier for OutboundVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.profile.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )
        .map_err(unknown_issuer)?;
        let usage = KeyUsage::server_auth();
        refuse_revoked(&self.profile, &self.roots, end_entity, intermediates, now, usage)?;
        let presented = presented(end_entity)?;
        if presented.iter().any(|identity| self.expected.contains(identity)) {
            return Ok(ServerCertVerified::assertion());
        }
        Err(refuse(match presented.into_iter().next() {
            None => RefusedPeer::NoIdentity,
            Some(identity) => {
                RefusedPeer::Unexpected { identity, expected: Arc::clone(&self.expected) }
            }
        }))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.profile.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.profile.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.profile.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Refuses a sound chain of which a certificate is revoked.
fn refuse_revoked(
    profile: &Profile,
    roots: &RootCertStore,
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    now: UnixTime,
    usage: KeyUsage,
) -> Result<(), Error> {
    let Some(revocations) = &profile.revocations else { return Ok(()) };
    let chain: Vec<_> = std::iter::once(end_entity).chain(intermediates).cloned().collect();
    if revocations.revoke(&chain, now, usage, roots, &profile.provider) {
        return Err(Error::InvalidCertificate(CertificateError::Revoked));
    }
    Ok(())
}

fn presented(end_entity: &CertificateDer<'_>) -> Result<Vec<Identity>, Error> {
    let certificate = x509::parse(end_entity).map_err(|error| {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
    })?;
    Ok(x509::identities(&certificate))
}

/// rustls answers the peer with the alert `certificate_unknown` and gives us the reason back.
fn refuse(reason: RefusedPeer) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(reason))))
}

/// A root with the name of ours and another key, as after the mesh was installed anew, is as unknown as any other.
fn unknown_issuer(error: Error) -> Error {
    match error {
        Error::InvalidCertificate(CertificateError::BadSignature) => {
            Error::InvalidCertificate(CertificateError::UnknownIssuer)
        }
        error => error,
    }
}
