//! The store of the node's certificates: one an identity, fetched once, renewed half way to its end.
//!
//! Which identities the node may ask for is the caller's matter; so is dropping those that left ([`Certificates::forget`]).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::{ArcSwap, ArcSwapOption};
use culvert_mesh::Identity;
use culvert_mesh::error::chain;
use tokio::sync::{Mutex as AsyncMutex, Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::credential::{Credential, CredentialError};
use crate::issuer::{Issuer, IssuerError};

mod dump;

pub use dump::{CertificateDump, IdentityDump, State};

/// An issuer that has not answered by then is taken as failed.
const ISSUE_DEADLINE: Duration = Duration::from_secs(10);
/// Requests to the issuer at one time.
const ISSUING: usize = 8;
/// Renewals among them, so that half is always left for connections that wait.
const RENEWING: usize = 4;
/// The wall clock is read again at least this often, so that a step of it delays no renewal by more.
const RECHECK: Duration = Duration::from_mins(1);
/// A failure is answered from memory for this long; then the next caller tries again.
const FAILURE_MEMORY: Duration = Duration::from_secs(1);
/// Longest wait between attempts to renew.
const BACKOFF_CAP: Duration = Duration::from_secs(150);
/// Renewal is due up to this part of the validity before half way, so that certificates made together part ways.
const JITTER: f64 = 0.05;

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
    entries: ArcSwap<BTreeMap<Identity, Arc<Entry>>>,
    generations: AtomicU64,
    issuing: Semaphore,
    added: Notify,
    clock: Box<dyn Fn() -> SystemTime + Send + Sync>,
}

struct Entry {
    identity: Identity,
    held: ArcSwapOption<Held>,
    failure: Mutex<Option<Failure>>,
    /// Held by whoever is asking the issuer for this identity.
    flight: Arc<AsyncMutex<()>>,
}

struct Held {
    credential: Arc<Credential>,
    /// When to ask for the next one.
    renew_at: SystemTime,
}

/// The latest attempt, when it failed.
#[derive(Clone)]
struct Failure {
    error: IdentityError,
    at: Instant,
    retry_at: Instant,
    attempts: u32,
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
            entries: ArcSwap::default(),
            generations: AtomicU64::new(1),
            issuing: Semaphore::new(ISSUING),
            added: Notify::new(),
            clock: Box::new(clock),
        }
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

    /// Drops the certificate of `identity`, which is renewed no more; connections that use it keep it.
    pub fn forget(&self, identity: &Identity) {
        self.entries.rcu(|entries| {
            let mut entries = BTreeMap::clone(entries);
            entries.remove(identity);
            entries
        });
    }

    /// Renews certificates half way to their end, until dropped.
    ///
    /// A failed renewal is tried again after 1 s, doubling up to 150 s; so is a first attempt that failed, although
    /// callers do not wait for that.
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
            let wait = entry.renewal_wait(now);
            if !wait.is_zero() {
                pause = pause.min(wait);
                continue;
            }
            if renewals.len() >= RENEWING {
                break;
            }
            // Somebody is asking for it already; the outcome comes through `added` or the next check.
            let Ok(flight) = Arc::clone(&entry.flight).try_lock_owned() else { continue };
            let (store, entry) = (Arc::clone(self), Arc::clone(entry));
            renewals.spawn(async move {
                let _flight = flight;
                if let Err(error) = store.issue(&entry).await {
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
                let renew_at = renew_at(credential, (self.clock)());
                entry.hold(Held { credential: Arc::clone(credential), renew_at });
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
        let credential = Credential::new(identity, generation, issued)
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
        let new = Arc::new(Entry::new(identity.clone()));
        let before = self.entries.rcu(|entries| {
            let mut entries = BTreeMap::clone(entries);
            entries.entry(identity.clone()).or_insert_with(|| Arc::clone(&new));
            entries
        });
        before.get(identity).map_or(new, Arc::clone)
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates")
            .field("identities", &self.entries.load().keys())
            .finish_non_exhaustive()
    }
}

impl Entry {
    fn new(identity: Identity) -> Self {
        Self {
            identity,
            held: ArcSwapOption::empty(),
            failure: Mutex::default(),
            flight: Arc::default(),
        }
    }

    fn valid(&self, now: SystemTime) -> Option<Arc<Credential>> {
        let held = self.held.load();
        let credential = &held.as_ref()?.credential;
        credential.is_valid_at(now).then(|| Arc::clone(credential))
    }

    fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn hold(&self, held: Held) {
        self.held.store(Some(Arc::new(held)));
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn fail(&self, error: IdentityError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let attempts = failure.as_ref().map_or(0, |failure| failure.attempts).saturating_add(1);
        let now = Instant::now();
        *failure = Some(Failure { error, at: now, retry_at: now + backoff(attempts), attempts });
    }

    /// How long `run` has to wait before it asks again; zero when it is due.
    fn renewal_wait(&self, now: SystemTime) -> Duration {
        let due = match self.held.load().as_ref() {
            // A clock that was set back makes the certificate invalid: ask for one that fits it.
            Some(held) if now < held.credential.not_before() => Duration::ZERO,
            Some(held) => held.renew_at.duration_since(now).unwrap_or(Duration::ZERO),
            // The first caller is asking.
            None if self.failure().is_none() => RECHECK,
            None => Duration::ZERO,
        };
        let retry = self.failure().map_or(Duration::ZERO, |failure| {
            failure.retry_at.saturating_duration_since(Instant::now())
        });
        due.max(retry)
    }
}

/// Half way from now to the end, less the jitter. Counted from now and never under a second, so that a certificate that
/// comes backdated or half used is not asked for again at once.
fn renew_at(credential: &Credential, now: SystemTime) -> SystemTime {
    let left = credential.not_after().duration_since(now).unwrap_or(Duration::ZERO);
    now + left.mul_f64(0.5 - rand::random_range(0.0..JITTER)).max(Duration::from_secs(1))
}

/// 1 s, 2 s, 4 s … up to the cap, up to a fifth shorter at random.
fn backoff(attempts: u32) -> Duration {
    let doubled = Duration::from_secs(1 << attempts.saturating_sub(1).min(8));
    doubled.min(BACKOFF_CAP).mul_f64(rand::random_range(0.8..=1.0))
}

#[cfg(test)]
mod tests;
