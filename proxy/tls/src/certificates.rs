//! The store of the node's certificates: one an identity, fetched once, renewed half way to its end, forgotten a while
//! after the last pod of its identity has left.
//!
//! Who waits for what: a connection that needs a certificate now asks at once; a pod that has just come is prefetched
//! for, and what is held is renewed, in a lane of their own that leaves half of the issuer's attention to the former.
//! Which identities the node may ask for is the caller's matter. When an entry is due is `entry`'s.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use culvert_mesh::Identity;
use culvert_mesh::error::chain;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use self::entry::{Entry, FAILURE_MEMORY};
use crate::credential::{Credential, CredentialError};
use crate::issuer::{Issuer, IssuerError};
use crate::profile::Profile;

mod dump;
mod entry;

pub use dump::{CertificateDump, IdentityDump, State};

/// An issuer that has not answered by then is taken as failed.
const ISSUE_DEADLINE: Duration = Duration::from_secs(10);
/// Requests to the issuer at one time.
const ISSUING: usize = 8;
/// Prefetches and renewals among them, so that half is always left for connections that wait.
const BACKGROUND: usize = 4;
/// The wall clock is read again at least this often, so that a step of it delays no renewal by more.
const RECHECK: Duration = Duration::from_mins(1);
/// Connections under an older certificate are given up at a random moment within this, so that not all are dialled anew
/// at once.
const SUPERSEDED_GRACE: Duration = Duration::from_secs(30);

/// Why no certificate can be served for an identity. Callers that waited for one attempt share it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum IdentityError {
    /// The issuer refused or failed.
    #[error("issue a certificate for {identity}")]
    Issuer {
        /// For whom.
        identity: Identity,
        /// The issuer's reason.
        source: IssuerError,
    },
    /// The issuer did not answer.
    #[error("issue a certificate for {identity}: no answer within {} s", ISSUE_DEADLINE.as_secs())]
    Deadline {
        /// For whom.
        identity: Identity,
    },
    /// The issuer's answer cannot be used.
    #[error("use the certificate issued for {identity}")]
    Credential {
        /// For whom.
        identity: Identity,
        /// What is wrong with it.
        source: CredentialError,
    },
    /// The issuer's answer is not valid now.
    #[error(
        "certificate issued for {identity} is not valid now; compare this node's clock with the issuer's"
    )]
    NotValid {
        /// For whom.
        identity: Identity,
    },
}

/// The node's certificates.
///
/// Reading a held certificate takes no lock. Issuing is single-flight an identity.
pub struct Certificates {
    issuer: Box<dyn Issuer>,
    profile: Profile,
    entries: ArcSwap<BTreeMap<Identity, Arc<Entry>>>,
    /// Held to add or to remove entries.
    changing: Mutex<()>,
    generations: AtomicU64,
    issuing: Semaphore,
    background: Arc<Semaphore>,
    added: Notify,
    clock: Box<dyn Fn() -> SystemTime + Send + Sync>,
}

impl Certificates {
    /// An empty store over `issuer`. Nothing is renewed unless [`Self::run`] runs.
    pub fn new(issuer: impl Issuer + 'static) -> Self {
        Self::with_clock(issuer, SystemTime::now)
    }

    fn with_clock(
        issuer: impl Issuer + 'static,
        clock: impl Fn() -> SystemTime + Send + Sync + 'static,
    ) -> Self {
        Self {
            issuer: Box::new(issuer),
            profile: Profile::default(),
            entries: ArcSwap::default(),
            changing: Mutex::default(),
            generations: AtomicU64::new(1),
            issuing: Semaphore::new(ISSUING),
            background: Arc::new(Semaphore::new(BACKGROUND)),
            added: Notify::new(),
            clock: Box::new(clock),
        }
    }

    /// The same store, whose credentials have `profile` instead of the default one.
    #[must_use]
    pub fn with_profile(self, profile: Profile) -> Self {
        Self { profile, ..self }
    }

