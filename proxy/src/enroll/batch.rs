//! Events of a pod source, taken together as far as they are there already.

use std::{collections::BTreeMap, sync::Arc};

use futures::FutureExt as _;

use crate::pods::{PodEvent, PodSource, PodSpec};

/// What the source wants of each pod that it has told of at one go: to be enrolled so, or not at all.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) wanted: BTreeMap<Arc<str>, Option<PodSpec>>,
    pub(super) synced: bool,
}

impl Batch {
    /// Waits for the next event, and takes what else is there already. Cancel-safe.
    ///
    /// Only together do events tell a pod that moves, or that gets another name, from one that leaves.
    pub(super) async fn next(source: &mut impl PodSource) -> Self {
        let mut batch = Self::default();
        let mut event = source.next().await;
        loop {
            let (uid, spec) = match event {
                PodEvent::Added(spec) => (Arc::clone(&spec.uid), Some(spec)),
                PodEvent::Removed(uid) => (uid, None),
                PodEvent::Synced => {
                    batch.synced = true;
                    return batch;
                }
            };
            batch.wanted.insert(uid, spec);
            let Some(next) = source.next().now_or_never() else { return batch };
            event = next;
        }
    }
}
