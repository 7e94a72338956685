//! Where new certificates come from; when to ask is decided by `certificates`.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use culvert_mesh::Identity;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Why an issuer gave no certificate; shared by all callers that waited for it.
pub type IssuerError = Arc<dyn Error + Send + Sync>;

/// A certificate being issued. Dropping it abandons the request.
pub type Issuing<'a> = Pin<Box<dyn Future<Output = Result<Issued, IssuerError>> + Send + 'a>>;

/// Something that issues workload certificates.
pub trait Issuer: Send + Sync {
    /// Issues a certificate for `identity` with a key that was never used before.
    ///
    /// The caller bounds the time it waits; it also checks that the answer is for `identity`.
    fn issue<'a>(&'a self, identity: &'a Identity) -> Issuing<'a>;
}

/// An issued certificate with its private key.
pub struct Issued {
    /// The workload's certificate, then intermediates towards the root, which is not part of it.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key of the first certificate.
    pub key: PrivateKeyDer<'static>,
    /// Every root that peers may chain to.
    pub roots: Vec<CertificateDer<'static>>,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued")
            .field("chain", &self.chain.len())
            .field("roots", &self.roots.len())
            .finish_non_exhaustive()
    }
}
