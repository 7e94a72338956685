//! How long a connection may last by its peer's certificate: until it ends, or is revoked.
//!
//! What is done to the connection then is the caller's.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls_pki_types::{CertificateDer, UnixTime};
use tokio::time::sleep;
use webpki::KeyUsage;

use crate::revocation::Revocations;
use crate::x509;

/// The wall clock is read again at least this often, so that a step of it is noticed.
const RECHECK: Duration = Duration::from_mins(10);

/// What the certificate that a peer proved in its handshake says about the connection's end.
pub struct Lifetime {
    not_after: SystemTime,
    revocable: Option<Revocable>,
}

/// A chain that may appear on a list.
struct Revocable {
    revocations: Revocations,
    chain: Vec<CertificateDer<'static>>,
    verified_at: UnixTime,
    usage: KeyUsage,
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl Lifetime {
    /// Of a peer that has just proved `chain`; nothing is revoked where there are no `revocations`.
    pub(crate) fn new(
        chain: &[CertificateDer<'static>],
        usage: KeyUsage,
        roots: &Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
        revocations: Option<&Revocations>,
    ) -> Self {
        let leaf = chain.first().and_then(|leaf| x509::parse(leaf).ok());
        // One that cannot be read has not been accepted.
        let not_after = leaf.map_or(SystemTime::UNIX_EPOCH, |leaf| x509::validity(&leaf).1);
        let revocable = revocations.map(|revocations| Revocable {
            revocations: revocations.clone(),
            chain: chain.to_vec(),
            verified_at: UnixTime::now(),
            usage,
            roots: Arc::clone(roots),
            provider: Arc::clone(provider),
        });
        Self { not_after, revocable }
    }

    /// Ends when the peer's certificate does, by the wall clock.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        until(self.not_after)
    }

    /// Ends when the peer's certificate, or one above it, has been revoked.
    pub async fn revoked(self) {
        let Some(revocable) = self.revocable else { return std::future::pending().await };
        // Subscribed before the first look: a list that came between the handshake and this is noticed as well.
        let mut changed = revocable.revocations.subscribe();
        while !revocable.is_revoked() {
            if changed.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

impl Revocable {
    fn is_revoked(&self) -> bool {
        let Self { revocations, chain, verified_at, usage, roots, provider } = self;
        revocations.revoke(chain, *verified_at, *usage, roots, provider)
    }
}

/// Ends at `time` by the wall clock.
pub(crate) async fn until(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now())
        && !left.is_zero()
    {
        sleep(left.min(RECHECK)).await;
    }
}

impl fmt::Debug for Lifetime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lifetime").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}
