//! The mesh file: what a control plane would have told the nodes, for the pods of one topology.

use std::{collections::BTreeMap, fs, net::IpAddr, path::Path};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::topology::{Family, Node, Pod, Topology};

/// The virtual address of the one service, `ledger.bank.svc.cluster.local`, which b1 provides.
pub const VIP_V4: &str = "10.96.0.10";
/// Its IPv6 address.
pub const VIP_V6: &str = "fd00:96::10";
/// The port of the service.
pub const VIP_PORT: u16 = 80;

/// Workloads, services and policies, changed step by step and written whole.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MeshFile {
    workloads: Vec<Value>,
    services: Vec<Value>,
    policies: Vec<Value>,
}

/// How a workload is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Port 15008 of the pod.
    Hbone,
    /// Plain TCP.
    Tcp,
}

impl MeshFile {
    /// The mesh's pods a1, a2 and b1, reached by HBONE; x is not in it.
    pub fn new(topology: &Topology) -> Self {
        let mut file = Self::default();
        for (pod, node) in
            [(&topology.a1, &topology.a), (&topology.a2, &topology.a), (&topology.b1, &topology.b)]
        {
            file = file.workload(pod, node, Protocol::Hbone);
        }
        file
    }

    /// Adds a workload.
    #[must_use]
    pub fn workload(mut self, pod: &Pod, node: &Node, protocol: Protocol) -> Self {
        self.workloads.push(json!({
            "uid": uid(pod),
            "name": pod.name,
            "namespace": pod.namespace,
            "serviceAccount": pod.service_account,
            "trustDomain": "cluster.local",
            "workloadIps": [pod.ip(Family::V4), pod.ip(Family::V6)],
            "protocol": match protocol { Protocol::Hbone => "HBONE", Protocol::Tcp => "TCP" },
            "node": node.name,
            "workloadName": pod.name,
            "workloadType": "pod",
            "canonicalName": pod.name,
            "canonicalRevision": "v1",
            "clusterId": "Kubernetes",
            "services": {},
        }));
        self
    }

    /// Adds the service of `VIP_V4` and `VIP_V6`, which `pod` provides on `port`.
    #[must_use]
    pub fn service(mut self, pod: &Pod, port: u16) -> Self {
        let hostname = "ledger.bank.svc.cluster.local";
        self.services.push(json!({
            "name": "ledger",
            "namespace": "bank",
            "hostname": hostname,
            "vips": [format!("/{VIP_V4}"), format!("/{VIP_V6}")],
            "ports": { VIP_PORT.to_string(): port },
        }));
        for workload in &mut self.workloads {
            if workload.get("uid").and_then(Value::as_str) == Some(uid(pod).as_str())
                && let Some(fields) = workload.as_object_mut()
            {
                let ports = BTreeMap::from([(VIP_PORT.to_string(), port)]);
                fields.insert("services".to_owned(), json!({ format!("bank/{hostname}"): ports }));
            }
        }
        self
    }

    /// Makes another pod provide the service, on `port`.
    #[must_use]
    pub fn also_by(mut self, pod: &Pod, port: u16) -> Self {
        let services = self.workloads.iter().filter_map(|workload| workload.get("services"));
        let provided = services.filter_map(Value::as_object).flat_map(serde_json::Map::keys);
        let name = provided.last().cloned().unwrap_or_default();
        let ports = BTreeMap::from([(VIP_PORT.to_string(), port)]);
        self = self.field(pod, "services", json!({ name: ports }));
        self
    }

    /// Sets a field of a pod's workload.
    #[must_use]
    pub fn field(mut self, pod: &Pod, name: &str, value: Value) -> Self {
        let of_pod = |workload: &&mut Value| workload.get("uid") == Some(&json!(uid(pod)));
        if let Some(fields) = self.workloads.iter_mut().find(of_pod).and_then(Value::as_object_mut)
        {
            fields.insert(name.to_owned(), value);
        }
        self
    }

    /// Sets a field of the service.
    #[must_use]
    pub fn service_field(mut self, name: &str, value: Value) -> Self {
        for service in self.services.iter_mut().filter_map(Value::as_object_mut) {
            service.insert(name.to_owned(), value.clone());
        }
        self
    }

    /// Adds a policy.
    #[must_use]
    pub fn policy(mut self, policy: &Policy) -> Self {
        self.policies.push(json!({
            "name": policy.name,
            "namespace": policy.namespace,
            "scope": if policy.selects { "WorkloadSelector" } else { "Namespace" },
            "action": match policy.action { Action::Allow => "Allow", Action::Deny => "Deny" },
            "rules": policy.matches.iter().map(|matched| json!([[matched]])).collect::<Vec<_>>(),
            "dryRun": policy.dry_run,
        }));
        self
    }

    /// Writes it in one step, the way a configuration map is replaced.
    pub fn write(&self, path: &Path) -> Result<()> {
        replace(path, &serde_saphyr::to_string(self)?)
    }
}

/// Replaces the file at `path` by renaming a complete one over it.
pub fn replace(path: &Path, text: &str) -> Result<()> {
    let fresh = path.with_extension("new");
    fs::write(&fresh, text).with_context(|| format!("write {}", fresh.display()))?;
    fs::rename(&fresh, path).with_context(|| format!("replace {}", path.display()))
}

fn uid(pod: &Pod) -> String {
    format!("Kubernetes//Pod/{}/{}", pod.namespace, pod.name)
}

/// What a policy does with what it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Lets it pass, and with it nothing else.
    Allow,
    /// Refuses it.
    Deny,
}

/// A policy for every workload of a namespace, or for those that name it: one rule for each match.
#[derive(Debug, Clone)]
pub struct Policy {
    name: &'static str,
    namespace: &'static str,
    action: Action,
    matches: Vec<Value>,
    dry_run: bool,
    selects: bool,
}

impl Policy {
    /// A policy that matches nothing yet.
    pub fn new(name: &'static str, namespace: &'static str, action: Action) -> Self {
        Self { name, namespace, action, matches: Vec::new(), dry_run: false, selects: false }
    }

    /// Matches peers that proved this identity.
    #[must_use]
    pub fn principal(mut self, spiffe: &str) -> Self {
        let principal = spiffe.trim_start_matches("spiffe://");
        self.matches.push(json!({ "principals": [{ "Exact": principal }] }));
        self
    }

    /// Matches peers that proved any identity.
    #[must_use]
    pub fn any_principal(mut self) -> Self {
        self.matches.push(json!({ "principals": [{ "Presence": [] }] }));
        self
    }

    /// Matches connections from this address.
    #[must_use]
    pub fn source(mut self, ip: IpAddr) -> Self {
        let cidr = format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 });
        self.matches.push(json!({ "sourceIps": [cidr] }));
        self
    }

    /// Matches connections to this port.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.matches.push(json!({ "destinationPorts": [port] }));
        self
    }

    /// Applies only to workloads whose record names it.
    #[must_use]
    pub fn for_those_that_name_it(mut self) -> Self {
        self.selects = true;
        self
    }

    /// Only logs what it would do.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.dry_run = true;
        self
    }
}
