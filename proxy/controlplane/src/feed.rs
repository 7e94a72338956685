//! From the files to the store: what changes in one becomes what changes in the other.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use crate::{
    directory::{Directory, DirectoryError, Watch},
    documents::Problem,
    metrics::{Event, Metrics},
    placements::Placements,
    store::Store,
    translate::Translator,
    world::{Change, MeshConfig},
};

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
}

/// Everything that blocks: reading, parsing and translating.
#[derive(Debug)]
struct Engine {
    directory: Directory,
    translator: Translator,
    store: Arc<Store>,
    placements: Arc<Placements>,
    metrics: Metrics,
    reported: BTreeSet<String>,
}

/// The directory, followed.
#[derive(Debug)]
pub(crate) struct Feed {
    engine: Option<Engine>,
    watch: Watch,
}

impl Feed {
    /// Reads the directory for the first time and fills `store` and `placements`.
    pub(crate) fn open(
        path: PathBuf,
        config: MeshConfig,
        store: Arc<Store>,
        placements: Arc<Placements>,
        metrics: Metrics,
    ) -> Result<Self, FeedError> {
        // Before the first look, so that no change falls between.
        let watch = Watch::new(&path);
        let mut engine = Engine {
            directory: Directory::new(path),
            translator: Translator::new(config),
            store,
            placements,
            metrics,
            reported: BTreeSet::new(),
        };
        let changes = engine.directory.open()?;
        engine.take(changes);
        let problems = engine.directory.problems();
        let mut grave = problems.iter().filter(|problem| problem.is_grave());
        if let Some(first) = grave.next() {
            let problem = Box::new(first.clone());
            return Err(FeedError::Grave { problem, count: 1 + grave.count() });
        }
        Ok(Self { engine: Some(engine), watch })
    }

    /// Follows the directory for ever.
    pub(crate) async fn run(mut self) {
        let mut unrest = false;
        while let Some(mut engine) = self.engine.take() {
            if unrest {
                self.watch.rest().await;
            } else {
                self.watch.changed().await;
            }
            // Parsing and translating a large mesh takes longer than other tasks may wait.
            let again = tokio::task::spawn_blocking(move || (engine.again(), engine));
            match again.await {
                Ok((again, engine)) => (unrest, self.engine) = (again, Some(engine)),
                Err(error) => {
                    tracing::error!(%error, "the files are not followed any more; restart the control plane");
                }
            }
        }
    }
}

impl Engine {
    /// Takes in what changed; `true` if a file is being written.
    fn again(&mut self) -> bool {
        match self.directory.again() {
            Ok(found) => {
                if !found.changes.is_empty() {
                    self.metrics.triggered("config");
                }
                self.take(found.changes);
                found.unrest
            }
            Err(error) => {
                let error = culvert_mesh::error::chain(&error);
                tracing::warn!(error, "objects stay as they are");
                false
            }
        }
    }

    fn take(&mut self, changes: Vec<Change>) {
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
        self.report();
    }

    /// Logs each problem when it appears.
    fn report(&mut self) {
        let faults = self.translator.faults().cloned().map(|fault| self.directory.locate(fault));
        let problems = self.directory.problems().into_iter().chain(faults);
        let now: BTreeSet<_> = problems.map(|problem| problem.to_string()).collect();
        for problem in now.difference(&self.reported) {
            tracing::warn!(problem, "not as written");
        }
        self.reported = now;
    }
}
