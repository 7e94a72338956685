//! All sources of pods that the node was given, as one.

use culvert_agent::{
    kubernetes::{self, Kubernetes},
    zds,
};
use futures::future::{BoxFuture, FutureExt as _, select_all};

use super::{Governed, PodEvent, PodSource, PodsFile, PodsFileError, Policy};
use crate::config::PodSources;

/// Why there is no telling which pods to enrol.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The pods file was refused.
    #[error(transparent)]
    File(#[from] PodsFileError),
    /// It is not known how to reach the cluster.
    #[error(
        "find the Kubernetes API; run in a pod with a service account, or name a kubeconfig in KUBECONFIG"
    )]
    Kubernetes(#[source] Box<kube::Error>),
}

/// The cluster's API: as kubectl finds it, or as programs in pods do.
pub(crate) async fn cluster() -> Result<kube::Client, SourceError> {
    kube::Client::try_default().await.map_err(|error| SourceError::Kubernetes(Box::new(error)))
}

/// The sources, and how many have not told everything yet.
pub(crate) struct Sources {
    all: Vec<Source>,
    incomplete: usize,
}

enum Source {
    File(PodsFile),
    Agent(Governed<zds::Agent>),
    Kubernetes(Box<Governed<Kubernetes>>),
}

impl Source {
    fn next(&mut self) -> BoxFuture<'_, PodEvent> {
        match self {
            Self::File(source) => source.next().boxed(),
            Self::Agent(source) => source.next().boxed(),
            Self::Kubernetes(source) => source.next().boxed(),
        }
    }

    fn settled(&mut self, uid: &str, outcome: Result<(), &str>) {
        match self {
            Self::File(source) => source.settled(uid, outcome),
            Self::Agent(source) => source.settled(uid, outcome),
            Self::Kubernetes(source) => source.settled(uid, outcome),
        }
    }
}

impl Sources {
    /// Opens those that are wanted, when a mistake in what they need is still an error.
    pub(crate) async fn open(
        wanted: &PodSources,
        node: &str,
        policy: &Policy,
    ) -> Result<Self, SourceError> {
        let mut all = Vec::new();
        if let Some(file) = &wanted.file {
            all.push(Source::File(PodsFile::open(file.clone(), policy.clone())?));
        }
        if let Some(socket) = &wanted.zds {
            let agent = zds::Agent::new(socket.clone());
            all.push(Source::Agent(Governed::new(agent, policy.clone())));
        }
        if wanted.kubernetes {
            let client = cluster().await?;
            let options = kubernetes::Options {
                node: node.to_owned(),
                proc: wanted.proc.clone(),
                enrolment: kubernetes::Enrolment {
                    excluded_namespaces: wanted.excluded_namespaces.iter().cloned().collect(),
                },
            };
            let source = Governed::new(Kubernetes::new(client, options), policy.clone());
            all.push(Source::Kubernetes(Box::new(source)));
        }
        let incomplete = all.len();
        Ok(Self { all, incomplete })
    }
}

impl PodSource for Sources {
    async fn next(&mut self) -> PodEvent {
        loop {
            let (event, ..) = select_all(self.all.iter_mut().map(Source::next)).await;
            if event != PodEvent::Synced {
                return event;
            }
            self.incomplete = self.incomplete.saturating_sub(1);
            if self.incomplete == 0 {
                return event;
            }
        }
    }

    fn is_static(&self) -> bool {
        self.all.iter().all(|source| matches!(source, Source::File(_)))
    }

    fn settled(&mut self, uid: &str, outcome: Result<(), &str>) {
        for source in &mut self.all {
            source.settled(uid, outcome);
        }
    }
}
