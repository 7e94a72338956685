//! Readiness as latches: the node is ready once every part that took a [`Latch`] has released it.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

/// The names of what is still awaited.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    pending: Arc<Mutex<BTreeSet<&'static str>>>,
}

/// Keeps the node not ready until it is dropped.
#[derive(Debug)]
pub struct Latch {
    name: &'static str,
    readiness: Readiness,
}

impl Readiness {
    /// Holds readiness back under `name`, which `/healthz/ready` shows.
    pub fn latch(&self, name: &'static str) -> Latch {
        self.with(|pending| pending.insert(name));
        Latch { name, readiness: self.clone() }
    }

    /// What is still awaited, in alphabetical order; empty when ready.
    pub fn pending(&self) -> Vec<&'static str> {
        self.with(|pending| pending.iter().copied().collect())
    }

    fn with<T>(&self, f: impl FnOnce(&mut BTreeSet<&'static str>) -> T) -> T {
        // A set of names is valid whatever panicked while it was held.
        f(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        let name = self.name;
        self.readiness.with(|pending| pending.remove(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_once_every_latch_is_dropped() {
        let readiness = Readiness::default();
        let state = readiness.latch("state");
        let pods = readiness.latch("pods");
        assert_eq!(readiness.pending(), ["pods", "state"]);
        drop(state);
        assert_eq!(readiness.pending(), ["pods"]);
        drop(pods);
        assert!(readiness.pending().is_empty());
    }
}
