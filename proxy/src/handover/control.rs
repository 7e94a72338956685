//! The control socket of a process: a successor takes the node over by it, and root may tell it to drain.

use std::{
    fs::{self, DirBuilder},
    io,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
};
use tokio_util::sync::CancellationToken;

use super::{
    HandoverError,
    wire::{Hello, Lines, Reply, Request},
};
use crate::{
    admin::{Endpoint, Endpoints},
    enroll::Command,
    error::chain,
    tasks::Tasks,
};

/// Conversations at one time. One is the successor's, another may be an operator's.
const CONVERSATIONS: usize = 8;

/// The socket, bound but not served yet; its file goes with it.
#[derive(Debug)]
pub(crate) struct Control {
    listener: UnixListener,
    file: SocketFile,
}

#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The next in this seat would take it away, too; and the folder may be another's still.
        drop(fs::remove_file(&self.0));
        if let Some(folder) = self.0.parent() {
            drop(fs::remove_dir(folder));
        }
    }
}

/// What a conversation can set in motion.
pub(crate) struct Host {
    /// Inode number of this process's network namespace, which a successor must share.
    pub(crate) netns: u32,
    pub(crate) endpoints: Endpoints,
    pub(crate) commands: mpsc::Sender<Command>,
    /// Cancelled by `drain`.
    pub(crate) quit: CancellationToken,
}

impl Control {
    /// Binds the socket at `path`, in place of one that a process before has left. The folder is for our user alone.
    pub(crate) fn bind(path: PathBuf) -> Result<Self, HandoverError> {
        let listener =
            listen(&path).map_err(|source| HandoverError::Bind { path: path.clone(), source })?;
        Ok(Self { listener, file: SocketFile(path) })
    }

    /// Serves until the tasks are cut.
    pub(crate) fn serve(self, host: Host, tasks: &Tasks) {
        let Self { listener, file } = self;
        let (tasks, host) = (tasks.clone(), Arc::new(host));
        let conversations = Arc::new(Semaphore::new(CONVERSATIONS));
        let successors = Arc::new(Semaphore::new(1));
        tasks.clone().spawn(async move {
            let _file = file;
            loop {
                let Ok(place) = Arc::clone(&conversations).acquire_owned().await else { return };
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        tracing::error!(%error, "control socket failed");
                        return;
                    }
                };
                let (host, successors) = (Arc::clone(&host), Arc::clone(&successors));
                tasks.spawn(async move {
                    let _place = place;
                    if let Err(error) = host.converse(stream, &successors).await {
                        tracing::warn!(
                            error = chain(&error),
                            "conversation on the control socket ended"
                        );
                    }
                });
            }
        });
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    if let Some(above) = folder.parent() {
        fs::create_dir_all(above)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    UnixListener::bind(path)
}

impl Host {
    async fn converse(&self, stream: UnixStream, successors: &Semaphore) -> io::Result<()> {
        let pid = stream.peer_cred()?.pid();
        let mut lines = Lines::new(stream)?;
        while let Some((line, _)) = lines.next().await? {
            match Request::parse(&line) {
                Some(Request::Hello(hello)) if hello.netns != self.netns => {
                    lines.send(&Reply::Elsewhere, &[]).await?;
                }
                Some(Request::Hello(Hello { ports, .. })) => {
                    let Ok(_only) = successors.try_acquire() else {
                        lines.send(&Reply::Taken, &[]).await?;
                        continue;
                    };
                    tracing::info!(pid, "another process takes over");
                    let served = self.serve_successor(&mut lines, &ports).await;
                    // Whatever ended it, the successor is gone, and what it has not given back is ours again.
                    let (done, _unheard) = oneshot::channel();
                    drop(self.commands.send(Command::Reclaim(done)).await);
                    self.endpoints.take_back();
                    return served;
                }
                Some(Request::Drain) => {
                    tracing::info!(pid, "told to drain");
                    self.quit.cancel();
                    lines.send(&Reply::Draining, &[]).await?;
                }
                _ => lines.send(&Reply::No, &[]).await?,
            }
        }
        Ok(())
    }

    async fn serve_successor(
        &self,
        lines: &mut Lines,
        wanted: &[(Endpoint, u16)],
    ) -> io::Result<()> {
        let lent = self.endpoints.lend(wanted);
        let names = lent.iter().map(|(endpoint, _)| *endpoint).collect();
        let descriptors: Vec<_> = lent.iter().map(|(_, socket)| socket.as_fd()).collect();
        lines.send(&Reply::Sockets(names), &descriptors).await?;
        while let Some((line, _)) = lines.next().await? {
            let reply = match Request::parse(&line) {
                Some(Request::Take) => self.command(Command::Yield).await,
                Some(Request::Leave) => {
                    let reply = self.command(Command::Reclaim).await;
                    if reply == Reply::Done {
                        self.endpoints.take_back();
                    }
                    reply
                }
                Some(Request::Ready) => {
                    drop(self.commands.send(Command::Overtaken).await);
                    continue;
                }
                _ => Reply::No,
            };
            lines.send(&reply, &[]).await?;
        }
        Ok(())
    }

    /// Commands the enrolment, and waits until it has obeyed. One that drains takes nothing back.
    async fn command(&self, command: impl FnOnce(oneshot::Sender<()>) -> Command) -> Reply {
        let (done, obeyed) = oneshot::channel();
        drop(self.commands.send(command(done)).await);
        match obeyed.await {
            Ok(()) => Reply::Done,
            Err(_dropped) => Reply::Draining,
        }
    }
}
