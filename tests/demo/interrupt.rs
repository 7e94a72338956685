//! Ctrl-C and SIGTERM as messages, so that leaving early still takes everything down.

use std::{
    sync::mpsc::{Receiver, TryRecvError, channel},
    thread,
};

use anyhow::{Context as _, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

/// Receives the signals that ask the demo to end.
#[derive(Debug)]
pub(crate) struct Interrupt(Receiver<&'static str>);

impl Interrupt {
    /// Takes the signals over. They are handled, not blocked, as the processes of the demo would inherit a block.
    pub(crate) fn watch() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let (mut interrupts, mut terminations) = {
            let _inside = runtime.enter();
            (
                signal(SignalKind::interrupt()).context("handle SIGINT")?,
                signal(SignalKind::terminate()).context("handle SIGTERM")?,
            )
        };
        let (sender, receiver) = channel();
        thread::spawn(move || {
            runtime.block_on(async {
                loop {
                    let name = tokio::select! {
                        _ = interrupts.recv() => "SIGINT",
                        _ = terminations.recv() => "SIGTERM",
                    };
                    // The receiver is gone once the demo ends by itself.
                    if sender.send(name).is_err() {
                        return;
                    }
                }
            });
        });
        Ok(Self(receiver))
    }

    /// An error once a signal has come.
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.try_recv() {
            Ok(signal) => bail!("ended by {signal}"),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => Ok(()),
        }
    }

    /// Waits for a signal and tells which it was.
    pub(crate) fn wait(&self) -> Result<&'static str> {
        self.0.recv().context("wait for a signal")
    }
}
