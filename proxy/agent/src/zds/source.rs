//! Pods as an agent tells of them: the proxy's side over one connection after another.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::pending,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use culvert_mesh::error::chain;
use culvert_sys::netns::Netns;
use tokio::time::{Instant, sleep_until};

use super::{Client, ClientError, Request};
use crate::pods::{Place, PodEvent, PodSource, PodSpec};

/// How long after a connection ended the next is tried; doubled each time, up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(20);
/// The longest wait between two tries.
const BACKOFF_MAX: Duration = Duration::from_secs(15);
/// How errors call a descriptor that an agent has sent.
const RECEIVED: &str = "(received from the agent)";

/// The pods that the agent at a socket tells of. While no agent is there, what was told stays true.
#[derive(Debug)]
pub struct Agent {
    path: PathBuf,
    client: Option<Client>,
    backoff: Duration,
    next_try: Instant,
    /// By UID, and whether it was done.
    told: BTreeMap<Arc<str>, (PodSpec, bool)>,
    /// Told on this connection, until its snapshot is complete.
    mentioned: BTreeSet<Arc<str>>,
    queue: VecDeque<PodEvent>,
    /// The request that is being dealt with.
    awaiting: Option<Arc<str>>,
    answer: Option<Result<(), String>>,
    synced: bool,
}

impl Agent {
    /// Connects to the socket at `path` once the first event is waited for, and again whenever that ends.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            client: None,
            backoff: BACKOFF,
            next_try: Instant::now(),
            told: BTreeMap::new(),
            mentioned: BTreeSet::new(),
            queue: VecDeque::new(),
            awaiting: None,
            answer: None,
            synced: false,
        }
    }

    /// Goes one step on with the connection. Cancel-safe: what it has taken from the socket is kept.
    async fn step(&mut self) -> Result<(), ClientError> {
        let Some(client) = &mut self.client else {
            sleep_until(self.next_try).await;
            self.client = Some(Client::connect(&self.path).await?);
            tracing::info!(agent = %self.path.display(), "connected to the agent");
            self.mentioned.clear();
            return Ok(());
        };
        if let Some(answer) = &self.answer {
            client.answer(answer.as_ref().copied().map_err(String::as_str)).await?;
            self.answer = None;
            self.backoff = BACKOFF;
        }
        if self.awaiting.is_some() {
            return pending().await;
        }
        let request = client.next().await?;
        self.take(request);
        Ok(())
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Add { uid, pod, netns } => {
                let netns = match Netns::of(netns.into(), Path::new(RECEIVED)) {
                    Ok(netns) => netns,
                    Err(error) => {
                        self.answer = Some(Err(error.to_string()));
                        return;
                    }
                };
                let netns = Place::Open(netns);
                let spec =
                    PodSpec { uid: Arc::clone(&uid), pod, netns, annotations: BTreeMap::new() };
                self.mentioned.insert(Arc::clone(&uid));
                if self.told.get(&uid).is_some_and(|(told, done)| *told == spec && *done) {
                    self.answer = Some(Ok(()));
                    return;
                }
                self.told.insert(Arc::clone(&uid), (spec.clone(), false));
                self.awaiting = Some(uid);
                self.queue.push_back(PodEvent::Added(spec));
            }
            Request::Keep { uid } => {
                self.mentioned.insert(uid);
                self.answer = Some(Ok(()));
            }
            Request::Remove { uid } => {
                if self.told.remove(&uid).is_some() {
                    self.queue.push_back(PodEvent::Removed(Arc::clone(&uid)));
                    self.awaiting = Some(uid);
                } else {
                    self.answer = Some(Ok(()));
                }
            }
            Request::Snapshot => {
                let gone: Vec<_> = self
                    .told
                    .keys()
                    .filter(|uid| !self.mentioned.contains(*uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.told.remove(&uid);
                    self.queue.push_back(PodEvent::Removed(uid));
                }
                if !std::mem::replace(&mut self.synced, true) {
                    self.queue.push_back(PodEvent::Synced);
                }
                self.answer = Some(Ok(()));
            }
        }
    }
}

impl PodSource for Agent {
    async fn next(&mut self) -> PodEvent {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            if let Err(error) = self.step().await {
                let error = chain(&error);
                tracing::warn!(error, retry = ?self.backoff, "no agent; the pods stay as they are");
                (self.client, self.answer, self.awaiting) = (None, None, None);
                self.next_try = Instant::now() + self.backoff;
                self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
            }
        }
    }

    fn settled(&mut self, uid: &str, outcome: Result<(), &str>) {
        if let Some((_, done)) = self.told.get_mut(uid) {
            *done = outcome.is_ok();
        }
        if self.awaiting.as_deref() == Some(uid) {
            self.awaiting = None;
            self.answer = Some(outcome.map_err(str::to_owned));
        }
    }
}
