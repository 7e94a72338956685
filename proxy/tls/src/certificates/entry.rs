//! One identity of the store: what is held for it, and when that is due for renewal or to be forgotten.
//!
//! Pure of the issuer: asking it, and in which order, is [`super::Certificates`]'s.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use culvert_mesh::Identity;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::Instant;

use super::{IdentityError, RECHECK};
use crate::credential::Credential;

/// A failure is answered from memory for this long; then the next caller tries again.
pub(super) const FAILURE_MEMORY: Duration = Duration::from_secs(1);
/// Longest wait between attempts to renew.
pub(super) const BACKOFF_CAP: Duration = Duration::from_secs(150);
/// Renewal is due up to this part of the validity before half way, so that certificates made together part ways.
const JITTER: f64 = 0.05;
/// What nobody retains is forgotten after this.
pub(super) const KEPT: Duration = Duration::from_mins(1);

pub(super) struct Entry {
    pub(super) identity: Identity,
    pub(super) held: ArcSwapOption<Held>,
    failure: Mutex<Option<Failure>>,
    holders: Mutex<Holders>,
    /// Held by whoever is asking the issuer for this identity.
    pub(super) flight: Arc<AsyncMutex<()>>,
    /// The generation of what is held; 0 before the first.
    pub(super) newest: watch::Sender<u64>,
}

pub(super) struct Held {
    pub(super) credential: Arc<Credential>,
    /// When to ask for the next one.
    renew_at: SystemTime,
}

/// The latest attempt, when it failed.
#[derive(Clone)]
pub(super) struct Failure {
    pub(super) error: IdentityError,
    pub(super) at: Instant,
    retry_at: Instant,
    attempts: u32,
}

/// How many retain the entry.
struct Holders {
    count: usize,
    /// When the last one let go; when the entry was made, if there was none.
    since: Instant,
}

impl Entry {
    pub(super) fn new(identity: Identity) -> Self {
        Self {
            identity,
            held: ArcSwapOption::empty(),
            failure: Mutex::default(),
            holders: Mutex::new(Holders { count: 0, since: Instant::now() }),
            flight: Arc::default(),
            newest: watch::Sender::new(0),
        }
    }

    /// What is held, if that may be used at `now`.
    pub(super) fn valid(&self, now: SystemTime) -> Option<Arc<Credential>> {
        let held = self.held.load();
        let credential = &held.as_ref()?.credential;
        credential.is_valid_at(now).then(|| Arc::clone(credential))
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn hold(&self, credential: &Arc<Credential>, now: SystemTime) {
        let renew_at = renew_at(credential, now);
        self.held.store(Some(Arc::new(Held { credential: Arc::clone(credential), renew_at })));
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.newest.send_replace(credential.generation());
    }

    pub(super) fn fail(&self, error: IdentityError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let attempts = failure.as_ref().map_or(0, |failure| failure.attempts).saturating_add(1);
        let now = Instant::now();
        *failure = Some(Failure { error, at: now, retry_at: now + backoff(attempts), attempts });
    }

    pub(super) fn retain(&self) {
        self.holders().count += 1;
    }

    pub(super) fn release(&self) {
        let mut holders = self.holders();
        holders.count = holders.count.saturating_sub(1);
        holders.since = Instant::now();
    }

    /// How long until the entry may be forgotten; `None` while somebody retains it.
    pub(super) fn forgotten_in(&self) -> Option<Duration> {
        let holders = self.holders();
        (holders.count == 0).then(|| KEPT.saturating_sub(holders.since.elapsed()))
    }

    fn holders(&self) -> MutexGuard<'_, Holders> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long `run` has to wait before it asks again; zero when it is due.
    pub(super) fn renewal_wait(&self, now: SystemTime) -> Duration {
        let held = self.held.load();
        let due = match held.as_ref() {
            // A clock that was set back makes the certificate invalid: ask for one that fits it.
            Some(held) if now < held.credential.not_before() => Duration::ZERO,
            Some(held) => held.renew_at.duration_since(now).unwrap_or(Duration::ZERO),
            // The first caller is asking.
            None if self.failure().is_none() => RECHECK,
            None => Duration::ZERO,
        };
        let retry = self.failure().map_or(Duration::ZERO, |failure| {
            let wait = failure.retry_at.saturating_duration_since(Instant::now());
            match held.as_ref().filter(|held| held.credential.is_valid_at(now)) {
                Some(held) => wait.min(patience(&held.credential, now, failure.at.elapsed())),
                None => wait,
            }
        });
        due.max(retry)
    }
}

/// How long the next attempt may wait, `since` the last one, while a certificate is still good: not so long that the
/// last attempts before its end become few.
fn patience(credential: &Credential, now: SystemTime, since: Duration) -> Duration {
    let left = credential.not_after().duration_since(now).unwrap_or(Duration::ZERO);
    ((left + since) / 4).max(Duration::from_secs(1)).saturating_sub(since)
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
