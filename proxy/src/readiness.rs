//! Readiness as latches: the node is ready once every part that took a [`Latch`] has released it.

use std::{collections::BTreeSet, sync::Arc};

use tokio::sync::watch;

/// The names of what is still awaited.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    pending: Arc<watch::Sender<BTreeSet<&'static str>>>,
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
        self.pending.send_modify(|pending| {
            pending.insert(name);
        });
        Latch { name, readiness: self.clone() }
    }

    /// What is still awaited, in alphabetical order; empty when ready.
    pub fn pending(&self) -> Vec<&'static str> {
        self.pending.borrow().iter().copied().collect()
    }

    /// Waits until nothing is awaited any more.
    pub async fn reached(&self) {
        // This half of the channel keeps it open.
        drop(self.pending.subscribe().wait_for(BTreeSet::is_empty).await);
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        let name = self.name;
        self.readiness.pending.send_modify(|pending| {
            pending.remove(name);
        });
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn ready_once_every_latch_is_dropped() {
        let readiness = Readiness::default();
        let state = readiness.latch("state");
        let pods = readiness.latch("pods");
        assert_eq!(readiness.pending(), ["pods", "state"]);
        drop(state);
        assert_eq!(readiness.pending(), ["pods"]);
        assert!(readiness.reached().now_or_never().is_none());
        drop(pods);
        assert!(readiness.pending().is_empty());
        assert!(readiness.reached().now_or_never().is_some());
    }
}
