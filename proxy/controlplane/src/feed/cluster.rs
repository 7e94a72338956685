//! Follows a cluster's API.

use std::time::Duration;

use futures::StreamExt as _;
use kube::Client;
use tokio::time::timeout;

use super::{Engine, FeedError, Origin};
use crate::{
    cluster::{
        Cluster,
        watches::{self, Told, Watches},
    },
    documents::Problem,
    objects::{Fault, Kind},
};

/// How often it is said what is still waited for.
const REMINDER: Duration = Duration::from_secs(10);

/// Everything that blocks: parsing and translating.
#[derive(Debug)]
struct Reading {
    cluster: Cluster,
    engine: Engine,
}

/// The cluster, followed.
pub(crate) struct FromCluster {
    reading: Option<Reading>,
    watches: Watches,
}

impl FromCluster {
    /// Waits until every kind has been listed once. What guards a single namespace and cannot be understood closes it;
    /// with one of the root namespace nothing is served.
    pub(super) async fn open(
        client: Client,
        root_namespace: &str,
        engine: Engine,
    ) -> Result<Self, FeedError> {
        let mut watches = watches::all(&client, watches::ABSENT);
        let mut reading = Reading { cluster: Cluster::new(), engine };
        let mut changes = Vec::new();
        while !reading.cluster.is_complete() {
            match timeout(REMINDER, watches.next()).await {
                Ok(Some(told)) => {
                    for (kind, told) in told {
                        reading.cluster.apply(kind, told, &mut changes);
                    }
                }
                Ok(None) => break,
                Err(_elapsed) => {
                    let missing: Vec<_> = reading.cluster.missing().map(Kind::name).collect();
                    tracing::warn!(?missing, "nodes are not served before these have been listed");
                }
            }
        }
        let translated = tokio::task::spawn_blocking(move || {
            reading.engine.take(changes, &reading.cluster);
            reading
        });
        let reading = translated.await.map_err(FeedError::Translate)?;
        let problems = reading.cluster.problems();
        FeedError::grave(problems.iter().filter(|problem| {
            problem.is_grave()
                && problem.key.as_ref().is_none_or(|key| key.namespace == root_namespace)
        }))?;
        Ok(Self { reading: Some(reading), watches })
    }

    pub(super) async fn run(mut self) {
        while let Some(mut reading) = self.reading.take() {
            let Some(told) = self.watches.next().await else { return };
            let took = tokio::task::spawn_blocking(move || {
                reading.take(told);
                reading
            });
            match took.await {
                Ok(reading) => self.reading = Some(reading),
                Err(error) => {
                    tracing::error!(%error, "the cluster is not followed any more; restart the control plane");
                }
            }
        }
    }
}

impl Reading {
    fn take(&mut self, told: Vec<(Kind, Told)>) {
        let mut changes = Vec::new();
        for (kind, told) in told {
            self.cluster.apply(kind, told, &mut changes);
        }
        if !changes.is_empty() {
            self.engine.metrics.triggered("config");
        }
        self.engine.take(changes, &self.cluster);
    }
}

impl Origin for Cluster {
    fn problems(&self) -> Vec<Problem> {
        self.problems()
    }

    fn locate(&self, fault: Fault) -> Problem {
        Problem::in_cluster(fault)
    }
}
