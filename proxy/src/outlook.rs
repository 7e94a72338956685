//! What a pod's proxy has learnt of endpoints: which did not answer it lately, and how many connections it has open to
//! each. It is per pod, so that no pod can turn others away from an endpoint.
//!
//! What follows from it for the choice of an endpoint is `culvert-mesh`'s.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use culvert_mesh::{
    route::{Failures, Outlook},
    workload::Workload,
};
use tokio::time::Instant;

/// Shared by the connections of a pod.
#[derive(Debug)]
pub(crate) struct PodOutlook {
    since: Instant,
    failures: Mutex<Failures>,
    /// Whether there are any, so that connections of a pod without failures take no lock for them.
    has_failures: AtomicBool,
    /// By uid; of each at least one.
    open: Mutex<HashMap<Arc<str>, u32>>,
}

impl PodOutlook {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            since: Instant::now(),
            failures: Mutex::default(),
            has_failures: AtomicBool::new(false),
            open: Mutex::default(),
        })
    }

    /// The endpoint could not be reached.
    pub(crate) fn failed(&self, uid: &Arc<str>) {
        self.failures().note(uid, self.since.elapsed());
        self.has_failures.store(true, Ordering::Release);
    }

    /// The endpoint was reached.
    pub(crate) fn reached(&self, uid: &str) {
        if !self.has_failures.load(Ordering::Acquire) {
            return;
        }
        let mut failures = self.failures();
        failures.forget(uid);
        self.has_failures.store(!failures.is_empty(), Ordering::Release);
    }

    /// Counts a connection to the endpoint until what it gives is dropped.
    pub(crate) fn count(self: &Arc<Self>, uid: &Arc<str>) -> Counted {
        *self.open().entry(Arc::clone(uid)).or_default() += 1;
        Counted { outlook: Arc::clone(self), uid: Arc::clone(uid) }
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> MutexGuard<'_, HashMap<Arc<str>, u32>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outlook for PodOutlook {
    fn load(&self, workload: &Workload) -> u32 {
        self.open().get(&workload.uid).copied().unwrap_or_default()
    }

    fn is_avoided(&self, workload: &Workload) -> bool {
        self.has_failures.load(Ordering::Acquire)
            && self.failures().is_avoided(&workload.uid, self.since.elapsed())
    }
}

/// A connection to an endpoint.
#[derive(Debug)]
pub(crate) struct Counted {
    outlook: Arc<PodOutlook>,
    uid: Arc<str>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut open = self.outlook.open();
        if let Some(count) = open.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use culvert_mesh::file;

    use super::*;

    fn endpoint() -> Arc<Workload> {
        let text = "workloads: [{uid: a, name: a, namespace: n, serviceAccount: s, workloadIps: [10.0.0.1]}]";
        let snapshot = file::parse(std::path::Path::new("mesh.yaml"), text).unwrap();
        Arc::clone(snapshot.find_by_address("", &"10.0.0.1".parse().unwrap()).unwrap())
    }

    #[tokio::test]
    async fn connections_are_counted_while_they_last() {
        let (outlook, endpoint) = (PodOutlook::new(), endpoint());
        let one = outlook.count(&endpoint.uid);
        let two = outlook.count(&endpoint.uid);
        assert_eq!(outlook.load(&endpoint), 2);
        drop(one);
        assert_eq!(outlook.load(&endpoint), 1);
        drop(two);
        assert_eq!((outlook.load(&endpoint), outlook.open().len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_failed_is_avoided_for_a_while_or_until_it_is_reached() {
        let (outlook, endpoint) = (PodOutlook::new(), endpoint());
        assert!(!outlook.is_avoided(&endpoint));
        outlook.failed(&endpoint.uid);
        assert!(outlook.is_avoided(&endpoint));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!outlook.is_avoided(&endpoint));
        outlook.failed(&endpoint.uid);
        assert!(outlook.is_avoided(&endpoint));
        outlook.reached("another");
        assert!(outlook.is_avoided(&endpoint));
        outlook.reached(&endpoint.uid);
        assert!(!outlook.is_avoided(&endpoint) && !outlook.has_failures.load(Ordering::Acquire));
    }
}
