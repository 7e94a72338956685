//! The accept loop of a listener, and when it may end.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use culvert_capture::{Listener, Role};
use tokio::time::Instant;

use crate::{
    context::PodContext,
    dns::{self, Names},
    inbound, outbound,
    tasks::Tasks,
};

/// How long a listener goes on once its tasks drain: until the runtime has been told of what is in its queue.
pub(crate) const LAST_CALL: Duration = Duration::from_millis(50);
/// How long a listener goes on at least where its queue does not empty, because a successor has not taken its slot.
const LATEST_CALL: Duration = Duration::from_secs(1);
/// How long after another process's listener has taken its place a handshake that this one has begun may still complete:
/// time for one SYN-ACK to be sent again.
const HANDSHAKE: Duration = Duration::from_secs(3);

/// When listeners that others have taken the place of may close; shared by all of a node.
#[derive(Clone, Debug, Default)]
pub(super) struct LastCall(Arc<Mutex<Option<Instant>>>);

impl LastCall {
    /// As of now, what connections come are another's.
    pub(super) fn replaced(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Connections come to this process again.
    pub(super) fn restored(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// For how long a listener whose tasks drain goes on.
    fn remaining(&self) -> Duration {
        let replaced = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        replaced.map_or(LAST_CALL, |since| HANDSHAKE.saturating_sub(since.elapsed()).max(LAST_CALL))
    }
}

/// Takes connections until the tasks drain, then what the kernel has accepted already: closing the listener resets them.
pub(super) async fn accept(
    listener: Listener,
    context: Arc<PodContext>,
    names: Arc<Names>,
    tasks: Tasks,
    last_call: LastCall,
) {
    let draining = tasks.draining();
    let after = |least: Duration| {
        let (draining, last_call) = (&draining, &last_call);
        async move {
            draining.cancelled().await;
            tokio::time::sleep(last_call.remaining().max(least)).await;
        }
    };
    let (closing, closed) = (after(LAST_CALL), after(LATEST_CALL));
    tokio::pin!(closing, closed);
    loop {
        let captured = tokio::select! {
            // On a busy machine the timer is as late as everything else: the queue comes first.
            biased;
            () = &mut closed => return,
            captured = listener.accept() => captured,
            () = &mut closing => return,
        };
        let captured = match captured {
            Ok(captured) => captured,
            Err(error) => {
                let pod = format!("{}/{}", context.pod.namespace, context.pod.name);
                tracing::error!(%error, pod, role = ?listener.role(), "listener failed");
                return;
            }
        };
        let context = Arc::clone(&context);
        match listener.role() {
            Role::Outbound => tasks.spawn(outbound::carry(context, captured)),
            Role::Dns => tasks.spawn(dns::connection(Arc::clone(&names), context, captured)),
            Role::Inbound => tasks.spawn(inbound::plaintext(context, captured)),
            Role::Hbone => tasks.spawn(inbound::hbone(context, captured)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_replaced_listener_waits_for_handshakes_that_it_has_begun() {
        let last_call = LastCall::default();
        assert_eq!(last_call.remaining(), LAST_CALL);
        last_call.replaced();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(last_call.remaining() + Duration::from_secs(1), HANDSHAKE);
        tokio::time::advance(HANDSHAKE).await;
        assert_eq!(last_call.remaining(), LAST_CALL);
        last_call.restored();
        assert_eq!(last_call.remaining(), LAST_CALL);
    }
}
