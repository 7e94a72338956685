//! A source outside of this crate, whose pods get the settings that the node lets their annotations choose.

use std::{collections::BTreeMap, sync::Arc};

use culvert_agent::pods as told;
use culvert_capture::Settings;

use super::{PodEvent, PodSource, PodSpec, Policy};

/// Pods of `S`, as the node lets them be captured.
pub(crate) struct Governed<S> {
    source: S,
    policy: Policy,
    settings: BTreeMap<Arc<str>, Settings>,
}

impl<S> Governed<S> {
    pub(crate) fn new(source: S, policy: Policy) -> Self {
        Self { source, policy, settings: BTreeMap::new() }
    }
}

impl<S: told::PodSource> PodSource for Governed<S> {
    async fn next(&mut self) -> PodEvent {
        match self.source.next().await {
            told::PodEvent::Added(told::PodSpec { uid, pod, netns, annotations }) => {
                let whose = format!("pod {}/{}", pod.namespace, pod.name);
                let former = self.settings.get(&uid);
                let settings = self.policy.settings(&annotations, former, whose);
                self.settings.insert(Arc::clone(&uid), settings.clone());
                PodEvent::Added(PodSpec { uid, pod, netns, settings })
            }
            told::PodEvent::Removed(uid) => {
                self.settings.remove(&uid);
                PodEvent::Removed(uid)
            }
            told::PodEvent::Synced => PodEvent::Synced,
        }
    }

    fn is_static(&self) -> bool {
        false
    }

    fn settled(&mut self, uid: &str, outcome: Result<(), &str>) {
        self.source.settled(uid, outcome);
    }
}
