//! From objects to the store: what changes in one becomes what changes in the other.
//!
//! Where objects come from is left to `directory` and `cluster`; each is followed by a module of its own here.

mod cluster;
mod files;

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use kube::Client;

use self::{cluster::FromCluster, files::FromFiles};
use crate::{
    directory::DirectoryError,
    documents::Problem,
    metrics::{Event, Metrics},
    objects::Fault,
    placements::Placements,
    store::Store,
    translate::Translator,
    world::{Change, MeshConfig},
};

/// Where the objects that describe the mesh are.
#[derive(Clone)]
pub enum Source {
    /// In a directory, or in one file.
    Files(PathBuf),
    /// In a cluster, behind its API.
    Kubernetes(Client),
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Files(path) => f.debug_tuple("Files").field(path).finish(),
            Self::Kubernetes(_) => f.write_str("Kubernetes"),
        }
    }
}

/// Why the mesh cannot be served at all.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// The directory cannot be read.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Something that guards the mesh cannot be understood, and there is no earlier version of it.
    #[error(
        "{problem} (of {count} such problems); without it the mesh might be open, so it is not served"
    )]
    Grave {
        /// The first such problem.
        problem: Box<Problem>,
        /// How many there are.
        count: usize,
    },
    /// A thread of ours panicked.
    #[error("translate the mesh's objects")]
    Translate(#[source] tokio::task::JoinError),
}

impl FeedError {
    /// The first of `problems`, if there is one.
    fn grave<'a, I: Iterator<Item = &'a Problem>>(mut problems: I) -> Result<(), Self> {
        let Some(first) = problems.next() else { return Ok(()) };
        let problem = Box::new(first.clone());
        Err(Self::Grave { problem, count: 1 + problems.count() })
    }
}

/// Objects, followed.
pub(crate) enum Feed {
    Files(Box<FromFiles>),
    Cluster(Box<FromCluster>),
}

impl Feed {
    /// Reads everything for the first time and fills `store` and `placements`. Files are read at once; a cluster is waited
    /// for.
    pub(crate) async fn open(
        source: Source,
        config: MeshConfig,
        store: Arc<Store>,
        placements: Arc<Placements>,
        metrics: Metrics,
    ) -> Result<Self, FeedError> {
        let root_namespace = config.root_namespace.clone();
        let translator = Translator::new(config);
        let engine = Engine { translator, store, placements, metrics, reported: BTreeSet::new() };
        Ok(match source {
            Source::Files(path) => Self::Files(Box::new(FromFiles::open(path, engine)?)),
            Source::Kubernetes(client) => {
                let open = FromCluster::open(client, &root_namespace, engine);
                Self::Cluster(Box::new(Box::pin(open).await?))
            }
        })
    }

    /// Follows them for ever.
    pub(crate) async fn run(self) {
        match self {
            Self::Files(files) => files.run().await,
            Self::Cluster(cluster) => cluster.run().await,
        }
    }
}

/// Whoever has read objects, and knows what is wrong with them.
trait Origin {
    /// Everything that is wrong with the objects as they are, in their order.
    fn problems(&self) -> Vec<Problem>;

    /// Where the object of a fault stands.
    fn locate(&self, fault: Fault) -> Problem;
}

/// What is the same wherever objects come from. All of it blocks.
#[derive(Debug)]
struct Engine {
    translator: Translator,
    store: Arc<Store>,
    placements: Arc<Placements>,
    metrics: Metrics,
    reported: BTreeSet<String>,
}

impl Engine {
    /// Takes in what changed.
    fn take(&mut self, changes: Vec<Change>, origin: &impl Origin) {
        for change in &changes {
            match change {
                Change::Set(key, _) => self.metrics.changed(key.kind, Event::Set),
                Change::Remove(key) => self.metrics.changed(key.kind, Event::Removed),
                Change::Mesh(..) => {}
            }
        }
        // First, so that a node that is told of its pod may ask for the pod's certificate.
        self.placements.apply(&changes);
        let update = self.translator.apply(changes);
        let (changed, removed) = (update.changed.len(), update.removed.len());
        self.store.apply(update);
        if changed + removed > 0 {
            tracing::info!(changed, removed, "mesh changed");
        }
        self.report(origin);
    }

    /// Logs each problem when it appears.
    fn report(&mut self, origin: &impl Origin) {
        let faults = self.translator.faults().cloned().map(|fault| origin.locate(fault));
        let problems = origin.problems().into_iter().chain(faults);
        let now: BTreeSet<_> = problems.map(|problem| problem.to_string()).collect();
        for problem in now.difference(&self.reported) {
            tracing::warn!(problem, "not as written");
        }
        self.reported = now;
    }
}
