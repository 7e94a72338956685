//! The end of the node: what is left in the kernel, and what is not.

use std::sync::Arc;

use culvert_capture::{Node, Pod};
use culvert_sys::cgroup;

use super::RunError;
use crate::tasks::Tasks;

/// Removes every trace of the node from the kernel, or leaves all of it to hold connections.
pub(super) async fn take_down(
    node: Arc<Node>,
    pods: Vec<Pod>,
    cgroup: cgroup::Own,
    remove: bool,
    tasks: &Tasks,
) -> Result<(), RunError> {
    if !remove {
        return Ok(());
    }
    // Whoever else held the node has been drained.
    let Some(node) = Arc::into_inner(node) else { return Err(RunError::StillUsed) };
    let dismantle = move || {
        // Of these the namespace is at hand; that of whatever else is pinned must be looked for.
        for pod in pods {
            let id = pod.id();
            if let Err(error) = node.unenroll(pod) {
                let error = crate::error::chain(&error);
                tracing::warn!(error, netns = id, "pod not un-enrolled; trying again");
            }
        }
        node.dismantle()
    };
    let dismantled = tasks.blocking(dismantle).await.map_err(RunError::Thread)?;
    leave(cgroup);
    dismantled.map_err(RunError::Dismantle)
}

/// Gives the cgroup up. What may still be attached to it serves no process but this one.
pub(super) fn leave(cgroup: cgroup::Own) {
    if let Err(error) = cgroup.leave() {
        tracing::warn!(error = crate::error::chain(&error), "cgroup not removed");
    }
}
