//! Pods that leave, or are replaced in their namespace: what they still carry is drained in the background, so that no
//! other pod waits for it; then those that leave are un-enrolled.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use culvert_capture::{Node, Pod};
use culvert_carry::hbone::server::Phase;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::RETRY;
use crate::{context::PodContext, error::chain, tasks::Tasks};

/// How long un-enrolments may take whose pods carry nothing any more.
const REMOVAL: Duration = Duration::from_secs(5);

/// What carries a pod's connections.
#[derive(Clone)]
pub(super) struct Proxy {
    pub(super) context: Arc<PodContext>,
    pub(super) tasks: Tasks,
}

impl Proxy {
    /// Ends the pod's connections: its HBONE servers say GOAWAY, and what has not ended by the deadline is cut. Gives
    /// how many were.
    pub(super) async fn drain(&self, deadline: Duration) -> usize {
        self.context.phase.send_replace(Phase::Draining);
        self.tasks.drain(deadline).await
    }

    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.context.pod.namespace, self.context.pod.name)
    }
}

/// What becomes of the pod's capture once its proxy has drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It ends.
    Leaves,
    /// It goes on: another proxy has taken over, or shall.
    Stays,
    /// It is being ended, and can no more be kept.
    BeingRemoved,
}

/// What un-enrolment has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Left {
    Nothing,
    /// A pod that is no more carried, and cut off for as long as it is held: it must be tried again.
    Something,
}

/// Every pod that is on its way out.
pub(super) struct Departures {
    node: Arc<Node>,
    drain: Duration,
    tasks: Tasks,
    elder_gone: CancellationToken,
    all: Vec<Arc<Departure>>,
    /// At most one message each.
    outcomes: (mpsc::UnboundedSender<Left>, mpsc::UnboundedReceiver<Left>),
}

struct Departure {
    inode: u32,
    proxy: Proxy,
    fate: Mutex<Fate>,
    ended: CancellationToken,
}

impl Departures {
    /// None yet; their tasks will be in `tasks`, which must be no other's. Until `elder_gone` a process before may have
    /// connections of the pods, too.
    pub(super) fn new(
        node: Arc<Node>,
        drain: Duration,
        tasks: Tasks,
        elder_gone: CancellationToken,
    ) -> Self {
        let (all, outcomes) = (Vec::new(), mpsc::unbounded_channel());
        Self { node, drain, tasks, elder_gone, all, outcomes }
    }

    pub(super) fn add(&mut self, pod: Pod, proxy: Proxy, fate: Fate) {
        let departure = Arc::new(Departure {
            inode: pod.id(),
            proxy,
            fate: Mutex::new(fate),
            ended: CancellationToken::new(),
        });
        self.all.push(Arc::clone(&departure));
        let (node, tasks) = (Arc::clone(&self.node), self.tasks.clone());
        let (outcome, drain) = (self.outcomes.0.clone(), self.drain);
        let elder_gone = self.elder_gone.clone();
        self.tasks.spawn(async move {
            let elders = async {
                // Its connections of the pod have as much time as ours.
                if fate == Fate::Leaves {
                    let _ended = tokio::time::timeout(drain, elder_gone.cancelled()).await;
                }
            };
            tokio::join!(departure.proxy.drain(drain), elders);
            let left = if departure.seal() == Fate::Stays {
                drop(pod);
                Left::Nothing
            } else {
                departure.remove(pod, node, &tasks).await
            };
            departure.ended.cancel();
            // Nobody asks any more when the node ends.
            let _told = outcome.send(left);
        });
    }

    /// Lets the capture of the pod in this namespace go on, for another that is about to be enrolled in it; waits where
    /// it is being removed.
    pub(super) async fn keep(&self, inode: u32) {
        for departure in self.all.iter().filter(|departure| departure.inode == inode) {
            departure.settle().await;
        }
    }

    /// Lets the capture of all of them go on, for another process; waits where one is being removed.
    pub(super) async fn keep_all(&self) {
        for departure in &self.all {
            departure.settle().await;
        }
    }

    /// How the next one ended. Cancel-safe.
    pub(super) async fn next(&mut self) -> Left {
        // This half of the channel keeps it open.
        let left = self.outcomes.1.recv().await.unwrap_or(Left::Nothing);
        self.all.retain(|departure| !departure.ended.is_cancelled());
        left
    }

    /// What still carries connections.
    pub(super) fn proxies(&self) -> impl Iterator<Item = &Proxy> {
        self.all.iter().map(|departure| &departure.proxy)
    }

    /// The namespaces that no one else may touch.
    pub(super) fn inodes(&self) -> HashSet<u32> {
        let under_way = self.all.iter().filter(|departure| !departure.ended.is_cancelled());
        under_way.map(|departure| departure.inode).collect()
    }

    /// Waits for un-enrolments of pods that have drained.
    pub(super) async fn finish(&self) {
        let cut = self.tasks.drain(REMOVAL).await;
        if cut > 0 {
            tracing::error!(pods = cut, "pods not un-enrolled; run: culvert cleanup");
        }
    }
}

impl Departure {
    fn fate(&self) -> MutexGuard<'_, Fate> {
        // One word: there is no half-made state for a panic to leave.
        self.fate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Settles the fate, and tells what it was.
    fn seal(&self) -> Fate {
        let mut fate = self.fate();
        match *fate {
            Fate::Leaves => std::mem::replace(&mut *fate, Fate::BeingRemoved),
            settled => settled,
        }
    }

    /// Makes the pod one that stays, unless it is too late, and tells what it is.
    fn keep(&self) -> Fate {
        let mut fate = self.fate();
        if *fate == Fate::Leaves {
            *fate = Fate::Stays;
        }
        *fate
    }

    /// Keeps the pod, or waits until it is removed.
    async fn settle(&self) {
        if self.keep() == Fate::BeingRemoved {
            self.ended.cancelled().await;
        }
    }

    async fn remove(&self, pod: Pod, node: Arc<Node>, tasks: &Tasks) -> Left {
        let error = match tasks.blocking(move || node.unenroll(pod)).await {
            Ok(Ok(())) => {
                tracing::info!(pod = %self.proxy.name(), "pod un-enrolled");
                return Left::Nothing;
            }
            Ok(Err(error)) => chain(&error),
            Err(error) => error.to_string(),
        };
        tracing::error!(pod = %self.proxy.name(), error, retry = ?RETRY, "pod not un-enrolled");
        Left::Something
    }
}
