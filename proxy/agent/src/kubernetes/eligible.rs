//! Which pods are in the mesh: a decision by labels and a few facts.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;

/// The label of pods and namespaces that decides.
const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";
/// Its value for the mesh.
const AMBIENT: &str = "ambient";
/// Its value for pods that stay out of it in a namespace that is in it.
const NONE: &str = "none";
/// Such a pod has a proxy of its own.
const SIDECAR: &str = "sidecar.istio.io/status";

/// Which pods are in the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Enrolment {
    /// Namespaces whose pods never are.
    pub excluded_namespaces: BTreeSet<String>,
}

impl Enrolment {
    /// Whether `pod`, in a namespace with these labels, is to be captured.
    pub(super) fn takes(&self, pod: &Pod, namespace: &BTreeMap<String, String>) -> bool {
        let metadata = &pod.metadata;
        let labels = metadata.labels.as_ref();
        let mode = |labels: &BTreeMap<String, String>| labels.get(DATAPLANE_MODE).cloned();
        let own = labels.and_then(mode);
        let in_mesh = own.as_deref() == Some(AMBIENT)
            || (mode(namespace).as_deref() == Some(AMBIENT) && own.as_deref() != Some(NONE));
        let host_network = pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
        let sidecar = metadata.annotations.as_ref().is_some_and(|all| all.contains_key(SIDECAR));
        let excluded = metadata
            .namespace
            .as_ref()
            .is_some_and(|namespace| self.excluded_namespaces.contains(namespace));
        in_mesh && !host_network && !sidecar && !excluded && !has_ended(pod)
    }
}

/// Whether its containers have all ended for good: its address may be another pod's by now.
pub(super) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn takes(pod: Value, namespace: Option<&str>) -> bool {
        let enrolment = Enrolment { excluded_namespaces: ["kube-system".to_owned()].into() };
        let labels = namespace.map(|mode| (DATAPLANE_MODE.to_owned(), mode.to_owned()));
        enrolment.takes(&serde_json::from_value(pod).unwrap(), &labels.into_iter().collect())
    }

    #[test]
    fn labels_decide_and_a_few_facts_overrule_them() {
        let labelled = |mode: &str| json!({"metadata": {"labels": {DATAPLANE_MODE: mode}}});
        let plain = || json!({"metadata": {"namespace": "shop"}});
        for (want, pod, namespace) in [
            (false, plain(), None),
            (true, plain(), Some("ambient")),
            (false, plain(), Some("Ambient")),
            (false, plain(), Some("sidecar")),
            (true, labelled("ambient"), None),
            (true, labelled("ambient"), Some("none")),
            (false, labelled("none"), Some("ambient")),
            (true, labelled("other"), Some("ambient")),
            (false, json!({"metadata": {"namespace": "kube-system"}}), Some("ambient")),
            (
                false,
                json!({"metadata": {}, "spec": {"hostNetwork": true, "containers": []}}),
                Some("ambient"),
            ),
            (false, json!({"metadata": {"annotations": {SIDECAR: "{}"}}}), Some("ambient")),
            (false, json!({"metadata": {}, "status": {"phase": "Succeeded"}}), Some("ambient")),
            (false, json!({"metadata": {}, "status": {"phase": "Failed"}}), Some("ambient")),
            (true, json!({"metadata": {}, "status": {"phase": "Pending"}}), Some("ambient")),
        ] {
            assert_eq!(takes(pod.clone(), namespace), want, "{pod} in {namespace:?}");
        }
    }
}
