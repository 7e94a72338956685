//! Certificate revocation lists (RFC 5280 §5), and whether a verified peer is on one of them.
//!
//! Reading the file again is the caller's; that the path to a root is sound is verified in `peer` before this is asked.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use tokio::sync::watch;
use webpki::{
    CertRevocationList, EndEntityCert, KeyUsage, OwnedCertRevocationList, RevocationOptionsBuilder,
    UnknownStatusPolicy,
};

use crate::x509;

const PEM_BEGIN: &[u8] = b"-----BEGIN";

/// Why a file of revocation lists cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RevocationError {
    /// It is no PEM.
    #[error("read revocation lists as PEM")]
    Pem(#[source] rustls_pki_types::pem::Error),
    /// There is PEM, but no list in it.
    #[error("no X509 CRL in the PEM; an empty file means that nothing is revoked")]
    NoList,
    /// A list cannot be read, or is of a kind that is not supported, as delta lists are.
    #[error("parse revocation list {number}")]
    List {
        /// Which one, counted from 1.
        number: usize,
        /// What is wrong with it.
        source: webpki::Error,
    },
}

/// The revocation lists in force. Clones share them.
#[derive(Clone)]
pub struct Revocations {
    lists: Arc<ArcSwap<Vec<CertRevocationList<'static>>>>,
    changed: watch::Sender<()>,
}

impl Revocations {
    /// No lists: nothing is revoked.
    pub fn none() -> Self {
        Self { lists: Arc::default(), changed: watch::Sender::new(()) }
    }

    /// Puts the lists of `file` in the place of those in force, and gives how many there are. `file` is PEM with one or
    /// several lists, or one list in DER; empty, it revokes nothing. A file that cannot be used changes nothing.
    pub fn replace(&self, file: &[u8]) -> Result<usize, RevocationError> {
        let lists = parse(file)?;
        let count = lists.len();
        self.lists.store(Arc::new(lists));
        self.changed.send_replace(());
        Ok(count)
    }

    /// Fires after each [`Self::replace`] from now on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Whether a certificate of `chain`, which had a path to one of `roots` at `verified_at`, is revoked.
    ///
    /// Lists that have ended still count, and a certificate that no list is about is good. One whose serial number is on
    /// a list counts as revoked unless the list proves to be another authority's.
    pub(crate) fn revoke(
        &self,
        chain: &[CertificateDer<'_>],
        verified_at: UnixTime,
        usage: KeyUsage,
        roots: &RootCertStore,
        provider: &CryptoProvider,
    ) -> bool {
        let lists = self.lists.load();
        let Some((leaf, intermediates)) = chain.split_first() else { return false };
        // Most often no serial number is on any list, and no signature has to be verified to know that.
        if lists.is_empty() || !chain.iter().any(|certificate| is_listed(&lists, certificate)) {
            return false;
        }
        let lists: Vec<&CertRevocationList<'_>> = lists.iter().collect();
        let Ok(options) = RevocationOptionsBuilder::new(&lists) else { return false };
        let options = options.with_status_policy(UnknownStatusPolicy::Allow).build();
        let Ok(leaf) = EndEntityCert::try_from(leaf) else { return true };
        let verified = leaf.verify_for_usage(
            provider.signature_verification_algorithms.all,
            &roots.roots,
            intermediates,
            verified_at,
            usage,
            Some(options),
            None,
        );
        if let Err(error) = &verified
            && !matches!(error, webpki::Error::CertRevoked)
        {
            tracing::warn!(%error, "peer certificate is on a revocation list that cannot be verified; taken as revoked");
        }
        verified.is_err()
    }
}

/// Whether a list has the certificate's serial number, whoever issued either.
fn is_listed(lists: &[CertRevocationList<'_>], certificate: &CertificateDer<'_>) -> bool {
    // What cannot be read is left to the full verification.
    let Ok(certificate) = x509::parse(certificate) else { return true };
    let serial = certificate.raw_serial();
    lists.iter().any(|list| !matches!(list.find_serial(serial), Ok(None)))
}

fn parse(file: &[u8]) -> Result<Vec<CertRevocationList<'static>>, RevocationError> {
    if file.iter().all(u8::is_ascii_whitespace) {
        return Ok(Vec::new());
    }
    let ders = if file.windows(PEM_BEGIN.len()).any(|window| window == PEM_BEGIN) {
        CertificateRevocationListDer::pem_slice_iter(file)
            .collect::<Result<Vec<_>, _>>()
            .map_err(RevocationError::Pem)?
    } else {
        vec![CertificateRevocationListDer::from(file)]
    };
    if ders.is_empty() {
        return Err(RevocationError::NoList);
    }
    let lists = ders.iter().enumerate().map(|(index, der)| {
        OwnedCertRevocationList::from_der(der)
            .map(CertRevocationList::from)
            .map_err(|source| RevocationError::List { number: index + 1, source })
    });
    lists.collect()
}

impl fmt::Debug for Revocations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revocations")
            .field("lists", &self.lists.load().len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
