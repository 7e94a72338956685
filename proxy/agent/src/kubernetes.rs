//! Pods as the cluster's API server tells of them: those of this node that their labels, or their namespace's, put into
//! the mesh.
//!
//! The API tells which pods there should be, never that one is captured: the annotation that says so is written for people
//! and other tools, and not read. Where a pod's network is, its processes tell ([`crate::discovery`]).

mod cache;
mod eligible;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use culvert_mesh::error::chain;
use culvert_sys::netns::Netns;
use futures::{
    StreamExt as _,
    future::BoxFuture,
    stream::{BoxStream, FuturesUnordered},
};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, watcher},
    },
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use self::cache::{Cache, Wanted};
pub use self::eligible::Enrolment;
use crate::{
    discovery::{self, DiscoveryError},
    pods::{Place, PodEvent, PodSource, PodSpec},
};

/// How soon a pod's network is looked for again that was not found: its first process may not run yet.
const AGAIN: Duration = Duration::from_millis(500);
/// How often all are looked for, whatever events say: a node that has rebooted has pods of the same UIDs in new networks.
const VERIFY: Duration = Duration::from_secs(30);

/// Says on a pod, for people and other tools, that its connections are captured.
const REDIRECTION: &str = "ambient.istio.io/redirection";

/// Pods that are told: whose identity, where, and with which annotations.
type Found = BTreeMap<Arc<str>, Netns>;

/// A search for networks in progress.
type Search = JoinHandle<Result<Found, DiscoveryError>>;

/// Which pods to take, and where from.
#[derive(Clone, Debug)]
pub struct Options {
    /// This node, as the cluster calls it.
    pub node: String,
    /// The node's `/proc`.
    pub proc: PathBuf,
    /// Which pods are in the mesh.
    pub enrolment: Enrolment,
}

/// The pods of this node.
pub struct Kubernetes {
    client: Client,
    options: Options,
    pods: BoxStream<'static, watcher::Result<watcher::Event<Pod>>>,
    namespaces: BoxStream<'static, watcher::Result<watcher::Event<PartialObjectMeta<Namespace>>>>,
    cache: Cache,
    told: BTreeMap<Arc<str>, PodSpec>,
    queue: VecDeque<PodEvent>,
    search: Option<Search>,
    next_search: Instant,
    synced: bool,
    notes: FuturesUnordered<BoxFuture<'static, ()>>,
}

impl Kubernetes {
    /// Watches the API server behind `client`; nothing is asked until the first event is waited for.
    pub fn new(client: Client, options: Options) -> Self {
        let of_node = watcher::Config::default().fields(&format!("spec.nodeName={}", options.node));
        let pods = watcher(Api::<Pod>::all(client.clone()), of_node).default_backoff().boxed();
        let namespaces = Api::<PartialObjectMeta<Namespace>>::all(client.clone());
        let namespaces = watcher(namespaces, watcher::Config::default()).default_backoff().boxed();
        Self {
            client,
            cache: Cache::new(options.enrolment.clone()),
            options,
            pods,
            namespaces,
            told: BTreeMap::new(),
            queue: VecDeque::new(),
            search: None,
            next_search: Instant::now(),
            synced: false,
            notes: FuturesUnordered::new(),
        }
    }

    /// Brings what was told in line with what is wanted, as far as no search is needed for it.
    fn update(&mut self) {
        if !self.cache.is_complete() {
            return;
        }
        let wanted = self.cache.wanted();
        let gone: Vec<_> =
            self.told.keys().filter(|uid| !wanted.contains_key(*uid)).cloned().collect();
        for uid in gone {
            let spec = self.told.remove(&uid);
            self.queue.push_back(PodEvent::Removed(uid));
            // A pod that is going needs no note.
            if let Some(spec) = spec.filter(|spec| self.cache.is_running(&spec.uid)) {
                self.note(&spec, None);
            }
        }
        for (uid, pod) in &wanted {
            if let Some(told) = self.told.get_mut(uid)
                && told.annotations != pod.annotations
            {
                told.annotations.clone_from(&pod.annotations);
                self.queue.push_back(PodEvent::Added(told.clone()));
            }
        }
        if wanted.keys().any(|uid| !self.told.contains_key(uid)) {
            self.next_search = self.next_search.min(Instant::now());
        }
        self.finish_sync(&wanted);
    }

