//! The count of one connection's open streams, and since when there is none.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// Shared by a connection in rotation and its tunnels.
#[derive(Debug)]
pub(super) struct Slots {
    created: Instant,
    active: AtomicUsize,
    /// Milliseconds after `created` when `active` last became 0.
    idle_since: AtomicU64,
}

impl Slots {
    /// For a connection whose first stream is about to open.
    pub(super) fn with_one() -> (Arc<Self>, Slot) {
        let slots = Arc::new(Self {
            created: Instant::now(),
            active: AtomicUsize::new(1),
            idle_since: AtomicU64::new(0),
        });
        (Arc::clone(&slots), Slot { slots })
    }

    /// One more stream, unless there are `limit` already.
    ///
    /// Only called with the shard of the connection locked, so that none is taken while the connection leaves rotation.
    pub(super) fn take(self: &Arc<Self>, limit: usize) -> Option<Slot> {
        self.active
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |active| {
                (active < limit).then(|| active + 1)
            })
            .ok()
            .map(|_| Slot { slots: Arc::clone(self) })
    }

    /// Since when no stream is open; `None` while one is.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let since = Duration::from_millis(self.idle_since.load(Ordering::Acquire));
        (self.active.load(Ordering::Acquire) == 0).then(|| self.created + since)
    }
}

/// One open stream.
#[derive(Debug)]
pub(in crate::hbone) struct Slot {
    slots: Arc<Slots>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let since = self.slots.created.elapsed().as_millis();
        self.slots.idle_since.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Release);
        self.slots.active.fetch_sub(1, Ordering::AcqRel);
    }
}
