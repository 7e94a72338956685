//! Istio's and the gateway API's kinds for what is beyond pods and services.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::fields::{Labels, Meta, Selector};

/// Hosts that are made known to the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct ServiceEntry {
    #[serde(default)]
    pub(crate) metadata: Meta,
    pub(crate) spec: ServiceEntrySpec,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceEntrySpec {
    pub(crate) hosts: Vec<String>,
    #[serde(default)]
    pub(crate) addresses: Vec<String>,
    #[serde(default)]
    pub(crate) ports: Vec<EntryPort>,
    #[serde(default)]
    pub(crate) resolution: Resolution,
    #[serde(default)]
    pub(crate) endpoints: Vec<Endpoint>,
    #[serde(default)]
    pub(crate) workload_selector: Option<EntrySelector>,
    #[serde(default)]
    pub(crate) subject_alt_names: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct EntrySelector {
    pub(crate) labels: Labels,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EntryPort {
    pub(crate) number: u16,
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) target_port: u16,
}

/// How a host's endpoints are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Resolution {
    #[default]
    None,
    Static,
    Dns,
    DnsRoundRobin,
    DynamicDns,
}

/// A workload that is not a pod, on its own or in a service entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Endpoint {
    pub(crate) address: String,
    pub(crate) ports: BTreeMap<String, u16>,
    pub(crate) labels: Labels,
    pub(crate) network: String,
    /// `region/zone/subzone`.
    pub(crate) locality: String,
    pub(crate) weight: u32,
    pub(crate) service_account: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct WorkloadEntry {
    #[serde(default)]
    pub(crate) metadata: Meta,
    pub(crate) spec: Endpoint,
}

/// A gateway, which is of interest where it is a waypoint.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Gateway {
    #[serde(default)]
    pub(crate) metadata: Meta,
    pub(crate) spec: GatewaySpec,
    #[serde(default)]
    pub(crate) status: GatewayStatus,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GatewaySpec {
    pub(crate) gateway_class_name: String,
    #[serde(default)]
    pub(crate) listeners: Vec<Listener>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Listener {
    pub(crate) port: u16,
    pub(crate) protocol: String,
    pub(crate) allowed_routes: AllowedRoutes,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct AllowedRoutes {
    pub(crate) namespaces: Allowed,
}

/// From which namespaces a waypoint may be used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Allowed {
    pub(crate) from: AllowedFrom,
    pub(crate) selector: Selector,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum AllowedFrom {
    #[default]
    Same,
    All,
    Selector,
    None,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct GatewayStatus {
    pub(crate) addresses: Vec<GatewayAddress>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct GatewayAddress {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) value: String,
}
