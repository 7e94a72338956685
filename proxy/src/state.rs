//! The mesh as this node knows it: one immutable snapshot, swapped whole. Where it comes from is a feed's business.

mod terms;

use std::{
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use culvert_control::xds::DemandError;
use culvert_mesh::{
    Origin, PodRef, Pool, Snapshot, Update,
    file::{self, FileError},
    workload::Workload,
};
use tokio::{sync::watch, time::timeout};

use self::terms::PodTerms;
use crate::{demand::Demand, watch::WatchedFile};

/// How long a connection waits for its pod's own record, which may arrive after the pod's first connect.
const PATIENCE: Duration = Duration::from_secs(5);

/// The current snapshot, and news of the next ones. Clones share both.
#[derive(Clone, Debug)]
pub(crate) struct State {
    current: Arc<ArcSwap<Snapshot>>,
    /// What feeds' texts are shared in. Held from reading a snapshot to storing the next one, so that no feed undoes
    /// what another did.
    writer: Arc<Mutex<Pool>>,
    changed: watch::Sender<()>,
    terms: Arc<PodTerms>,
    /// Where records that are missing are asked for; `None` where all come unasked.
    demand: Option<Arc<Demand>>,
}

/// The state never told of the pod.
#[derive(Debug, thiserror::Error)]
#[error("no workload record for pod {}/{} with service account {}; the mesh file or the control plane must have one", pod.namespace, pod.name, pod.service_account)]
pub(crate) struct UnknownPod {
    pod: PodRef,
}

impl State {
    pub(crate) fn new(snapshot: Snapshot) -> Self {
        let current = Arc::new(ArcSwap::from_pointee(snapshot));
        let changed = watch::Sender::new(());
        Self { current, writer: Arc::default(), changed, terms: Arc::default(), demand: None }
    }

    /// The same state, whose missing records are asked for of `demand`.
    #[must_use]
    pub(crate) fn with_demand(self, demand: Option<Demand>) -> Self {
        Self { demand: demand.map(Arc::new), ..self }
    }

    /// The snapshot as of now. A connection decides from one of them.
    pub(crate) fn load(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// Fires after each change from now on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Fires after each change of what policy says of `pod`, or of whether it is known at all; and after no other.
    pub(crate) fn subscribe_terms(&self, pod: &PodRef) -> watch::Receiver<()> {
        self.terms.subscribe(pod, &self.current)
    }

    /// The record of one of this node's own pods; waits up to 5 s for it.
    pub(crate) async fn identify(&self, pod: &PodRef) -> Result<Arc<Workload>, UnknownPod> {
        let mut changed = self.subscribe();
        let found = timeout(PATIENCE, async {
            if let Some(demand) =
                self.demand.as_ref().filter(|_| self.load().find_local(pod).is_none())
                && let Err(error) = Box::pin(demand.pod(pod)).await
            {
                tracing::debug!(%pod, error = crate::error::chain(&error), "own record not learned");
            }
            loop {
                if let Some(workload) = self.load().find_local(pod) {
                    return Some(Arc::clone(workload));
                }
                changed.changed().await.ok()?;
            }
        });
        found.await.ok().flatten().ok_or_else(|| UnknownPod { pod: pod.clone() })
    }

    /// Has the snapshots from now on hold what a connection of `source` to `ip` depends on.
    ///
    /// # Errors
    /// It is not known what that is. At once, and never, where all records come unasked.
    pub(crate) async fn prepare(&self, source: &Workload, ip: IpAddr) -> Result<(), DemandError> {
        match &self.demand {
            // Boxed: every connection would have room for it.
            Some(demand) => Box::pin(demand.destination(self, source, ip)).await,
            None => Ok(()),
        }
    }

    /// Takes in what the control plane says. Readers never wait.
    pub(crate) fn apply(&self, updates: impl IntoIterator<Item = Update>) {
        self.update(|mesh, pool| {
            mesh.apply(Origin::ControlPlane, updates.into_iter().map(|update| pool.share(update)))
        });
    }

    /// Makes the records of `file` all that the mesh file says. Readers never wait.
    pub(crate) fn replace_file(&self, file: &Snapshot) {
        self.update(|mesh, _| mesh.replace(Origin::File, file));
    }

    /// Stores what `next` makes of the snapshot, and tells whom it concerns.
    fn update(&self, next: impl FnOnce(&Snapshot, &mut Pool) -> Snapshot) {
        let mut pool = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        self.current.store(Arc::new(next(&self.current.load(), &mut pool)));
        drop(pool);
        self.changed.send_replace(());
        self.terms.renew(&self.current);
    }
}

/// Why the mesh file gave no state.
#[derive(Debug, thiserror::Error)]
pub enum MeshFileError {
    /// It could not be read.
    #[error("read mesh file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// What it says cannot be.
    #[error(transparent)]
    Refused(#[from] FileError),
}

/// The mesh file, kept in step with the state.
pub(crate) struct MeshFile {
    file: WatchedFile,
}

impl MeshFile {
    /// Reads the file for the first time, when a mistake in it is still an error.
    pub(crate) fn open(path: PathBuf) -> Result<(Self, State), MeshFileError> {
        let mut file = WatchedFile::new(path);
        let text = file.read();
        let snapshot = parse(&file, text)?;
        Ok((Self { file }, State::new(snapshot)))
    }

    /// Follows the file: a good new version replaces the state, a bad one leaves it and says so.
    pub(crate) async fn run(mut self, state: State) {
        loop {
            let text = self.file.changed().await;
            match parse(&self.file, text) {
                Ok(snapshot) => {
                    tracing::info!(
                        workloads = snapshot.workloads().len(),
                        services = snapshot.services().len(),
                        policies = snapshot.policies().len(),
                        "mesh file loaded"
                    );
                    state.replace_file(&snapshot);
                }
                Err(error) => {
                    let error = crate::error::chain(&error);
                    tracing::error!(
                        error,
                        "mesh file refused; keeping the state of its last good version"
                    );
                }
            }
        }
    }
}

fn parse(file: &WatchedFile, text: std::io::Result<String>) -> Result<Snapshot, MeshFileError> {
    let path = file.path();
    let text = text.map_err(|source| MeshFileError::Read { path: path.to_owned(), source })?;
    Ok(file::parse(path, &text)?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const ONE: &str = "workloads:\n\
        - {uid: a, name: a, namespace: shop, serviceAccount: web, workloadIps: [10.0.0.1], protocol: HBONE, services: {}}\n";

    fn snapshot(text: &str) -> Snapshot {
        file::parse(Path::new("mesh.yaml"), text).unwrap()
    }

    fn pod() -> PodRef {
        PodRef { name: "a".into(), namespace: "shop".into(), service_account: "web".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_arrives_late_is_waited_for() {
        let state = State::new(Snapshot::default());
        let late = state.clone();
        let pod = pod();
        let (found, ()) = tokio::join!(state.identify(&pod), async move {
            tokio::time::sleep(Duration::from_secs(3)).await;
            late.replace_file(&snapshot(ONE));
        });
        assert_eq!(&*found.unwrap().uid, "a");
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_never_arrives_is_a_refusal() {
        let state = State::new(Snapshot::default());
        let error = state.identify(&pod()).await.unwrap_err().to_string();
        assert!(error.contains("shop/a"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_bad_version_keeps_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mesh.yaml");
        std::fs::write(&path, ONE).unwrap();
        let (file, state) = MeshFile::open(path.clone()).unwrap();
        std::fs::write(&path, "workloads: [{").unwrap();
        let followed = timeout(Duration::from_secs(5), file.run(state.clone())).await;
        assert!(followed.is_err());
        assert_eq!(state.load().workloads().len(), 1);
    }
}
