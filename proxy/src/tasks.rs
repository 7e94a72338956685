//! Owns every task: what is spawned here is awaited by drain and can be cut. Nothing else in the proxy spawns.

use std::time::Duration;

use futures::FutureExt as _;
use tokio::{runtime::Handle, task::JoinError};
use tokio_util::{future::FutureExt as _, sync::CancellationToken, task::TaskTracker};

/// A group of tasks that end together: first asked to ([`Tasks::draining`]), then made to ([`Tasks::drain`]).
#[derive(Clone, Debug)]
pub struct Tasks {
    runtime: Handle,
    tracker: TaskTracker,
    draining: CancellationToken,
    cut: CancellationToken,
}

impl Tasks {
    /// An empty group whose tasks run on `runtime`.
    pub fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            tracker: TaskTracker::new(),
            draining: CancellationToken::new(),
            cut: CancellationToken::new(),
        }
    }

    /// A group of its own that is also asked to end, and cut, whenever this one is. Its drain is its owner's to await.
    #[must_use]
    pub fn child(&self) -> Self {
        Self {
            runtime: self.runtime.clone(),
            tracker: TaskTracker::new(),
            draining: self.draining.child_token(),
            cut: self.cut.child_token(),
        }
    }

    /// Runs `task` until it ends or the group is cut.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // An async block around it would hold the task twice.
        let task = task.with_cancellation_token_owned(self.cut.clone()).map(|_ended| ());
        self.tracker.spawn_on(task, &self.runtime);
    }

    /// Runs `work` on a thread that may block. It is not cut: dropping the future leaves it to its end, which drain awaits.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        self.tracker.spawn_blocking_on(work, &self.runtime).await
    }

    /// Fires when the group is asked to end: listeners stop accepting, HBONE servers send GOAWAY.
    pub fn draining(&self) -> CancellationToken {
        self.draining.clone()
    }

    /// Asks the group to end, waits up to `deadline`, then cuts what is left. Gives how many tasks were cut.
    pub async fn drain(&self, deadline: Duration) -> usize {
        self.draining.cancel();
        self.tracker.close();
        if tokio::time::timeout(deadline, self.tracker.wait()).await.is_ok() {
            return 0;
        }
        let left = self.tracker.len();
        self.cut.cancel();
        self.tracker.wait().await;
        left
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_tasks_that_end() {
        let tasks = Tasks::new(Handle::current());
        let draining = tasks.draining();
        tasks.spawn(async move { draining.cancelled().await });
        assert_eq!(tasks.drain(Duration::from_secs(1)).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn drain_cuts_what_does_not_end() {
        let tasks = Tasks::new(Handle::current());
        tasks.spawn(std::future::pending());
        assert_eq!(tasks.drain(Duration::from_secs(1)).await, 1);
    }

    #[tokio::test]
    async fn drain_waits_for_blocking_work_that_nobody_awaits() {
        let tasks = Tasks::new(Handle::current());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(());
        let work = {
            let held = Arc::clone(&held);
            move || drop((ended.recv(), held))
        };
        assert!(tasks.blocking(work).now_or_never().is_none());
        let mut drain = Box::pin(tasks.drain(Duration::ZERO));
        assert!(futures::poll!(&mut drain).is_pending());
        drop(end);
        drain.await;
        assert!(Arc::into_inner(held).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_ends_alone() {
        let tasks = Tasks::new(Handle::current());
        let (one, two) = (tasks.child(), tasks.child());
        one.spawn(std::future::pending());
        let draining = two.draining();
        two.spawn(async move { draining.cancelled().await });
        assert_eq!(one.drain(Duration::from_secs(1)).await, 1);
        assert!(!two.draining().is_cancelled());
        assert_eq!(two.drain(Duration::from_secs(1)).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_is_asked_to_end_with_its_parent() {
        let tasks = Tasks::new(Handle::current());
        let child = tasks.child();
        tasks.drain(Duration::ZERO).await;
        assert!(child.draining().is_cancelled());
    }
}
