//! Who has to be told when what policy says of one of this node's pods changes. What follows for its connections is
//! left to their permits.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
use culvert_mesh::{
    PodRef, Snapshot, Workload,
    policy::{Terms, terms},
};
use tokio::sync::watch;

/// The pods that have connections. Each change of the mesh is compared once for a pod, however many those are.
#[derive(Debug, Default)]
pub(super) struct PodTerms {
    pods: Mutex<HashMap<PodRef, Watched>>,
}

#[derive(Debug)]
struct Watched {
    seen: Seen,
    news: watch::Sender<()>,
}

/// What the mesh said of a pod.
#[derive(Debug)]
struct Seen {
    local: Option<Arc<Workload>>,
    policy_revision: u64,
    terms: Option<Terms>,
}

impl PodTerms {
    /// Fires when what `mesh` says of `pod` differs from now on.
    pub(super) fn subscribe(&self, pod: &PodRef, mesh: &ArcSwap<Snapshot>) -> watch::Receiver<()> {
        let mut pods = self.lock();
        if let Some(watched) = pods.get(pod) {
            return watched.news.subscribe();
        }
        // Read under the lock: whatever is stored later is compared with this.
        let seen = Seen::of(pod, &mesh.load());
        let (news, receiver) = watch::channel(());
        pods.insert(pod.clone(), Watched { seen, news });
        receiver
    }

    /// Compares what `mesh` says now, and forgets pods that have no connection any more.
    pub(super) fn renew(&self, mesh: &ArcSwap<Snapshot>) {
        let mut pods = self.lock();
        let mesh = mesh.load();
        pods.retain(|pod, Watched { seen, news }| {
            if seen.renew(pod, &mesh) {
                news.send_replace(());
            }
            news.receiver_count() > 0
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodRef, Watched>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    fn of(pod: &PodRef, mesh: &Snapshot) -> Self {
        let local = mesh.find_local(pod);
        let terms = local.map(|local| terms(mesh, local));
        Self { local: local.cloned(), policy_revision: mesh.policy_revision(), terms }
    }

    /// Whether policy says something else of `pod` now.
    fn renew(&mut self, pod: &PodRef, mesh: &Snapshot) -> bool {
        let local = mesh.find_local(pod);
        let same_local = match (&self.local, local) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if same_local && self.policy_revision == mesh.policy_revision() {
            return false;
        }
        let old = std::mem::replace(self, Self::of(pod, mesh));
        old.terms != self.terms
    }
}

#[cfg(test)]
mod tests;