    /// Tells that all is told, once nothing is missing.
    fn finish_sync(&mut self, wanted: &BTreeMap<Arc<str>, Wanted>) {
        if self.synced || !self.cache.is_complete() {
            return;
        }
        let missing: Vec<_> = wanted
            .iter()
            .filter(|(uid, pod)| pod.must_be_found && !self.told.contains_key(*uid))
            .map(|(_, pod)| format!("{}/{}", pod.pod.namespace, pod.pod.name))
            .collect();
        if missing.is_empty() {
            self.synced = true;
            self.queue.push_back(PodEvent::Synced);
        } else {
            tracing::debug!(?missing, "networks of pods not found yet");
        }
    }

    fn search(&mut self) {
        let wanted = self.cache.wanted();
        if wanted.is_empty() {
            self.next_search = Instant::now() + VERIFY;
            return self.finish_sync(&wanted);
        }
        let wanted: BTreeMap<Arc<str>, Vec<IpAddr>> =
            wanted.into_iter().map(|(uid, pod)| (uid, pod.addresses)).collect();
        let proc = self.options.proc.clone();
        self.search = Some(tokio::task::spawn_blocking(move || discovery::find(&proc, &wanted)));
    }

    fn found(&mut self, found: Result<Found, DiscoveryError>) {
        let found = found.unwrap_or_else(|error| {
            tracing::error!(error = chain(&error), "networks of pods not found");
            BTreeMap::new()
        });
        let wanted = self.cache.wanted();
        for (uid, netns) in found {
            let Some(pod) = wanted.get(&uid) else { continue };
            let spec = PodSpec {
                uid: Arc::clone(&uid),
                pod: pod.pod.clone(),
                netns: Place::Open(netns),
                annotations: pod.annotations.clone(),
            };
            if self.told.get(&uid) != Some(&spec) {
                self.told.insert(uid, spec.clone());
                self.queue.push_back(PodEvent::Added(spec));
            }
        }
        let all = wanted.keys().all(|uid| self.told.contains_key(uid));
        self.next_search = Instant::now() + if all { VERIFY } else { AGAIN };
        self.finish_sync(&wanted);
    }

    /// Writes on the pod whether it is captured; `None` removes the note. That it cannot be written harms nobody.
    fn note(&self, spec: &PodSpec, note: Option<&'static str>) {
        let api = Api::<Pod>::namespaced(self.client.clone(), &spec.pod.namespace);
        let pod = spec.pod.clone();
        self.notes.push(Box::pin(async move {
            let patch = serde_json::json!({"metadata": {"annotations": {REDIRECTION: note}}});
            let patched =
                api.patch_status(&pod.name, &PatchParams::default(), &Patch::Merge(patch)).await;
            if let Err(error) = patched {
                tracing::warn!(%error, ?pod, "pod not annotated");
            }
        }));
    }
}

impl PodSource for Kubernetes {
    async fn next(&mut self) -> PodEvent {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            let may_search = self.search.is_none() && self.cache.is_complete();
            tokio::select! {
                Some(event) = self.pods.next() => match event {
                    Ok(event) => {
                        self.cache.pod(event);
                        self.update();
                    }
                    Err(error) => tracing::warn!(%error, "watch of pods interrupted; trying again"),
                },
                Some(event) = self.namespaces.next() => match event {
                    Ok(event) => {
                        self.cache.namespace(event);
                        self.update();
                    }
                    Err(error) => {
                        tracing::warn!(%error, "watch of namespaces interrupted; trying again");
                    }
                },
                found = async { self.search.as_mut()?.await.ok() }, if self.search.is_some() => {
                    self.search = None;
                    // `None`: the thread panicked, and has said so.
                    self.found(found.unwrap_or_else(|| Ok(BTreeMap::new())));
                }
                () = sleep_until(self.next_search), if may_search => self.search(),
                Some(()) = self.notes.next(), if !self.notes.is_empty() => {}
            }
        }
    }

    fn settled(&mut self, uid: &str, outcome: Result<(), &str>) {
        if let (Some(spec), Ok(())) = (self.told.get(uid), outcome) {
            self.note(spec, Some("enabled"));
        }
    }
}
