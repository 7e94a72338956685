//! Pods arrive and leave: each is captured and gets its proxy. How it loses both is `departure`'s.

mod batch;
mod departure;
mod failure;
mod settings;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use culvert_capture::{CaptureError, Listener, Node, Pod, Role};
use culvert_carry::{
    dial::Dialer,
    hbone::{Pool, PoolOptions, server::Phase},
};
use culvert_sys::netns::{Netns, NetnsError};
use culvert_tls::Retained;
use futures::future::join_all;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

pub use self::failure::EnrollError;
use self::{
    batch::Batch,
    departure::{Departures, Fate, Left, Proxy},
};
use crate::{
    context::{NodeContext, PodContext},
    error::chain,
    inbound, outbound,
    outlook::PodOutlook,
    pods::{PodSource, PodSpec},
    readiness::Latch,
    tasks::Tasks,
};

/// How long until a pod that could not be enrolled is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// How long a listener goes on once its tasks drain: until the runtime has been told of what is in its queue.
const LAST_CALL: Duration = Duration::from_millis(50);

/// How long a listener goes on at most where its queue does not empty, because a successor has not taken its slot.
const LATEST_CALL: Duration = Duration::from_secs(1);

/// Peers of a pod that may be in their handshake at a time: a burst of clients fits, a flood does not.
const HANDSHAKES: usize = 1024;

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
}

struct Enrolled {
    /// `None` once another is to take its place.
    holder: Option<Arc<str>>,
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
    ) -> Self {
        Self {
            departures: Departures::new(Arc::clone(&node), drain, tasks.child()),
            node,
            context,
            marks,
            tasks,
            enrolled: HashMap::new(),
            failed: HashMap::new(),
            left: Left::Nothing,
        }
    }

    /// Enrols what the source tells until it has told everything that there is.
    ///
    /// The first failure ends it on a node that is new. On one that has pods held already, that would keep them all cut
    /// off for the sake of one; what fails there is left for [`Self::follow`] to try again.
    pub(crate) async fn start(&mut self, source: &mut impl PodSource) -> Result<(), EnrollError> {
        loop {
            let batch = Batch::next(source).await;
            let synced = batch.synced;
            for (spec, error) in self.apply(batch.wanted).await {
                if self.node.is_new() {
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
            let retry = !self.failed.is_empty() || self.left == Left::Something;
            let batch = tokio::select! {
                batch = Batch::next(source) => Some(batch),
                left = self.departures.next() => {
                    self.left = self.left.max(left);
                    continue;
                }
                () = tokio::time::sleep(RETRY), if retry => None,
            };
            let Batch { wanted, synced } = batch.unwrap_or_else(|| self.again());
            for (spec, error) in self.apply(wanted).await {
                self.postpone(spec, &error);
            }
            if synced || self.left == Left::Something {
                self.sweep().await;
            }
        }
    }

    /// Ends the pods' connections, all at once, and waits for un-enrolments that are under way.
    pub(crate) async fn drain(&self, deadline: Duration) {
        let staying = self.enrolled.values().map(|enrolled| &enrolled.proxy);
        let proxies = staying.chain(self.departures.proxies());
        let cut = join_all(proxies.map(|proxy| proxy.drain(deadline))).await;
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
            let netns = spec.as_ref().map(|spec| Netns::open(&spec.netns));
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
        tracing::info!(pod = %spec.uid, netns = %spec.netns.display(), "pod enrolled");
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

    /// Starts the pod's proxy.
    fn serve(&mut self, spec: &PodSpec, netns: Netns, mut pod: Pod) {
        let timeouts = self.context.timeouts;
        let addresses = pod.addresses();
        let owns = {
            let addresses = addresses.clone();
            move |ip| addresses.owns(ip)
        };
        let context = Arc::new(PodContext {
            node: Arc::clone(&self.context),
            pod: spec.pod.clone(),
            addresses,
            dialer: Dialer {
                netns,
                home: self.context.home.clone(),
                proxy_mark: self.marks.proxy,
                delivery_mark: self.marks.delivery,
                timeout: timeouts.dial,
            },
            pool: Pool::new(PoolOptions { timeouts, ..PoolOptions::default() }, owns),
            outlook: PodOutlook::new(),
            handshakes: Arc::new(Semaphore::new(HANDSHAKES)),
            phase: watch::Sender::new(Phase::Serving),
        });
        let tasks = self.tasks.child();
        for listener in pod.take_listeners() {
            tasks.spawn(accept(listener, Arc::clone(&context), tasks.clone()));
        }
        tasks.spawn(keep_certificate(Arc::clone(&context), tasks.draining()));
        if let Some(watch) = pod.take_watch() {
            let draining = tasks.draining();
            tasks.spawn(async move {
                tokio::select! {
                    () = watch.run() => {}
                    () = draining.cancelled() => {}
                }
            });
        }
        let holder = Some(Arc::clone(&spec.uid));
        let enrolled = Enrolled { holder, proxy: Proxy { context, tasks }, pod };
        self.enrolled.insert(enrolled.pod.id(), enrolled);
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
    async fn sweep(&mut self) {
        let failed = self.failed.values().filter_map(|spec| Netns::open(&spec.netns).ok());
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

/// Gets the pod's certificate before its first connection waits for it, and lets the store keep it until the pod drains.
/// One that cannot be had is told then.
async fn keep_certificate(context: Arc<PodContext>, draining: CancellationToken) {
    let certificates = &context.node.certificates;
    let mut changed = context.node.state.subscribe();
    let mut retained: Option<Retained> = None;
    loop {
        let identity =
            context.node.state.load().find_local(&context.pod).map(|pod| pod.identity.clone());
        let work = async {
            if let Some(identity) = identity
                && retained.as_ref().is_none_or(|retained| *retained.identity() != identity)
            {
                retained = Some(certificates.retain(&identity));
                if let Err(error) = certificates.prefetch(&identity).await {
                    tracing::warn!(error = chain(&error), "no certificate yet");
                }
            }
            changed.changed().await
        };
        tokio::select! {
            changed = work => if changed.is_err() { return },
            () = draining.cancelled() => return,
        }
    }
}

/// Takes connections until the tasks drain, then what the kernel has accepted already: closing the listener resets them.
async fn accept(listener: Listener, context: Arc<PodContext>, tasks: Tasks) {
    let draining = tasks.draining();
    let after = |time| {
        let draining = &draining;
        async move {
            draining.cancelled().await;
            tokio::time::sleep(time).await;
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
            // No DNS server of ours is asked: the one that the pod named is reached like any other host.
            Role::Outbound | Role::Dns => tasks.spawn(outbound::carry(context, captured)),
            Role::Inbound => tasks.spawn(inbound::plaintext(context, captured)),
            Role::Hbone => tasks.spawn(inbound::hbone(context, captured)),
        }
    }
}

#[cfg(test)]
mod tests;