    /// The certificate of `identity`, issued if none is held that is valid now.
    ///
    /// Callers that come while one is being issued wait for that one and share its outcome. After a failure the next
    /// caller asks again, at most once a second; a certificate that is still valid is served whatever renewal does.
    /// Cancel-safe: when the caller that asks goes away, the next one asks.
    pub async fn fetch(&self, identity: &Identity) -> Result<Arc<Credential>, IdentityError> {
        let entry = self.entry(identity);
        if let Some(credential) = entry.valid((self.clock)()) {
            return Ok(credential);
        }
        let _flight = entry.flight.lock().await;
        if let Some(credential) = entry.valid((self.clock)()) {
            return Ok(credential);
        }
        if let Some(failure) = entry.failure()
            && failure.at.elapsed() < FAILURE_MEMORY
        {
            return Err(failure.error);
        }
        self.issue(&entry).await
    }

    /// The certificate of `identity` if one is held and valid now; never asks the issuer.
    pub fn find(&self, identity: &Identity) -> Option<Arc<Credential>> {
        self.entries.load().get(identity)?.valid((self.clock)())
    }

    /// Gets the certificate of `identity` before a connection waits for it. Those that do wait come first: this takes its
    /// turn with renewals.
    pub async fn prefetch(&self, identity: &Identity) -> Result<(), IdentityError> {
        if self.find(identity).is_some() {
            return Ok(());
        }
        // The turn is awaited before the flight is taken: a connection that needs the same identity goes ahead. The
        // semaphore is never closed.
        let turn = self.background.acquire().await;
        let fetched = self.fetch(identity).await;
        drop(turn);
        self.added.notify_one();
        fetched.map(drop)
    }

    /// Keeps `identity` in the store, held and renewed, until what it gives is dropped. Identities that nobody retains
    /// are forgotten after a minute, so that a pod that is replaced finds its certificate.
    pub fn retain(self: &Arc<Self>, identity: &Identity) -> Retained {
        let changing = self.changing();
        let entry = self.entry_while(&changing, identity);
        entry.retain();
        drop(changing);
        Retained { store: Arc::clone(self), entry }
    }

    /// Ends once a newer certificate than `credential` is held, and a random part of half a minute has passed.
    ///
    /// Never ends for an identity that is forgotten meanwhile.
    pub fn superseded(&self, credential: &Credential) -> impl Future<Output = ()> + Send + use<> {
        let newest =
            self.entries.load().get(credential.identity()).map(|entry| entry.newest.subscribe());
        let (generation, not_after) = (credential.generation(), credential.not_after());
        async move {
            let Some(mut newest) = newest else { return std::future::pending().await };
            if newest.wait_for(|now| *now > generation).await.is_err() {
                return std::future::pending().await;
            }
            let left = not_after.duration_since(SystemTime::now()).unwrap_or(Duration::ZERO);
            let grace = SUPERSEDED_GRACE.min(left / 2);
            sleep(grace.mul_f64(rand::random_range(0.0..=1.0))).await;
        }
    }

