//! Pods arrive and leave: each is captured and gets its proxy. How it loses both is `departure`'s.

mod accept;
mod batch;
mod departure;
mod failure;
mod serve;
mod settings;
mod succession;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use culvert_capture::{CaptureError, Node, Pod};
use culvert_sys::netns::{Netns, NetnsError};
use futures::future::join_all;

pub(crate) use self::accept::LAST_CALL;
pub use self::failure::EnrollError;
pub(crate) use self::succession::{Command, Succession};
use self::{
    batch::Batch,
    departure::{Departures, Fate, Left, Proxy},
    succession::LOOK,
};
use crate::{
    context::NodeContext,
    error::chain,
    pods::{PodSource, PodSpec},
    readiness::Latch,
    tasks::Tasks,
};

/// How long until a pod that could not be enrolled is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The marks of the proxy's sockets, which depend on who steers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    pub(crate) proxy: Option<u32>,
    pub(crate) delivery: Option<u32>,
}

/// The pods that this node carries.
pub(crate) struct Enrolment {
    node: Arc<Node>,
    context: Arc<NodeContext>,
    marks: Marks,
    tasks: Tasks,
    /// By inode number of the pod's network namespace, of which each is one pod's.
    enrolled: HashMap<u32, Enrolled>,
    departures: Departures,
    failed: HashMap<Arc<str>, PodSpec>,
    left: Left,
    succession: Succession,
    /// What belonged to another process's cgroup is there still.
    unswept: bool,
}

struct Enrolled {
    /// `None` once another is to take its place.
    holder: Option<Arc<str>>,
    spec: PodSpec,
    pod: Pod,
    proxy: Proxy,
}

impl Enrolment {
    /// No pods yet. One that leaves may keep its connections for `drain`.
    pub(crate) fn new(
        node: Arc<Node>,
        context: Arc<NodeContext>,
        marks: Marks,
        drain: Duration,
        tasks: Tasks,
        succession: Succession,
    ) -> Self {
        let elder_gone = succession.elder_gone.clone();
        Self {
            departures: Departures::new(Arc::clone(&node), drain, tasks.child(), elder_gone),
            node,
            context,
            marks,
            tasks,
            enrolled: HashMap::new(),
            failed: HashMap::new(),
            left: Left::Nothing,
            succession,
            unswept: false,
        }
    }

    /// Enrols what the source tells until it has told everything that there is.
    ///
    /// The first failure ends it on a node that is new, where the pods are static. On one that has pods held already, that would keep them all cut
    /// off for the sake of one; what fails there is left for [`Self::follow`] to try again.
    pub(crate) async fn start(&mut self, source: &mut impl PodSource) -> Result<(), EnrollError> {
        loop {
            let batch = Batch::next(source).await;
            let synced = batch.synced;
            for (spec, error) in self.apply_and_tell(batch.wanted, source).await {
                if self.node.is_new() && source.is_static() {
                    return Err(error);
                }
                self.postpone(spec, &error);
            }
            if synced {
                break;
            }
        }
        self.sweep().await;
        Ok(())
    }

    /// Follows the source. What fails is tried again; `starting`, and later `latch`, hold readiness back until nothing
    /// does.
    pub(crate) async fn follow(
        &mut self,
        source: &mut impl PodSource,
        starting: Latch,
        latch: impl Fn() -> Latch,
    ) {
        let mut pending = Some(starting);
        loop {
            if !self.failed.is_empty() {
                pending.get_or_insert_with(&latch);
            } else if pending.take().is_some() {
                tracing::info!("ready");
            }
            let retry = self.leads()
                && (!self.failed.is_empty() || self.left == Left::Something || self.unswept);
            let leads = self.leads();
            let batch = tokio::select! {
                batch = Batch::next(source) => Some(batch),
                left = self.departures.next() => {
                    self.left = self.left.max(left);
                    continue;
                }
                Some(command) = self.succession.commands.recv() => {
                    self.obey(command).await;
                    continue;
                }
                () = tokio::time::sleep(LOOK), if !leads => {
                    self.look().await;
                    continue;
                }
                () = tokio::time::sleep(RETRY), if retry => None,
            };
            let Batch { wanted, synced } = batch.unwrap_or_else(|| self.again());
            if !leads {
                // Who leads deals with them.
                for uid in wanted.keys() {
                    source.settled(uid, Ok(()));
                }
                self.note(wanted);
                continue;
            }
            self.sweep_seats_again().await;
            for (spec, error) in self.apply_and_tell(wanted, source).await {
                self.postpone(spec, &error);
            }
            if synced || self.left == Left::Something {
                self.sweep().await;
            }
        }
    }

