//! Kubernetes' own kinds.

use std::net::IpAddr;

use serde::{Deserialize, Deserializer, de::Error as _};

use super::fields::{self, Labels, Meta};

/// A namespace: its labels are defaults for what is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Namespace {
    pub(crate) metadata: Meta,
}

/// A node: its labels say where it stands. Its status changes every few seconds and is none of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Node {
    #[serde(deserialize_with = "topology")]
    pub(crate) metadata: Meta,
}

fn topology<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Meta, D::Error> {
    let mut meta = Meta::deserialize(deserializer)?;
    meta.labels.retain(|name, _| name.starts_with("topology."));
    meta.annotations.clear();
    Ok(meta)
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    pub(crate) metadata: Meta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodSpec {
    pub(crate) node_name: String,
    pub(crate) host_network: bool,
    service_account_name: String,
    pub(crate) containers: Vec<Container>,
    pub(crate) init_containers: Vec<Container>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Container {
    pub(crate) ports: Vec<ContainerPort>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct ContainerPort {
    pub(crate) name: String,
    #[serde(rename = "containerPort")]
    pub(crate) number: u16,
    pub(crate) protocol: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodStatus {
    phase: Option<String>,
    #[serde(rename = "podIP", deserialize_with = "fields::ip")]
    pod_ip: Option<IpAddr>,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
    #[serde(deserialize_with = "readiness")]
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct PodIp {
    #[serde(deserialize_with = "fields::ip")]
    ip: Option<IpAddr>,
}

/// A condition of a pod's status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
}

fn readiness<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Condition>, D::Error> {
    let mut all = Vec::<Condition>::deserialize(deserializer)?;
    all.retain(|condition| condition.kind == "Ready");
    Ok(all)
}

impl Pod {
    /// Its addresses, each once.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let mut all: Vec<_> = self.status.pod_ips.iter().filter_map(|ip| ip.ip).collect();
        if let Some(ip) = self.status.pod_ip
            && !all.contains(&ip)
        {
            all.insert(0, ip);
        }
        all
    }

    /// Whether it has ended for good, so that its address may be somebody else's by now.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Whether it takes connections. A pod of a file that says nothing of it does.
    pub(crate) fn is_ready(&self) -> bool {
        let running = self.status.phase.as_deref().is_none_or(|phase| phase == "Running");
        running
            && match self.status.conditions.first() {
                Some(ready) => ready.status == "True",
                None => true,
            }
    }

    pub(crate) fn service_account(&self) -> &str {
        match self.spec.service_account_name.as_str() {
            "" => "default",
            name => name,
        }
    }

    /// The TCP port that one of its containers calls by this name.
    pub(crate) fn port(&self, name: &str) -> Option<u16> {
        let containers = self.spec.containers.iter().chain(&self.spec.init_containers);
        let mut ports = containers.flat_map(|container| &container.ports);
        let found = ports
            .find(|port| port.name == name && (port.protocol.is_empty() || port.protocol == "TCP"));
        found.map(|port| port.number).filter(|&port| port != 0)
    }
}

/// A service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Service {
    pub(crate) metadata: Meta,
    pub(crate) spec: ServiceSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServiceSpec {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) selector: Labels,
    pub(crate) ports: Vec<ServicePort>,
    #[serde(rename = "clusterIP")]
    cluster_ip: ClusterIp,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<ClusterIp>,
    #[serde(rename = "ipFamilies")]
    pub(crate) ip_families: Vec<String>,
    pub(crate) internal_traffic_policy: String,
    pub(crate) traffic_distribution: String,
    pub(crate) publish_not_ready_addresses: bool,
}

impl ServiceSpec {
    /// Its virtual addresses; a headless service has none.
    pub(crate) fn virtual_addresses(&self) -> Vec<IpAddr> {
        match self.cluster_ips.as_slice() {
            [] => self.cluster_ip.0.into_iter().collect(),
            all => all.iter().filter_map(|ip| ip.0).collect(),
        }
    }
}

/// `None`, or not set: no address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClusterIp(Option<IpAddr>);

impl<'de> Deserialize<'de> for ClusterIp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "" | "None" => Ok(Self(None)),
            text => fields::parse_ip(text).map(|ip| Self(Some(ip))).map_err(D::Error::custom),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServicePort {
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) port: u16,
    #[serde(default)]
    pub(crate) target_port: Option<IntOrName>,
    #[serde(default)]
    pub(crate) protocol: String,
}

/// A port, or what a pod calls it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum IntOrName {
    Number(u16),
    Name(String),
}

/// Endpoints of a service, written by hand or by a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct EndpointSlice {
    pub(crate) metadata: Meta,
    pub(crate) address_type: String,
    pub(crate) endpoints: Vec<SliceEndpoint>,
    pub(crate) ports: Vec<SlicePort>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SliceEndpoint {
    pub(crate) addresses: Vec<String>,
    pub(crate) conditions: SliceConditions,
    pub(crate) node_name: String,
    pub(crate) zone: String,
    pub(crate) target_ref: Option<Target>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct SliceConditions {
    pub(crate) ready: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Target {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) namespace: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct SlicePort {
    pub(crate) name: String,
    pub(crate) port: Option<u16>,
    pub(crate) protocol: String,
}