    /// Renews certificates half way to their end and forgets those that nobody retains, until dropped.
    ///
    /// A failed renewal is tried again after 1 s, doubling up to 150 s or a quarter of what is left of the certificate;
    /// so is a first attempt that failed, although callers do not wait for that.
    pub async fn run(self: Arc<Self>) {
        let mut renewals = JoinSet::new();
        loop {
            let pause = self.renew_due(&mut renewals);
            tokio::select! {
                () = sleep(pause) => {}
                () = self.added.notified() => {}
                Some(ended) = renewals.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "certificate renewal ended abnormally");
                    }
                }
            }
        }
    }

    /// Starts what is due and returns how long nothing else will be.
    fn renew_due(self: &Arc<Self>, renewals: &mut JoinSet<()>) -> Duration {
        let now = (self.clock)();
        let mut pause = RECHECK;
        for entry in self.entries.load().values() {
            if let Some(left) = entry.forgotten_in() {
                if left.is_zero() {
                    self.forget(entry);
                    continue;
                }
                pause = pause.min(left);
            }
            let wait = entry.renewal_wait(now);
            if !wait.is_zero() {
                pause = pause.min(wait);
                continue;
            }
            // Without a turn it waits until another's ends, which is told through `added`.
            let Ok(turn) = Arc::clone(&self.background).try_acquire_owned() else { continue };
            // Somebody is asking for it already; the outcome comes through `added` or the next check.
            let Ok(flight) = Arc::clone(&entry.flight).try_lock_owned() else { continue };
            let (store, entry) = (Arc::clone(self), Arc::clone(entry));
            renewals.spawn(async move {
                let outcome = store.issue(&entry).await;
                drop((flight, turn));
                if let Err(error) = outcome {
                    tracing::warn!(identity = %entry.identity, error = %chain(&error), "renew a certificate");
                }
            });
        }
        pause
    }

    /// Asks the issuer, with the flight held by the caller.
    async fn issue(&self, entry: &Entry) -> Result<Arc<Credential>, IdentityError> {
        let outcome = self.request(&entry.identity).await;
        match &outcome {
            Ok(credential) => {
                entry.hold(credential, (self.clock)());
            }
            Err(error) => entry.fail(error.clone()),
        }
        self.added.notify_one();
        outcome
    }

    async fn request(&self, identity: &Identity) -> Result<Arc<Credential>, IdentityError> {
        let issued = timeout(ISSUE_DEADLINE, async {
            // The semaphore is never closed.
            let _permit = self.issuing.acquire().await;
            self.issuer.issue(identity).await
        });
        let issued = match issued.await {
            Ok(Ok(issued)) => issued,
            Ok(Err(source)) => {
                return Err(IdentityError::Issuer { identity: identity.clone(), source });
            }
            Err(_elapsed) => return Err(IdentityError::Deadline { identity: identity.clone() }),
        };
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let credential = Credential::new(&self.profile, identity, generation, issued)
            .map_err(|source| IdentityError::Credential { identity: identity.clone(), source })?;
        if !credential.is_valid_at((self.clock)()) {
            return Err(IdentityError::NotValid { identity: identity.clone() });
        }
        Ok(Arc::new(credential))
    }

    fn entry(&self, identity: &Identity) -> Arc<Entry> {
        if let Some(entry) = self.entries.load().get(identity) {
            return Arc::clone(entry);
        }
        self.entry_while(&self.changing(), identity)
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        // It guards no data of its own: entries are replaced whole.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry_while(&self, _changing: &MutexGuard<'_, ()>, identity: &Identity) -> Arc<Entry> {
        let entries = self.entries.load();
        if let Some(entry) = entries.get(identity) {
            return Arc::clone(entry);
        }
        let new = Arc::new(Entry::new(identity.clone()));
        let mut entries = BTreeMap::clone(&entries);
        entries.insert(identity.clone(), Arc::clone(&new));
        self.entries.store(Arc::new(entries));
        new
    }

    /// Drops the entry unless somebody has come to retain it. Connections that use its certificate keep it.
    fn forget(&self, entry: &Entry) {
        let _changing = self.changing();
        if entry.forgotten_in() != Some(Duration::ZERO) {
            return;
        }
        let mut entries = BTreeMap::clone(&self.entries.load());
        entries.remove(&entry.identity);
        self.entries.store(Arc::new(entries));
        tracing::debug!(identity = %entry.identity, "certificate forgotten");
    }
}

/// Keeps an identity in the store, see [`Certificates::retain`].
#[must_use = "dropping it lets the identity be forgotten"]
pub struct Retained {
    store: Arc<Certificates>,
    entry: Arc<Entry>,
}

impl Retained {
    /// Whose certificate is kept.
    pub fn identity(&self) -> &Identity {
        &self.entry.identity
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        self.entry.release();
        // It is to be forgotten sooner than anything was due.
        self.store.added.notify_one();
    }
}

impl fmt::Debug for Retained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Retained").field(self.identity()).finish()
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates")
            .field("identities", &self.entries.load().keys())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
