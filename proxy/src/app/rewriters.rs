//! Looks again and again for programs of others that rewrite where pods connect to.

use std::{sync::Arc, time::Duration};

use culvert_capture::Node;
use tokio::time::MissedTickBehavior;

use crate::tasks::Tasks;

/// A CNI that is updated attaches its programs anew; nothing announces it.
const PERIOD: Duration = Duration::from_secs(30);

/// Runs until the tasks drain.
pub(super) async fn watch(node: Arc<Node>, tasks: Tasks) {
    let draining = tasks.draining();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = draining.cancelled() => return,
        }
        let node = Arc::clone(&node);
        match tasks.blocking(move || node.look_for_rewriters()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(
                    error = crate::error::chain(&error),
                    "not known whether anybody rewrites where pods connect to",
                );
            }
            Err(error) => tracing::error!(%error, "the look for rewriting programs failed"),
        }
    }
}