    /// Ends the pods' connections, all at once, and waits for un-enrolments that are under way.
    pub(crate) async fn drain(&mut self, deadline: Duration) {
        let staying = self.enrolled.values().map(|enrolled| &enrolled.proxy);
        let proxies: Vec<Proxy> = staying.chain(self.departures.proxies()).cloned().collect();
        let drained = join_all(proxies.iter().map(|proxy| proxy.drain(deadline)));
        tokio::pin!(drained);
        let cut = loop {
            let command = tokio::select! {
                cut = &mut drained => break cut,
                Some(command) = self.succession.commands.recv() => command,
            };
            // A successor may come even now. What it leaves behind is the next one's.
            if let Command::Yield(_) = command {
                self.obey(command).await;
            }
        };
        self.departures.finish().await;
        tracing::info!(cut = cut.iter().sum::<usize>(), "drained");
    }

    /// Gives up every pod. Dropping them leaves the kernel's state to hold their connections.
    pub(crate) fn release(self) -> Vec<Pod> {
        self.enrolled.into_values().map(|enrolled| enrolled.pod).collect()
    }

    /// What is to be tried once more.
    fn again(&self) -> Batch {
        let failed = self.failed.iter().map(|(uid, spec)| (Arc::clone(uid), Some(spec.clone())));
        Batch { wanted: failed.collect(), synced: false }
    }

    fn postpone(&mut self, spec: PodSpec, error: &EnrollError) {
        tracing::error!(error = chain(error), retry = ?RETRY, "pod not enrolled");
        self.failed.insert(Arc::clone(&spec.uid), spec);
    }

    /// [`Self::apply`], of which the source is told.
    async fn apply_and_tell(
        &mut self,
        wanted: BTreeMap<Arc<str>, Option<PodSpec>>,
        source: &mut impl PodSource,
    ) -> Vec<(PodSpec, EnrollError)> {
        let uids: Vec<_> = wanted.keys().cloned().collect();
        let failed = self.apply(wanted).await;
        for uid in uids {
            let error = failed.iter().find(|(spec, _)| spec.uid == uid);
            let error = error.map(|(_, error)| chain(error));
            source.settled(&uid, error.as_deref().map_or(Ok(()), Err));
        }
        failed
    }

    /// Un-enrols and enrols pods; gives those that could not be enrolled.
    ///
    /// Who leaves goes first, so that an address can move from one pod to another. A pod whose namespace another one
    /// takes does not leave it: un-enrolled, it would go around the proxy meanwhile.
    async fn apply(
        &mut self,
        wanted: BTreeMap<Arc<str>, Option<PodSpec>>,
    ) -> Vec<(PodSpec, EnrollError)> {
        let mut specs = Vec::new();
        let mut places = HashMap::new();
        for (uid, spec) in wanted {
            // What was wanted of this pod before is wanted no more.
            let before = self.failed.remove(&uid);
            if before
                .is_some_and(|before| spec.as_ref().is_none_or(|now| now.netns != before.netns))
            {
                // A process before may have enrolled it.
                self.left = Left::Something;
            }
            let netns = spec.as_ref().map(|spec| spec.netns.open());
            let inode = netns.as_ref().and_then(|netns| netns.as_ref().ok()).map(Netns::inode);
            if let Some((spec, inode)) = spec.as_ref().zip(inode)
                && self.carries(spec, inode)
            {
                self.configure(spec, inode).await;
                continue;
            }
            specs.extend(spec.zip(netns));
            places.insert(uid, inode);
        }
        let mut leave = Vec::new();
        for (inode, enrolled) in &mut self.enrolled {
            if !enrolled.holder.as_ref().is_some_and(|holder| places.contains_key(holder)) {
                continue;
            }
            if places.values().flatten().any(|place| place == inode) {
                enrolled.holder = None;
            } else {
                leave.push(*inode);
            }
        }
        for inode in leave {
            self.unenroll(inode).await;
        }
        let mut failed = Vec::new();
        for (spec, netns) in specs {
            if let Err(error) = self.enroll(&spec, netns).await {
                failed.push((spec, error));
            }
        }
        failed
    }

