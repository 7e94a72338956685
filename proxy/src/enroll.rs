//! Pods arrive and leave: each is captured, gets its proxy, and loses both in the reverse order.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use culvert_capture::{CaptureError, Listener, Node, Pod, Role};
use culvert_carry::{
    dial::Dialer,
    hbone::{Pool, PoolOptions, server::Phase},
};
use culvert_sys::netns::{Netns, NetnsError};
use futures::{FutureExt as _, future::join_all};
use tokio::{sync::watch, task::JoinError};

use crate::{
    context::{NodeContext, PodContext},
    error::chain,
    inbound, outbound,
    pods::{PodEvent, PodSource, PodSpec},
    readiness::Latch,
    tasks::Tasks,
};

/// How long until a pod that could not be enrolled is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Why a pod is not enrolled.
#[derive(Debug, thiserror::Error)]
pub enum EnrollError {
    /// Its network namespace could not be opened.
    #[error("enrol pod {uid}")]
    Netns {
        /// The pod.
        uid: Arc<str>,
        /// What is wrong with the path.
        source: NetnsError,
    },
    /// It could not be captured.
    #[error("enrol pod {uid}")]
    Capture {
        /// The pod.
        uid: Arc<str>,
        /// Where capture failed.
        source: CaptureError,
    },
    /// Another enrolled pod has one of its addresses.
    #[error("enrol pod {uid}: pod {holder} has the same address {address}; remove one of the two")]
    AddressTaken {
        /// The pod.
        uid: Arc<str>,
        /// The other pod.
        holder: Arc<str>,
        /// The address.
        address: IpAddr,
    },
    /// Another pod has its network namespace.
    #[error("enrol pod {uid}: pod {holder} has the same network namespace; remove one of the two")]
    NetnsTaken {
        /// The pod.
        uid: Arc<str>,
        /// The other pod.
        holder: Arc<str>,
    },
    /// The thread that did it panicked, or the process is stopping.
    #[error("enrol pod {uid}")]
    Task {
        /// The pod.
        uid: Arc<str>,
        /// How it ended.
        source: JoinError,
    },
}

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
    /// How long a pod that leaves may keep its connections.
    drain: Duration,
    tasks: Tasks,
    enrolled: HashMap<Arc<str>, Enrolled>,
    failed: HashMap<Arc<str>, PodSpec>,
    left: Left,
}

/// What un-enrolment has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nothing,
    /// A pod that is no more carried, and cut off for as long as it is held: it must be tried again.
    Something,
}

struct Enrolled {
    pod: Pod,
    context: Arc<PodContext>,
    tasks: Tasks,
}

impl Enrolled {
    /// Ends the pod's connections: its HBONE servers say GOAWAY, and what has not ended by the deadline is cut. Gives
    /// how many were.
    async fn drain(&self, deadline: Duration) -> usize {
        self.context.phase.send_replace(Phase::Draining);
        self.tasks.drain(deadline).await
    }
}

impl Enrolment {
    pub(crate) fn new(
        node: Arc<Node>,
        context: Arc<NodeContext>,
        marks: Marks,
        drain: Duration,
        tasks: Tasks,
    ) -> Self {
        let (enrolled, failed) = (HashMap::new(), HashMap::new());
        Self { node, context, marks, drain, tasks, enrolled, failed, left: Left::Nothing }
    }

    /// Enrols what the source tells until it has told everything that there is; the first failure ends it.
    pub(crate) async fn start(&mut self, source: &mut impl PodSource) -> Result<(), EnrollError> {
        loop {
            match source.next().await {
                PodEvent::Added(spec) => self.enroll(&spec).await?,
                PodEvent::Removed(uid) => self.unenroll(&uid).await,
                PodEvent::Synced => break,
            }
        }
        self.sweep().await;
        Ok(())
    }

    /// Follows the source. What fails is tried again, and `latch` holds readiness back until nothing does.
    pub(crate) async fn follow(&mut self, source: &mut impl PodSource, latch: impl Fn() -> Latch) {
        let mut pending = None;
        loop {
            let retry = !self.failed.is_empty() || self.left == Left::Something;
            let event = tokio::select! {
                event = source.next() => Some(event),
                () = tokio::time::sleep(RETRY), if retry => None,
            };
            match event {
                Some(PodEvent::Added(spec)) => self.try_enroll(spec).await,
                Some(PodEvent::Removed(uid)) => {
                    self.failed.remove(&uid);
                    self.unenroll(&uid).await;
                }
                Some(PodEvent::Synced) => self.sweep().await,
                None => {
                    if self.left == Left::Something {
                        self.sweep().await;
                    }
                    for (_, spec) in std::mem::take(&mut self.failed) {
                        self.try_enroll(spec).await;
                    }
                }
            }
            pending = (!self.failed.is_empty()).then(|| pending.unwrap_or_else(&latch));
        }
    }

    /// Ends the pods' connections, all at once.
    pub(crate) async fn drain(&self, deadline: Duration) {
        let cut = join_all(self.enrolled.values().map(|pod| pod.drain(deadline))).await;
        tracing::info!(cut = cut.iter().sum::<usize>(), "drained");
    }

    /// Gives up every pod. Dropping them leaves the kernel's state to hold their connections.
    pub(crate) fn release(self) -> Vec<Pod> {
        self.enrolled.into_values().map(|enrolled| enrolled.pod).collect()
    }

    async fn try_enroll(&mut self, spec: PodSpec) {
        // What was wanted of this pod before is wanted no more.
        self.failed.remove(&spec.uid);
        if let Err(error) = self.enroll(&spec).await {
            let error = chain(&error);
            tracing::error!(error, retry = ?RETRY, "pod not enrolled");
            self.failed.insert(Arc::clone(&spec.uid), spec);
        }
    }

