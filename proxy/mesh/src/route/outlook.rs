//! What a node knows of endpoints beside what the mesh says: how busy it keeps them itself, and
//! which did not answer. Dialling, counting and the clock are left to the caller.

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::workload::Workload;

/// What the caller knows of endpoints, for the choice among equals.
pub trait Outlook: Sync {
    /// How many connections the caller has open to it.
    fn load(&self, workload: &Workload) -> u32;

    /// Whether it failed lately, so that any other is to be preferred.
    fn is_avoided(&self, workload: &Workload) -> bool;
}

/// Nothing is known: all are idle and none is avoided.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoOutlook;

impl Outlook for NoOutlook {
    fn load(&self, _: &Workload) -> u32 {
        0
    }

    fn is_avoided(&self, _: &Workload) -> bool {
        false
    }
}

/// The endpoints that could not be reached, each avoided for a while that doubles with every
/// failure. Times are since any moment that the caller keeps to.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    by_uid: HashMap<Arc<str>, Failed>,
}

#[derive(Clone, Copy, Debug)]
struct Failed {
    /// In a row.
    times: u32,
    until: Duration,
}

impl Failures {
    /// Notes that the endpoint `uid` could not be reached at `now`.
    pub fn note(&mut self, uid: &Arc<str>, now: Duration) {
        if self.by_uid.len() >= MAX_FAILED && !self.by_uid.contains_key(uid) {
            self.by_uid.retain(|_, failed| failed.until > now);
            if self.by_uid.len() >= MAX_FAILED {
                return;
            }
        }
        let failed = self.by_uid.entry(Arc::clone(uid)).or_insert(Failed { times: 0, until: now });
        // Failures of connections that were under way together are one.
        if failed.until > now {
            return;
        }
        failed.until = now + FIRST_PAUSE * 2u32.pow(failed.times.min(MAX_DOUBLINGS));
        failed.times += 1;
    }

    /// Notes that the endpoint `uid` was reached: its failures are forgotten.
    pub fn forget(&mut self, uid: &str) {
        self.by_uid.remove(uid);
    }

    /// Whether the endpoint `uid` is to be avoided at `now`.
    pub fn is_avoided(&self, uid: &str, now: Duration) -> bool {
        self.by_uid.get(uid).is_some_and(|failed| failed.until > now)
    }

    /// Whether no failure is remembered at all.
    pub fn is_empty(&self) -> bool {
        self.by_uid.is_empty()
    }
}

const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Up to 32 s.
const MAX_DOUBLINGS: u32 = 5;
/// When so many fail, it is not they who have the problem.
const MAX_FAILED: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn endpoints_are_avoided_for_a_while_that_doubles() {
        let uid: Arc<str> = "a".into();
        let mut failures = Failures::default();
        let mut now = seconds(100);
        for pause in [1, 2, 4, 8, 16, 32, 32] {
            failures.note(&uid, now);
            // One that was under way with it.
            failures.note(&uid, now);
            assert!(failures.is_avoided("a", now + Duration::from_millis(1000 * pause - 1)));
            now += seconds(pause);
            assert!(!failures.is_avoided("a", now), "after {pause} s");
        }
        failures.forget("a");
        failures.note(&uid, now);
        assert!(!failures.is_avoided("a", now + seconds(1)));
        assert!(!failures.is_avoided("b", now));
    }

    #[test]
    fn only_so_many_failures_are_remembered() {
        let mut failures = Failures::default();
        for i in 0..2 * MAX_FAILED {
            failures.note(&format!("{i}").into(), seconds(0));
        }
        assert_eq!(failures.by_uid.len(), MAX_FAILED);
        failures.note(&"later".into(), seconds(60));
        assert!(failures.is_avoided("later", seconds(60)) && failures.by_uid.len() == 1);
    }
}
