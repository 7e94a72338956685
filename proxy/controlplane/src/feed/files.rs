//! Follows a directory.

use std::path::PathBuf;

use super::{Engine, FeedError, Origin};
use crate::{
    directory::{Directory, Watch},
    documents::Problem,
    objects::Fault,
};

/// Everything that blocks: reading, parsing and translating.
#[derive(Debug)]
struct Reading {
    directory: Directory,
    engine: Engine,
}

/// The directory, followed.
#[derive(Debug)]
pub(crate) struct FromFiles {
    reading: Option<Reading>,
    watch: Watch,
}

impl FromFiles {
    /// Reads the directory for the first time.
    pub(super) fn open(path: PathBuf, engine: Engine) -> Result<Self, FeedError> {
        // Before the first look, so that no change falls between.
        let watch = Watch::new(&path);
        let mut reading = Reading { directory: Directory::new(path), engine };
        let changes = reading.directory.open()?;
        reading.engine.take(changes, &reading.directory);
        let problems = reading.directory.problems();
        FeedError::grave(problems.iter().filter(|problem| problem.is_grave()))?;
        Ok(Self { reading: Some(reading), watch })
    }

    pub(super) async fn run(mut self) {
        let mut unrest = false;
        while let Some(mut reading) = self.reading.take() {
            if unrest {
                self.watch.rest().await;
            } else {
                self.watch.changed().await;
            }
            // Parsing and translating a large mesh takes longer than other tasks may wait.
            let again = tokio::task::spawn_blocking(move || (reading.again(), reading));
            match again.await {
                Ok((again, reading)) => (unrest, self.reading) = (again, Some(reading)),
                Err(error) => {
                    tracing::error!(%error, "the files are not followed any more; restart the control plane");
                }
            }
        }
    }
}

impl Reading {
    /// Takes in what changed; `true` if a file is being written.
    fn again(&mut self) -> bool {
        match self.directory.again() {
            Ok(found) => {
                if !found.changes.is_empty() {
                    self.engine.metrics.triggered("config");
                }
                self.engine.take(found.changes, &self.directory);
                found.unrest
            }
            Err(error) => {
                let error = culvert_mesh::error::chain(&error);
                tracing::warn!(error, "objects stay as they are");
                false
            }
        }
    }
}

impl Origin for Directory {
    fn problems(&self) -> Vec<Problem> {
        self.problems()
    }

    fn locate(&self, fault: Fault) -> Problem {
        self.locate(fault)
    }
}