    async fn enroll(&mut self, spec: &PodSpec) -> Result<(), EnrollError> {
        let uid = || Arc::clone(&spec.uid);
        let netns = Netns::open(&spec.netns);
        let is_in = |pod: &Pod| netns.as_ref().is_ok_and(|netns| pod.netns().is(netns));
        // One that stays in its namespace is replaced in place: un-enrolled, it would go around the proxy meanwhile.
        if self.enrolled.get(&spec.uid).is_some_and(|enrolled| !is_in(&enrolled.pod)) {
            self.unenroll(&spec.uid).await;
        }
        let other =
            self.enrolled.iter().find(|(uid, enrolled)| **uid != spec.uid && is_in(&enrolled.pod));
        if let Some((holder, _)) = other {
            return Err(EnrollError::NetnsTaken { uid: uid(), holder: Arc::clone(holder) });
        }
        let netns = netns.map_err(|source| EnrollError::Netns { uid: uid(), source })?;
        let (node, inside) = (Arc::clone(&self.node), netns.clone());
        let pod = self
            .tasks
            .blocking(move || node.enroll(&inside))
            .await
            .map_err(|source| EnrollError::Task { uid: uid(), source })?
            .map_err(|source| self.refused(uid(), source))?;
        let before = self.enrolled.remove(&spec.uid);
        self.serve(spec, netns, pod);
        tracing::info!(pod = %spec.uid, netns = %spec.netns.display(), "pod enrolled");
        if let Some(before) = before {
            before.drain(self.drain).await;
        }
        Ok(())
    }

    /// Names the pods of a capture error, which knows them by their namespaces alone.
    fn refused(&self, uid: Arc<str>, source: CaptureError) -> EnrollError {
        if let CaptureError::AddressTaken { other, address, .. } = source
            && let Some((holder, _)) = self.enrolled.iter().find(|(_, pod)| pod.pod.id() == other)
        {
            return EnrollError::AddressTaken { uid, holder: Arc::clone(holder), address };
        }
        EnrollError::Capture { uid, source }
    }

    /// Starts the pod's proxy.
    fn serve(&mut self, spec: &PodSpec, netns: Netns, mut pod: Pod) {
        let timeouts = self.context.timeouts;
        let context = Arc::new(PodContext {
            node: Arc::clone(&self.context),
            pod: spec.pod.clone(),
            addresses: pod.addresses(),
            dialer: Dialer {
                netns,
                home: self.context.home.clone(),
                proxy_mark: self.marks.proxy,
                delivery_mark: self.marks.delivery,
                timeout: timeouts.dial,
            },
            pool: Pool::new(PoolOptions { timeouts, ..PoolOptions::default() }),
            phase: watch::Sender::new(Phase::Serving),
        });
        let tasks = self.tasks.child();
        for listener in pod.take_listeners() {
            tasks.spawn(accept(listener, Arc::clone(&context), tasks.clone()));
        }
        if let Some(watch) = pod.take_watch() {
            let draining = tasks.draining();
            tasks.spawn(async move {
                tokio::select! {
                    () = watch.run() => {}
                    () = draining.cancelled() => {}
                }
            });
        }
        self.enrolled.insert(Arc::clone(&spec.uid), Enrolled { pod, context, tasks });
    }

    async fn unenroll(&mut self, uid: &Arc<str>) {
        let Some(enrolled) = self.enrolled.remove(uid) else { return };
        let enrolled = Arc::new(enrolled);
        // New connections go their own way first; those that are captured need the pod's rules until they end.
        let withdrawn = self.on_node({
            let enrolled = Arc::clone(&enrolled);
            move |node| node.withdraw(&enrolled.pod)
        });
        let withdrawn = withdrawn.await;
        enrolled.drain(self.drain).await;
        let removed = match Arc::into_inner(enrolled) {
            Some(enrolled) => self.on_node(move |node| node.unenroll(enrolled.pod)).await,
            None => Ok(()),
        };
        match withdrawn.and(removed) {
            Ok(()) => tracing::info!(pod = %uid, "pod un-enrolled"),
            Err(error) => {
                tracing::error!(pod = %uid, error, retry = ?RETRY, "pod not un-enrolled");
                self.left = Left::Something;
            }
        }
    }

    /// Does what blocks on a thread that may. An error comes as it is to be logged.
    async fn on_node(
        &self,
        work: impl FnOnce(&Node) -> Result<(), CaptureError> + Send + 'static,
    ) -> Result<(), String> {
        let node = Arc::clone(&self.node);
        match self.tasks.blocking(move || work(&node)).await {
            Ok(done) => done.map_err(|error| chain(&error)),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Un-enrols pods that left while no process ran, or that could not be un-enrolled when they did.
    async fn sweep(&mut self) {
        let keep: Vec<u32> = self.enrolled.values().map(|enrolled| enrolled.pod.id()).collect();
        self.left = match self.on_node(move |node| node.sweep(&keep)).await {
            Ok(()) => Left::Nothing,
            Err(error) => {
                tracing::error!(error, retry = ?RETRY, "stale pods not un-enrolled");
                Left::Something
            }
        };
    }
}

/// Takes connections until the tasks drain, then what the kernel has accepted already.
async fn accept(listener: Listener, context: Arc<PodContext>, tasks: Tasks) {
    let draining = tasks.draining();
    loop {
        let captured = tokio::select! {
            captured = listener.accept() => captured,
            () = draining.cancelled() => match listener.accept().now_or_never() {
                Some(captured) => captured,
                None => return,
            },
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
            Role::Inbound => tasks.spawn(inbound::plaintext(context, captured)),
            Role::Hbone => tasks.spawn(inbound::hbone(context, captured)),
        }
    }
}

#[cfg(test)]
mod tests;
