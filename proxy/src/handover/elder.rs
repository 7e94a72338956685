//! The process before this one, as its successor deals with it: asked for what it has, step by step, and watched until it ends.

use std::{io, net::TcpListener, path::Path, time::Duration};

use culvert_capture::{Elder, Seat};
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    HandoverError,
    wire::{Hello, Lines, Reply, Request},
};
use crate::{admin::Endpoint, enroll::Command, error::chain, tasks::Tasks};

/// How long the elder may take for an answer: it may be in the midst of its own start.
const ANSWER: Duration = Duration::from_secs(30);
/// Between two attempts to reach it.
const AGAIN: Duration = Duration::from_millis(20);

/// The elder, asked and answering.
#[derive(Debug)]
pub(crate) struct Predecessor {
    pid: Option<u32>,
    /// `None` once it is gone.
    lines: Option<Lines>,
    gone: CancellationToken,
}

/// By which a process tells its elder how it fares.
#[derive(Clone, Debug)]
pub(crate) struct Reports(mpsc::Sender<Report>);

#[derive(Debug)]
enum Report {
    Ready,
    Leave(oneshot::Sender<bool>),
}

impl Predecessor {
    /// There is none.
    pub(crate) fn none() -> Self {
        let gone = CancellationToken::new();
        gone.cancel();
        Self { pid: None, lines: None, gone }
    }

    /// Reaches the one that had the node when the seat was taken, by its control socket at `path`.
    pub(crate) async fn reach(
        path: &Path,
        seat: &Seat,
        Elder { pid, .. }: Elder,
    ) -> Result<Self, HandoverError> {
        let end = Instant::now() + ANSWER;
        loop {
            match UnixStream::connect(path).await {
                Ok(stream) => {
                    let lines = Lines::new(stream)
                        .map_err(|source| HandoverError::Elder { pid, source })?;
                    return Ok(Self { pid, lines: Some(lines), gone: CancellationToken::new() });
                }
                // It is about to bind it, or ends.
                Err(_) if !seat.has_neighbour().map_err(HandoverError::Seat)? => {
                    return Ok(Self { pid, ..Self::none() });
                }
                Err(source) if Instant::now() >= end => {
                    return Err(HandoverError::Unreachable { path: path.to_owned(), pid, source });
                }
                Err(_) => sleep(AGAIN).await,
            }
        }
    }

    /// Cancelled once it has ended; from the start where there was none.
    pub(crate) fn gone(&self) -> CancellationToken {
        self.gone.clone()
    }

    /// The listening sockets of these endpoints, as far as it has them on these ports. From now on it does not accept from them.
    /// `netns` is the inode number of our network namespace.
    pub(crate) async fn hello(
        &mut self,
        netns: u32,
        ports: Vec<(Endpoint, u16)>,
    ) -> Result<Vec<(Endpoint, TcpListener)>, HandoverError> {
        match self.ask(&Request::Hello(Hello { netns, ports })).await? {
            None => Ok(Vec::new()),
            Some((Reply::Sockets(names), descriptors)) => {
                Ok(names.into_iter().zip(descriptors.into_iter().map(TcpListener::from)).collect())
            }
            Some((Reply::Elsewhere, _)) => Err(HandoverError::Elsewhere { pid: self.pid }),
            Some((reply, _)) => Err(self.unexpected(&reply)),
        }
    }

    /// Makes it let go of the node and its pods. It goes on accepting what it is given until this process has taken them.
    pub(crate) async fn take(&mut self) -> Result<(), HandoverError> {
        match self.ask(&Request::Take).await? {
            // One that drains keeps nothing up any more.
            None | Some((Reply::Done | Reply::Draining, _)) => Ok(()),
            Some((reply, _)) => Err(self.unexpected(&reply)),
        }
    }

    /// Asks, and waits for the answer; `None` once it is gone.
    async fn ask(
        &mut self,
        request: &Request,
    ) -> Result<Option<(Reply, Vec<std::os::fd::OwnedFd>)>, HandoverError> {
        let pid = self.pid;
        let Some(lines) = &mut self.lines else { return Ok(None) };
        let answered = timeout(ANSWER, ask(lines, request)).await;
        match answered.map_err(|_elapsed| HandoverError::Silent { pid })? {
            Ok(Some(answer)) => Ok(Some(answer)),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(HandoverError::Elder { pid, source: error })
            }
            Ok(None) | Err(_) => {
                tracing::info!(pid, "the process before this one has ended");
                self.lines = None;
                self.gone.cancel();
                Ok(None)
            }
        }
    }

    fn unexpected(&self, reply: &Reply) -> HandoverError {
        let source = io::Error::new(io::ErrorKind::InvalidData, format!("it says \"{reply}\""));
        HandoverError::Elder { pid: self.pid, source }
    }

    /// Watches it until it ends, which `commands` are told, and tells it what is reported meanwhile.
    pub(crate) fn watch(self, commands: mpsc::Sender<Command>, tasks: &Tasks) -> Reports {
        let (reports, reported) = mpsc::channel(1);
        tasks.spawn(async move {
            let Self { pid, lines, gone } = self;
            let Some(mut lines) = lines else {
                // It went while this process started.
                if pid.is_some() {
                    drop(commands.send(Command::ElderGone).await);
                }
                return;
            };
            if let Err(error) = tell(&mut lines, reported).await {
                tracing::debug!(
                    error = chain(&error),
                    "conversation with the process before this one ended"
                );
            }
            tracing::info!(pid, "the process before this one has ended");
            gone.cancel();
            drop(commands.send(Command::ElderGone).await);
        });
        Reports(reports)
    }
}

impl Reports {
    /// This process is ready.
    pub(crate) async fn ready(&self) {
        // Where the elder is gone, nobody needs to know.
        drop(self.0.send(Report::Ready).await);
    }

    /// This process ends: the elder takes the node back. `false` where there is none that can.
    pub(crate) async fn leave(&self) -> bool {
        let (done, taken) = oneshot::channel();
        drop(self.0.send(Report::Leave(done)).await);
        matches!(timeout(ANSWER, taken).await, Ok(Ok(true)))
    }
}

async fn ask(
    lines: &mut Lines,
    request: &Request,
) -> io::Result<Option<(Reply, Vec<std::os::fd::OwnedFd>)>> {
    lines.send(request, &[]).await?;
    let Some((line, descriptors)) = lines.next().await? else { return Ok(None) };
    let reply = Reply::parse(&line)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("it says {line:?}")))?;
    Ok(Some((reply, descriptors)))
}

/// Passes reports on, until the elder ends.
async fn tell(lines: &mut Lines, mut reported: mpsc::Receiver<Report>) -> io::Result<()> {
    loop {
        tokio::select! {
            line = lines.next() => if line?.is_none() { return Ok(()) },
            Some(report) = reported.recv() => match report {
                Report::Ready => lines.send(&Request::Ready, &[]).await?,
                Report::Leave(done) => {
                    let Some((reply, _)) = ask(lines, &Request::Leave).await? else { return Ok(()) };
                    // Who asked may have given up.
                    let _heard = done.send(reply == Reply::Done);
                }
            },
        }
    }
}
