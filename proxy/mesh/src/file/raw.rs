//! The mesh file as it is written: each field's syntax is right, references are not yet looked at.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use serde::Deserialize;
use serde_saphyr::Spanned;

use super::text::{
    CidrVip, Entries, Hostname, Name, Nothing, Port, TargetPort, Text, TrustDomain, Word,
};
use crate::{
    Identity,
    policy::{self, Action},
    service::{HealthPolicy, IpFamilies, Mode, Scope, Visibility},
    workload::{
        Destination, HBONE_PORT, Health, NetworkAddress, NetworkMode, Protocol, ServiceName,
        TunnelProtocol, WorkloadType,
    },
};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mesh {
    #[serde(default)]
    pub(super) workloads: Vec<Workload>,
    #[serde(default)]
    pub(super) services: Vec<Service>,
    #[serde(default)]
    pub(super) policies: Vec<Policy>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Workload {
    pub(super) uid: Spanned<Text<Word>>,
    pub(super) name: Text<Word>,
    pub(super) namespace: Text<Name>,
    #[serde(default = "default_service_account")]
    pub(super) service_account: Text<Name>,
    #[serde(default = "default_trust_domain")]
    pub(super) trust_domain: Text<TrustDomain>,
    #[serde(default, rename = "workloadIps")]
    pub(super) ips: Vec<Spanned<Text<IpAddr>>>,
    #[serde(default)]
    pub(super) protocol: Protocol,
    #[serde(default)]
    pub(super) network: Arc<str>,
    #[serde(default)]
    pub(super) network_mode: NetworkMode,
    #[serde(default)]
    pub(super) node: Arc<str>,
    #[serde(default)]
    pub(super) hostname: Option<Text<Hostname>>,
    #[serde(default)]
    pub(super) waypoint: Option<Gateway>,
    #[serde(default)]
    pub(super) network_gateway: Option<Gateway>,
    #[serde(default, rename = "workloadName")]
    pub(super) owner_name: Arc<str>,
    #[serde(default, rename = "workloadType")]
    pub(super) owner_type: WorkloadType,
    #[serde(default)]
    pub(super) canonical_name: Arc<str>,
    #[serde(default)]
    pub(super) canonical_revision: Arc<str>,
    #[serde(default)]
    pub(super) native_tunnel: bool,
    #[serde(default)]
    pub(super) application_tunnel: Option<ApplicationTunnel>,
    #[serde(default)]
    pub(super) authorization_policies: Vec<Spanned<Arc<str>>>,
    #[serde(default)]
    pub(super) status: Health,
    #[serde(default = "default_cluster")]
    pub(super) cluster_id: Arc<str>,
    #[serde(default)]
    pub(super) locality: Locality,
    #[serde(default = "default_capacity")]
    pub(super) capacity: Text<u32>,
    #[serde(default)]
    pub(super) services: Entries<Spanned<Text<ServiceName>>, PortMap>,
}

/// An endpoint's service ports and target ports.
pub(super) type PortMap = Entries<Text<Port>, Text<Port>>;

fn default_service_account() -> Text<Name> {
    Text(Name("default".into()))
}

fn default_trust_domain() -> Text<TrustDomain> {
    Text(TrustDomain("cluster.local".into()))
}

fn default_cluster() -> Arc<str> {
    "Kubernetes".into()
}

fn default_capacity() -> Text<u32> {
    Text(1)
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Gateway {
    pub(super) destination: Spanned<Text<Destination>>,
    #[serde(default = "default_gateway_port")]
    pub(super) hbone_mtls_port: Text<Port>,
}

fn default_gateway_port() -> Text<Port> {
    Text(Port(HBONE_PORT))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ApplicationTunnel {
    #[serde(default)]
    pub(super) protocol: TunnelProtocol,
    #[serde(default)]
    pub(super) port: Option<Spanned<Text<Port>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Locality {
    #[serde(default)]
    pub(super) region: Arc<str>,
    #[serde(default)]
    pub(super) zone: Arc<str>,
    #[serde(default)]
    pub(super) subzone: Arc<str>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Service {
    pub(super) name: Text<Word>,
    pub(super) namespace: Text<Name>,
    pub(super) hostname: Spanned<Text<Hostname>>,
    #[serde(default)]
    pub(super) vips: Vec<Text<NetworkAddress>>,
    #[serde(default)]
    pub(super) cidr_vips: Vec<CidrVip>,
    #[serde(default)]
    pub(super) ports: Entries<Text<Port>, Text<TargetPort>>,
    #[serde(default)]
    pub(super) endpoints: Entries<Arc<str>, Endpoint>,
    #[serde(default)]
    pub(super) subject_alt_names: Vec<Text<Identity>>,
    #[serde(default)]
    pub(super) waypoint: Option<Gateway>,
    #[serde(default)]
    pub(super) weighted_waypoints: Vec<WeightedWaypoint>,
    #[serde(default)]
    pub(super) load_balancer: Option<LoadBalancer>,
    #[serde(default)]
    pub(super) ip_families: Option<IpFamilies>,
    #[serde(default)]
    pub(super) canonical: bool,
    #[serde(default)]
    pub(super) visibility: Visibility,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Endpoint {
    pub(super) workload_uid: Spanned<Text<Word>>,
    #[serde(default)]
    pub(super) port: PortMap,
    #[serde(default)]
    pub(super) status: Health,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct WeightedWaypoint {
    pub(super) destination: Gateway,
    pub(super) weight: Text<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct LoadBalancer {
    #[serde(default)]
    pub(super) routing_preferences: Vec<Scope>,
    #[serde(default)]
    pub(super) mode: Mode,
    #[serde(default)]
    pub(super) health_policy: HealthPolicy,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Policy {
    pub(super) name: Spanned<Text<Word>>,
    pub(super) namespace: Text<Name>,
    pub(super) scope: policy::Scope,
    pub(super) action: Action,
    #[serde(default)]
    pub(super) rules: Vec<Vec<Vec<Match>>>,
    #[serde(default)]
    pub(super) dry_run: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Match {
    pub(super) namespaces: Vec<TextMatch>,
    pub(super) not_namespaces: Vec<TextMatch>,
    pub(super) principals: Vec<TextMatch>,
    pub(super) not_principals: Vec<TextMatch>,
    pub(super) service_accounts: Vec<ServiceAccount>,
    pub(super) not_service_accounts: Vec<ServiceAccount>,
    pub(super) source_ips: Vec<Text<IpNet>>,
    pub(super) not_source_ips: Vec<Text<IpNet>>,
    pub(super) destination_ips: Vec<Text<IpNet>>,
    pub(super) not_destination_ips: Vec<Text<IpNet>>,
    pub(super) destination_ports: Vec<Text<Port>>,
    pub(super) not_destination_ports: Vec<Text<Port>>,
}

#[derive(Debug, Deserialize)]
pub(super) enum TextMatch {
    Exact(Text<Word>),
    Prefix(Text<Word>),
    Suffix(Text<Word>),
    Presence(Nothing),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ServiceAccount {
    pub(super) namespace: Text<Name>,
    pub(super) service_account: Text<Name>,
}
