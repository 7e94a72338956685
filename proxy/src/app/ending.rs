//! What a process holds while it runs, and its end: what is left in the kernel, and to whom.

use std::{sync::Arc, time::Duration};

use culvert_capture::Node;
use culvert_sys::cgroup;
use tokio_util::sync::CancellationToken;

use super::{RunError, stop::Stop};
use crate::{
    admin::Endpoints, enroll::Enrolment, handover::Reports, readiness::Readiness, tasks::Tasks,
};

/// Of the data path's tasks, when it ends without a drain.
const AT_ONCE: Duration = Duration::ZERO;

/// What a process holds from its start to its end.
pub(super) struct Running {
    pub(super) node: Arc<Node>,
    pub(super) enrolment: Enrolment,
    pub(super) cgroup: cgroup::Own,
    pub(super) endpoints: Endpoints,
    pub(super) elder_gone: CancellationToken,
    pub(super) reports: Reports,
    pub(super) data_tasks: Tasks,
    pub(super) control_tasks: Tasks,
}

impl Running {
    /// Lets the process before know when this one is ready.
    pub(super) fn report_readiness(&self, readiness: Readiness) {
        let reports = self.reports.clone();
        self.control_tasks.spawn(async move {
            readiness.reached().await;
            reports.ready().await;
        });
    }

    /// Ends a start that came to nothing.
    pub(super) async fn abandon(mut self, remove: bool) -> Result<(), RunError> {
        self.give_back().await;
        self.enrolment.drain(AT_ONCE).await;
        self.take_down(remove).await
    }

    /// Drains, unless it is told to stop once more, and ends.
    pub(super) async fn end(
        mut self,
        drain: Duration,
        remove: bool,
        mut again: Stop,
    ) -> Result<(), RunError> {
        self.give_back().await;
        tracing::info!(deadline = ?drain, "draining");
        self.node.open_up();
        tokio::select! {
            () = self.enrolment.drain(drain) => {}
            () = again.told() => {
                tracing::warn!("told to stop again: not waiting for connections");
                self.enrolment.drain(AT_ONCE).await;
            }
        }
        self.take_down(remove).await
    }

    /// Lets the process before, where that has not been told to drain, go on as if this one had not been.
    async fn give_back(&mut self) {
        if self.elder_gone.is_cancelled() {
            return;
        }
        self.enrolment.let_go().await;
        self.endpoints.give_up();
        if !self.reports.leave().await {
            self.endpoints.take_back();
        }
    }

    /// Removes every trace of the node from the kernel, or leaves all of it: to another process that holds it, or to hold
    /// connections until one comes.
    async fn take_down(self, remove: bool) -> Result<(), RunError> {
        let Self { node, enrolment, cgroup, data_tasks, control_tasks, .. } = self;
        data_tasks.drain(AT_ONCE).await;
        control_tasks.drain(AT_ONCE).await;
        let replaced = enrolment.is_replaced();
        let pods = enrolment.release();
        if !remove || !node.hold_alone() {
            if remove || replaced {
                leave(cgroup);
            }
            return Ok(());
        }
        // Whoever else used the node has been drained.
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
        let dismantled = data_tasks.blocking(dismantle).await.map_err(RunError::Thread)?;
        leave(cgroup);
        dismantled.map_err(RunError::Dismantle)
    }
}

/// Gives the cgroup up. What may still be attached to it serves no process but this one.
pub(super) fn leave(cgroup: cgroup::Own) {
    if let Err(error) = cgroup.leave() {
        tracing::warn!(error = crate::error::chain(&error), "cgroup not removed");
    }
}
