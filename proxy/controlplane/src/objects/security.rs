//! Istio's security kinds. A field that is not known is a mistake here: the policy would mean less than was written.

use std::collections::BTreeMap;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;

use super::fields::{Labels, Meta, parse_net};

/// Who may connect to whom.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Authorization {
    #[serde(default)]
    pub(crate) metadata: Meta,
    #[serde(default)]
    pub(crate) spec: AuthorizationSpec,
}

impl Authorization {
    /// Nobody, to anybody.
    pub(super) fn closed() -> Self {
        let (action, rules) = (AuthorizationAction::Deny, vec![Rule::default()]);
        let spec = AuthorizationSpec { action, rules, ..AuthorizationSpec::default() };
        Self { metadata: Meta::default(), spec }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct AuthorizationSpec {
    pub(crate) selector: Option<WorkloadSelector>,
    target_ref: Option<Value>,
    target_refs: Vec<Value>,
    pub(crate) action: AuthorizationAction,
    provider: Option<Value>,
    pub(crate) rules: Vec<Rule>,
}

impl AuthorizationSpec {
    /// Whether it is meant for a waypoint, and so none of a node's business.
    pub(crate) fn has_target(&self) -> bool {
        self.target_ref.is_some() || !self.target_refs.is_empty()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct WorkloadSelector {
    pub(crate) match_labels: Labels,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum AuthorizationAction {
    #[default]
    Allow,
    Deny,
    Audit,
    Custom,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Rule {
    pub(crate) from: Vec<From>,
    pub(crate) to: Vec<To>,
    pub(crate) when: Vec<When>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct From {
    pub(crate) source: Source,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Source {
    pub(crate) principals: Vec<String>,
    pub(crate) not_principals: Vec<String>,
    pub(crate) request_principals: Vec<String>,
    pub(crate) not_request_principals: Vec<String>,
    pub(crate) namespaces: Vec<String>,
    pub(crate) not_namespaces: Vec<String>,
    pub(crate) service_accounts: Vec<String>,
    pub(crate) not_service_accounts: Vec<String>,
    pub(crate) ip_blocks: Vec<Net>,
    pub(crate) not_ip_blocks: Vec<Net>,
    pub(crate) remote_ip_blocks: Vec<String>,
    pub(crate) not_remote_ip_blocks: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct To {
    pub(crate) operation: Operation,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Operation {
    pub(crate) hosts: Vec<String>,
    pub(crate) not_hosts: Vec<String>,
    pub(crate) ports: Vec<Port>,
    pub(crate) not_ports: Vec<Port>,
    pub(crate) methods: Vec<String>,
    pub(crate) not_methods: Vec<String>,
    pub(crate) paths: Vec<String>,
    pub(crate) not_paths: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct When {
    pub(crate) key: String,
    pub(crate) values: Vec<String>,
    pub(crate) not_values: Vec<String>,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Net(pub(crate) IpNet);

impl<'de> Deserialize<'de> for Net {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_net(&String::deserialize(deserializer)?).map(Self).map_err(D::Error::custom)
    }
}

/// A port; Istio writes it as a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port(pub(crate) u16);

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Number(u64),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Text(text) => text,
            Written::Number(number) => number.to_string(),
        };
        parse_port(&text).map(Self).map_err(D::Error::custom)
    }
}

pub(crate) fn parse_port(text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|&port| port != 0);
    port.ok_or_else(|| format!("`{text}` is not a port; write a number from 1 to 65535"))
}

/// How workloads take connections that prove no identity.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct PeerAuthentication {
    #[serde(default)]
    pub(crate) metadata: Meta,
    #[serde(default)]
    pub(crate) spec: PeerAuthenticationSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct PeerAuthenticationSpec {
    selector: Option<WorkloadSelector>,
    mtls: MutualTls,
    port_level_mtls: BTreeMap<Port, MutualTls>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct MutualTls {
    mode: Mode,
}

/// What is asked of peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Mode {
    /// What the wider policy asks.
    #[default]
    Unset,
    /// Nothing. A node cannot forbid mutual TLS, so it is `Permissive`.
    Disable,
    /// Nothing.
    Permissive,
    /// An identity.
    Strict,
}

impl PeerAuthentication {
    /// Every workload of the namespace asks for an identity.
    pub(super) fn closed() -> Self {
        let mtls = MutualTls { mode: Mode::Strict };
        let spec = PeerAuthenticationSpec { mtls, ..PeerAuthenticationSpec::default() };
        Self { metadata: Meta::default(), spec }
    }

    /// The labels of the workloads it is for; `None` for all of its namespace, or of the mesh.
    pub(crate) fn selector(&self) -> Option<&Labels> {
        let labels = &self.spec.selector.as_ref()?.match_labels;
        (!labels.is_empty()).then_some(labels)
    }

    pub(crate) fn mode(&self) -> Mode {
        self.spec.mtls.mode
    }

    /// The ports with a mode of their own, in order.
    pub(crate) fn ports(&self) -> impl Iterator<Item = (u16, Mode)> + '_ {
        self.spec.port_level_mtls.iter().map(|(port, tls)| (port.0, tls.mode))
    }
}
