//! Settings of pods that are enrolled already: new connections follow them, and nothing else of the pod is touched.

use culvert_capture::Settings;

use super::Enrolment;
use crate::{error::chain, pods::PodSpec};

impl Enrolment {
    /// Whether the pod is the one that is enrolled in this namespace, so that only its settings can differ.
    pub(super) fn carries(&self, spec: &PodSpec, inode: u32) -> bool {
        self.enrolled.get(&inode).is_some_and(|enrolled| {
            enrolled.holder.as_ref() == Some(&spec.uid) && enrolled.proxy.context.pod == spec.pod
        })
    }

    /// Gives an enrolled pod its settings; those that it has stay where they are refused.
    pub(super) async fn configure(&mut self, spec: &PodSpec, inode: u32) {
        let Some(enrolled) = self.enrolled.get_mut(&inode) else { return };
        enrolled.spec = spec.clone();
        let (capture, settings) = (enrolled.pod.capture(), spec.settings.clone());
        if *enrolled.pod.settings() == settings {
            return;
        }
        let refused = match self.tasks.blocking(move || capture.configure(&settings)).await {
            Ok(Ok(())) => {
                tracing::info!(pod = %spec.uid, "pod has new settings");
                tell_bypass(spec, &spec.settings);
                return;
            }
            Ok(Err(error)) => chain(&error),
            Err(error) => error.to_string(),
        };
        tracing::error!(pod = %spec.uid, error = refused, "settings refused; the pod keeps its former ones");
    }
}

/// Tells what of a pod is not in the mesh.
pub(super) fn tell_bypass(spec: &PodSpec, settings: &Settings) {
    if settings.bypasses() {
        let bypassed = settings.bypassed();
        tracing::warn!(pod = %spec.uid, bypassed, "by its annotations this goes around the proxy, in plaintext");
    }
}
