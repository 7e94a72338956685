//! The pods while two processes hold the node: they pass to the newer one, and come back where that ends first.
//!
//! Exactly one of the two leads: it enrols, un-enrols and keeps up. The other goes on accepting what its listeners are given.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use culvert_capture::{CaptureError, PodCapture};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Enrolled, Enrolment, Fate, Left, accept::LastCall};
use crate::{error::chain, pods::PodSpec};

/// How often a process that has been replaced looks for slots that its successor leaves empty.
pub(super) const LOOK: Duration = Duration::from_secs(1);
/// How long a process may take to end once it has closed its control socket, and how often to look.
const ENDING: Duration = Duration::from_secs(1);
const ENDED: Duration = Duration::from_millis(50);

/// What a process of the node does when another comes or goes. What it holds is told when it is done, or dropped by one that drains.
#[derive(Debug)]
pub(crate) enum Command {
    /// Let the other one lead.
    Yield(oneshot::Sender<()>),
    /// The other one has every pod.
    Overtaken,
    /// Lead again, if the other one did.
    Reclaim(oneshot::Sender<()>),
    /// The process before this one is gone.
    ElderGone,
}

/// Where this process stands between the one before and the one after.
#[derive(Debug)]
pub(crate) struct Succession {
    pub(super) commands: mpsc::Receiver<Command>,
    /// Cancelled once the process before is gone, or where there was none.
    pub(super) elder_gone: CancellationToken,
    pub(super) lead: Lead,
    pub(super) last_call: LastCall,
}

/// Who leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    /// This process.
    Ours,
    /// The one after.
    Lent,
    /// Nobody: it is to be taken back.
    Lost,
}

impl Succession {
    pub(crate) fn new(commands: mpsc::Receiver<Command>, elder_gone: CancellationToken) -> Self {
        Self { commands, elder_gone, lead: Lead::Ours, last_call: LastCall::default() }
    }
}

impl Enrolment {
    /// Whether another process has taken the node over.
    pub(crate) fn is_replaced(&self) -> bool {
        !self.leads()
    }

    pub(super) fn leads(&self) -> bool {
        self.succession.lead == Lead::Ours
    }

    pub(super) async fn obey(&mut self, command: Command) {
        match command {
            Command::Yield(done) => {
                self.let_go().await;
                // Whoever asked may have given up; then it is gone, too, and that is told next.
                let _heard = done.send(());
            }
            Command::Overtaken => {
                self.succession.last_call.replaced();
                tracing::info!("another process carries the pods; waiting to be told to drain");
            }
            Command::Reclaim(done) => {
                if !self.leads() {
                    self.reclaim().await;
                }
                let _heard = done.send(());
            }
            Command::ElderGone => {
                self.sweep_seats().await;
                self.sweep().await;
            }
        }
    }

    /// Lets another process lead. Nothing that this one has begun is left half done.
    pub(crate) async fn let_go(&mut self) {
        self.succession.lead = Lead::Lent;
        self.succession.last_call.replaced();
        self.departures.keep_all().await;
        let captures: Vec<PodCapture> =
            self.enrolled.values().map(|one| one.pod.capture()).collect();
        let released =
            self.tasks.blocking(move || captures.iter().for_each(PodCapture::release)).await;
        if let Err(error) = released {
            tracing::error!(%error, "pods not released");
        }
    }

    /// Lead again: the listeners first, for connections wait for them.
    async fn reclaim(&mut self) {
        tracing::warn!("the process that took over is gone: taking the pods back");
        let captures: Vec<_> =
            self.enrolled.iter().map(|(inode, one)| (*inode, one.pod.capture())).collect();
        let node = Arc::clone(&self.node);
        let reclaimed = self.tasks.blocking(move || {
            for (pod, capture) in &captures {
                if let Err(error) = node.refill(capture) {
                    tracing::warn!(error = chain(&error), pod, "listeners not put back yet");
                }
            }
            node.reclaim()?;
            let pods = captures.iter().map(|(inode, capture)| (*inode, node.reclaim_pod(capture)));
            Ok::<Vec<_>, CaptureError>(pods.collect())
        });
        let pods = match reclaimed.await.map_err(|e| e.to_string()) {
            Ok(Ok(pods)) => pods,
            Ok(Err(error)) => return self.lost(&chain(&error)),
            Err(error) => return self.lost(&error),
        };
        self.succession.lead = Lead::Ours;
        self.succession.last_call.restored();
        for (inode, reclaimed) in pods {
            match reclaimed {
                Ok(true) => {
                    let spec = self.enrolled.get(&inode).map(|one| one.spec.clone());
                    if let Some(spec) = spec {
                        self.configure(&spec, inode).await;
                    }
                    continue;
                }
                // The other process has un-enrolled it.
                Ok(false) => tracing::info!(pod = inode, "no more enrolled: enrolling it again"),
                Err(error) => {
                    tracing::error!(error = chain(&error), pod = inode, "pod not taken back");
                }
            }
            if let Some(spec) = self.depart(inode) {
                self.failed.insert(Arc::clone(&spec.uid), spec);
            }
        }
        // What the other one has left of pods that are gone; and what has failed is tried at once.
        self.left = Left::Something;
        let again = self.again();
        for (spec, error) in self.apply(again.wanted).await {
            self.postpone(spec, &error);
        }
        self.sweep_seats().await;
        self.sweep().await;
    }

