//! What the node lets pods choose about their capture, whichever source tells of them.

use std::{collections::BTreeMap, fmt};

use culvert_capture::{Settings, SettingsError};
use prometheus_client::{metrics::counter::Counter, registry::Registry};

/// What is decided for all pods of the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Policy {
    capture_dns: bool,
    allow_bypass: bool,
    refused: Counter,
}

impl Policy {
    /// DNS is captured where a pod does not say otherwise; pods may go around the proxy or not.
    pub(crate) fn new(capture_dns: bool, allow_bypass: bool) -> Self {
        Self { capture_dns, allow_bypass, refused: Counter::default() }
    }

    /// Makes the count of annotations that were refused a metric.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "culvert_pod_settings_refused",
            "Annotations of pods that were refused: the pod keeps its former settings",
            self.refused.clone(),
        );
    }

    /// The settings of `pod`, which the source names `whose`. A mistake in an annotation leaves those of `former`, and is
    /// logged and counted.
    pub(crate) fn settings(
        &self,
        annotations: &BTreeMap<String, String>,
        former: Option<&Settings>,
        whose: impl fmt::Display,
    ) -> Settings {
        match self.decide(annotations) {
            Ok(Decision { settings, refused: None }) => settings,
            Ok(Decision { settings, refused: Some(bypassed) }) => {
                self.refused.inc();
                tracing::warn!(
                    %whose,
                    bypassed,
                    "this node lets no pod go around the proxy (--allow-pod-bypass); captured all the same",
                );
                settings
            }
            Err(error) => {
                self.refused.inc();
                tracing::error!(%whose, %error, "annotation refused; keeping the pod's former settings");
                let default = || Settings { capture_dns: self.capture_dns, ..Settings::default() };
                former.cloned().unwrap_or_else(default)
            }
        }
    }

    fn decide(&self, annotations: &BTreeMap<String, String>) -> Result<Decision, SettingsError> {
        let settings = Settings::of_annotations(annotations, self.capture_dns)?;
        if self.allow_bypass || !settings.bypasses() {
            return Ok(Decision { settings, refused: None });
        }
        let refused = Some(settings.bypassed());
        Ok(Decision { settings: settings.without_bypass(), refused })
    }
}

/// What becomes of a pod's annotations.
struct Decision {
    settings: Settings,
    /// What the pod wanted to go around the proxy, where it may not.
    refused: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_node_may_let_no_pod_go_around_the_proxy() {
        let wanted = annotations(&[
            ("ambient.istio.io/bypass-inbound-capture", "true"),
            ("ambient.istio.io/dns-capture", "true"),
        ]);
        for (allow, bypass, count) in [(true, true, 0), (false, false, 1)] {
            let policy = Policy::new(false, allow);
            let settings = policy.settings(&wanted, None, "a pod");
            assert_eq!((settings.bypass_inbound, settings.capture_dns), (bypass, true));
            assert_eq!(policy.refused.get(), count);
        }
    }

    #[test]
    fn a_mistake_leaves_the_former_settings_or_the_nodes() {
        let policy = Policy::new(true, true);
        let wrong = annotations(&[("ambient.istio.io/dns-capture", "perhaps")]);
        let fresh = policy.settings(&wrong, None, "a pod");
        assert_eq!(fresh, Settings { capture_dns: true, ..Settings::default() });
        let former = Settings { bypass_inbound: true, ..Settings::default() };
        assert_eq!(policy.settings(&wrong, Some(&former), "a pod"), former);
        assert_eq!(policy.refused.get(), 2);
    }
}
