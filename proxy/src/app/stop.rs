//! What tells the node to stop: signals, and its admin endpoint.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// What tells the node to stop. Once it is made, a signal no more ends the process, and none is missed.
pub(crate) struct Stop {
    signals: Option<(Signal, Signal)>,
    quit: CancellationToken,
}

impl Stop {
    pub(crate) fn new(quit: CancellationToken) -> Self {
        let signals = signal(SignalKind::terminate())
            .and_then(|term| Ok((term, signal(SignalKind::interrupt())?)))
            .inspect_err(|error| {
                tracing::error!(%error, "no signal handlers; stop with POST /quitquitquit");
            });
        Self { signals: signals.ok(), quit }
    }

    /// What tells it once more.
    pub(crate) fn again(self) -> Self {
        Self { quit: CancellationToken::new(), ..self }
    }

    /// Fires at SIGTERM, SIGINT, or when `quit` is cancelled.
    pub(crate) async fn told(&mut self) {
        let Some((term, int)) = &mut self.signals else { return self.quit.cancelled().await };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            () = self.quit.cancelled() => {}
        }
    }
}