    fn lost(&mut self, error: &str) {
        tracing::error!(error, retry = ?LOOK, "node not taken back");
        self.succession.lead = Lead::Lost;
    }

    /// What a process that does not lead does from time to time.
    pub(super) async fn look(&mut self) {
        if self.succession.lead == Lead::Lost {
            return self.reclaim().await;
        }
        let captures: Vec<PodCapture> =
            self.enrolled.values().map(|one| one.pod.capture()).collect();
        let node = Arc::clone(&self.node);
        let refilled = self.tasks.blocking(move || {
            captures.iter().map(|capture| node.refill(capture)).sum::<Result<usize, CaptureError>>()
        });
        match refilled.await {
            Ok(Ok(0)) => {}
            Ok(Ok(listeners)) => {
                tracing::warn!(listeners, "slots were empty: put our own listeners back");
            }
            Ok(Err(error)) => tracing::warn!(error = chain(&error), "slots not looked at"),
            Err(error) => tracing::error!(%error, "slots not looked at"),
        }
    }

    /// What the source tells while another process leads: that one enrols and un-enrols; connections of pods that leave drain here,
    /// too. What comes is noted for the case that this process leads again.
    pub(super) fn note(&mut self, wanted: BTreeMap<Arc<str>, Option<PodSpec>>) {
        for (uid, spec) in wanted {
            self.failed.remove(&uid);
            let held = self.enrolled.iter_mut().find(|(_, one)| one.holder.as_ref() == Some(&uid));
            match (held, spec) {
                // With other settings at most, which are the other process's to apply.
                (Some((_, one)), Some(spec))
                    if spec.pod == one.spec.pod && spec.netns == one.spec.netns =>
                {
                    one.spec = spec;
                }
                (held, spec) => {
                    if let Some(inode) = held.map(|(inode, _)| *inode) {
                        self.depart(inode);
                    }
                    self.failed.extend(spec.map(|spec| (uid, spec)));
                }
            }
        }
    }

    /// Drains a pod whose capture is another's to end, or to go on with.
    fn depart(&mut self, inode: u32) -> Option<PodSpec> {
        let Enrolled { spec, pod, proxy, .. } = self.enrolled.remove(&inode)?;
        self.departures.add(pod, proxy, Fate::Stays);
        Some(spec)
    }

    /// Takes away what was another process's alone, once that has ended.
    async fn sweep_seats(&mut self) {
        let end = tokio::time::Instant::now() + ENDING;
        loop {
            let node = Arc::clone(&self.node);
            match self.tasks.blocking(move || node.sweep_seats()).await {
                Ok(Ok(true)) => break self.unswept = false,
                Ok(Ok(false)) if tokio::time::Instant::now() < end => {
                    tokio::time::sleep(ENDED).await;
                }
                Ok(Ok(false)) => break self.unswept = true,
                Ok(Err(error)) => {
                    tracing::warn!(error = chain(&error), "seat of a process before not swept");
                    break self.unswept = true;
                }
                Err(error) => {
                    tracing::error!(%error, "seat of a process before not swept");
                    break self.unswept = true;
                }
            }
        }
    }

    /// Tries again what was left of another process.
    pub(super) async fn sweep_seats_again(&mut self) {
        if self.unswept && self.succession.elder_gone.is_cancelled() {
            self.sweep_seats().await;
        }
    }
}