    /// Enrols a pod, in place of what is enrolled in its namespace. Where that fails, the namespace is held: it must not go
    /// on by another's name.
    async fn enroll(
        &mut self,
        spec: &PodSpec,
        netns: Result<Netns, NetnsError>,
    ) -> Result<(), EnrollError> {
        let uid = || Arc::clone(&spec.uid);
        let netns = netns.map_err(|source| EnrollError::Netns { uid: uid(), source })?;
        let before = self.enrolled.get(&netns.inode());
        if let Some(holder) = before.and_then(|before| before.holder.as_ref()) {
            return Err(EnrollError::NetnsTaken { uid: uid(), holder: Arc::clone(holder) });
        }
        self.departures.keep(netns.inode()).await;
        let (before, proxy) = match self.enrolled.remove(&netns.inode()) {
            Some(Enrolled { pod, proxy, .. }) => (Some(pod), Some(proxy)),
            None => (None, None),
        };
        let (node, inside) = (Arc::clone(&self.node), netns.clone());
        let settings = spec.settings.clone();
        let enrolled = self.tasks.blocking(move || {
            // Two watches would take each other's filters for somebody else's.
            before.iter().for_each(Pod::leave);
            (node.enroll(&inside, &settings), before)
        });
        let (pod, before) = match enrolled.await {
            Ok(done) => done,
            Err(source) => {
                if let Some(proxy) = proxy {
                    proxy.drain(Duration::ZERO).await;
                }
                return Err(EnrollError::Task { uid: uid(), source });
            }
        };
        if let Some((pod, proxy)) = before.zip(proxy) {
            self.departures.add(pod, proxy, Fate::Stays);
        }
        let pod = pod.map_err(|source| self.refused(uid(), source))?;
        settings::tell_bypass(spec, &pod.settings());
        self.serve(spec, netns, pod);
        tracing::info!(pod = %spec.uid, netns = %spec.netns, "pod enrolled");
        Ok(())
    }

    /// Names the pods of a capture error, which knows them by their namespaces alone.
    fn refused(&self, uid: Arc<str>, source: CaptureError) -> EnrollError {
        if let CaptureError::AddressTaken { other, address, .. } = source
            && let Some(holder) = self.enrolled.get(&other).and_then(|pod| pod.holder.clone())
        {
            return EnrollError::AddressTaken { uid, holder, address };
        }
        EnrollError::Capture { uid, source }
    }

    /// Lets new connections go their own way. Those that are captured need the pod's rules until they end.
    async fn unenroll(&mut self, inode: u32) {
        let Some(Enrolled { pod, proxy, .. }) = self.enrolled.remove(&inode) else { return };
        let node = Arc::clone(&self.node);
        let withdrawn = self.tasks.blocking(move || (node.withdraw(&pod), pod)).await;
        match withdrawn {
            Ok((withdrawn, pod)) => {
                if let Err(error) = withdrawn {
                    tracing::error!(
                        error = chain(&error),
                        pod = %proxy.name(),
                        "pod not withdrawn; un-enrolling it",
                    );
                }
                self.departures.add(pod, proxy, Fate::Leaves);
            }
            Err(error) => {
                tracing::error!(%error, pod = %proxy.name(), retry = ?RETRY, "pod not withdrawn");
                proxy.drain(Duration::ZERO).await;
                self.left = Left::Something;
            }
        }
    }

    /// Un-enrols pods that left while no process ran, or that could not be un-enrolled when they did.
    ///
    /// Those that could not be enrolled stay as a process before has left them: held, not opened.
    /// Nor are those touched that the process before may still drain connections of.
    async fn sweep(&mut self) {
        if !self.leads() || !self.succession.elder_gone.is_cancelled() {
            self.left = Left::Something;
            return;
        }
        let failed = self.failed.values().filter_map(|spec| spec.netns.open().ok());
        let keep: Vec<u32> = self
            .enrolled
            .keys()
            .copied()
            .chain(self.departures.inodes())
            .chain(failed.map(|netns| netns.inode()))
            .collect();
        let node = Arc::clone(&self.node);
        let swept = self.tasks.blocking(move || node.sweep(&keep)).await;
        let error = match swept {
            Ok(Ok(())) => {
                self.left = Left::Nothing;
                return;
            }
            Ok(Err(error)) => chain(&error),
            Err(error) => error.to_string(),
        };
        tracing::error!(error, retry = ?RETRY, "stale pods not un-enrolled");
        self.left = Left::Something;
    }
}

#[cfg(test)]
mod tests;
