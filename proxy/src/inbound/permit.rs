//! The permission to reach a pod, checked before delivery and again whenever what policy says of the pod changes.

use std::sync::Arc;

use culvert_mesh::{
    PodRef, Snapshot,
    policy::{self, Denial, Verdict},
};
use tokio::sync::watch;

use crate::state::State;

/// Policy stands against the connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Denied {
    #[error("policy denied the connection: {0}")]
    AtOnce(Denial),
    #[error("connection closed due to policy change: {0}")]
    Later(Denial),
    #[error("connection closed: the pod's workload record is gone")]
    Gone,
}

/// Evidence that policy allows a connection, as of the snapshot it was last checked against.
pub(super) struct Permit<'a> {
    state: &'a State,
    pod: &'a PodRef,
    connection: policy::Connection,
    changed: watch::Receiver<()>,
}

impl<'a> Permit<'a> {
    /// Asks policy about `connection` to `pod`.
    pub(super) fn check(
        state: &'a State,
        pod: &'a PodRef,
        connection: policy::Connection,
    ) -> Result<Self, Denied> {
        // Subscribed before the check, so that no change falls between the two.
        let changed = state.subscribe_terms(pod);
        let snapshot = state.load();
        // An earlier snapshot's record of the pod may not name a policy that this one has.
        let Some(local) = snapshot.find_local(pod) else { return Err(Denied::Gone) };
        for policy in policy::dry_run(&snapshot, local, &connection) {
            tracing::info!(
                policy = %policy.key,
                action = ?policy.action,
                src.addr = %connection.source,
                dst.addr = %connection.destination,
                "dry-run policy matched"
            );
        }
        match policy::evaluate(&snapshot, local, &connection) {
            Verdict::Allowed => Ok(Self { state, pod, connection, changed }),
            Verdict::Denied { reason } => Err(Denied::AtOnce(reason)),
        }
    }

    /// Ends when policy, or the pod's own record, no longer allows the connection.
    pub(super) async fn withdrawn(&mut self) -> Denied {
        loop {
            if self.changed.changed().await.is_err() {
                // The state lives as long as the node; without it nothing changes any more.
                std::future::pending::<()>().await;
            }
            if let Some(denied) = self.recheck(&self.state.load()) {
                return denied;
            }
        }
    }

    fn recheck(&self, snapshot: &Arc<Snapshot>) -> Option<Denied> {
        let Some(local) = snapshot.find_local(self.pod) else { return Some(Denied::Gone) };
        match policy::evaluate(snapshot, local, &self.connection) {
            Verdict::Allowed => None,
            Verdict::Denied { reason } => Some(Denied::Later(reason)),
        }
    }
}

#[cfg(test)]
mod tests;
