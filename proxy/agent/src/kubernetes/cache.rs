//! The node's pods and the cluster's namespaces as far as the watches have told, and which pods are wanted by them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use culvert_mesh::PodRef;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{ResourceExt as _, core::PartialObjectMeta, runtime::watcher::Event};

use super::{
    REDIRECTION,
    eligible::{Enrolment, has_ended},
};

/// The service account of a pod that names none.
const DEFAULT_ACCOUNT: &str = "default";

/// A pod that is to be captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) pod: PodRef,
    /// Its network is the one that has one of these.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) annotations: BTreeMap<String, String>,
    /// Whether it must have a process by now.
    pub(super) must_be_found: bool,
}

/// What the watches have told.
pub(super) struct Cache {
    enrolment: Enrolment,
    pods: Kept<Pod>,
    namespaces: Kept<BTreeMap<String, String>>,
}

/// Objects of one watch.
struct Kept<T> {
    objects: BTreeMap<Arc<str>, T>,
    /// Seen since a list began: what it does not name is gone.
    listed: Option<BTreeSet<Arc<str>>>,
    complete: bool,
}

impl<T> Kept<T> {
    fn new() -> Self {
        Self { objects: BTreeMap::new(), listed: None, complete: false }
    }

    fn begin(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    fn put(&mut self, key: Arc<str>, object: T) {
        if let Some(listed) = &mut self.listed {
            listed.insert(Arc::clone(&key));
        }
        self.objects.insert(key, object);
    }

    fn end(&mut self) {
        if let Some(listed) = self.listed.take() {
            self.objects.retain(|key, _| listed.contains(key));
        }
        self.complete = true;
    }
}

impl Cache {
    pub(super) fn new(enrolment: Enrolment) -> Self {
        Self { enrolment, pods: Kept::new(), namespaces: Kept::new() }
    }

    pub(super) fn pod(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.pods.begin(),
            Event::InitApply(pod) | Event::Apply(pod) => {
                if let Some(uid) = pod.uid() {
                    self.pods.put(uid.into(), pod);
                }
            }
            Event::InitDone => self.pods.end(),
            Event::Delete(pod) => {
                self.pods.objects.remove(&*pod.uid().unwrap_or_default());
            }
        }
    }

    pub(super) fn namespace(&mut self, event: Event<PartialObjectMeta<Namespace>>) {
        match event {
            Event::Init => self.namespaces.begin(),
            Event::InitApply(namespace) | Event::Apply(namespace) => {
                let labels = namespace.labels().clone();
                self.namespaces.put(namespace.name_any().into(), labels);
            }
            Event::InitDone => self.namespaces.end(),
            Event::Delete(namespace) => {
                self.namespaces.objects.remove(&*namespace.name_any());
            }
        }
    }

    /// Whether both watches have told everything that there was at first.
    pub(super) fn is_complete(&self) -> bool {
        self.pods.complete && self.namespaces.complete
    }

    /// Whether there is a pod of this UID that is not about to go.
    pub(super) fn is_running(&self, uid: &str) -> bool {
        self.pods
            .objects
            .get(uid)
            .is_some_and(|pod| !has_ended(pod) && pod.metadata.deletion_timestamp.is_none())
    }

    /// The pods to capture, by UID. One without an address has no network yet.
    pub(super) fn wanted(&self) -> BTreeMap<Arc<str>, Wanted> {
        let no_labels = BTreeMap::new();
        let wanted = self.pods.objects.iter().filter_map(|(uid, pod)| {
            let namespace = pod.namespace().unwrap_or_default();
            let labels = self.namespaces.objects.get(&*namespace).unwrap_or(&no_labels);
            let addresses = addresses(pod);
            if addresses.is_empty() || !self.enrolment.takes(pod, labels) {
                return None;
            }
            let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
            let account = account.filter(|account| !account.is_empty()).unwrap_or(DEFAULT_ACCOUNT);
            let wanted = Wanted {
                pod: PodRef {
                    name: pod.name_any().into(),
                    namespace: namespace.into(),
                    service_account: account.into(),
                },
                addresses,
                annotations: said_by_itself(pod),
                must_be_found: pod.metadata.deletion_timestamp.is_none(),
            };
            Some((Arc::clone(uid), wanted))
        });
        wanted.collect()
    }
}

/// The pod's annotations without the one that we write.
fn said_by_itself(pod: &Pod) -> BTreeMap<String, String> {
    let mut annotations = pod.annotations().clone();
    annotations.remove(REDIRECTION);
    annotations
}

fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let Some(status) = &pod.status else { return Vec::new() };
    let all = status.pod_ips.iter().flatten().map(|address| &*address.ip);
    let mut addresses: Vec<IpAddr> =
        all.chain(status.pod_ip.as_deref()).filter_map(|ip| ip.parse().ok()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}
