//! Arguments of the control plane.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Args as ClapArgs;

use super::LogFormat;

/// Shown after `culvert controlplane --help`.
pub(super) const CONTROL_PLANE_HELP: &str = "\
The directory holds Kubernetes and Istio objects as YAML or JSON, in as many files and documents as you like: Pod, \
Service, EndpointSlice, Namespace, Node, ServiceEntry, WorkloadEntry, Gateway (class istio-waypoint), \
AuthorizationPolicy and PeerAuthentication; and documents with workloads, services and policies in ztunnel's local \
format. It is read again whenever it changes, and nodes are told the difference. A mistake is logged and changes nothing \
else; at the start, one in a policy is an error.

With --kubernetes the same objects are watched in a cluster instead, found as kubectl and programs in pods find it. \
Nothing is served before every kind has been listed once; Istio's kinds and Gateway may be unknown to the cluster. The \
service account must be allowed to get, list and watch them all. At the start, a mistake in a policy closes the policy's \
namespace, and one in a policy of the root namespace is an error.

A first try:

  mkdir -m 700 ca && umask 077
  echo 'node-1: a-token-of-16-characters-or-more' > tokens.yaml
  culvert controlplane --config mesh/ --ca-dir ca --node-tokens tokens.yaml --name 192.0.2.1

A node then finds it at https://192.0.2.1:15012 with ca/ca.pem as the root, and shows its token as `authorization: \
Bearer`. It gets certificates for the service accounts of pods whose spec.nodeName is its own, and for no others.";

/// Shown after `culvert rotate-root --help`.
pub(super) const ROTATE_HELP: &str = "\
Run it three times, each at least a certificate's life (24 h) after the last:
  1. a new root is made and told to all nodes, while the old one goes on signing;
  2. the new root signs, while the old one is still trusted;
  3. the old root is dropped.
A control plane that runs takes each step over by itself, and nodes notice none of them.";

/// Arguments of `culvert controlplane`.
#[derive(ClapArgs, Debug)]
pub struct ControlPlaneArgs {
    /// Directory (or one file) of objects that describe the mesh, read again when it changes
    #[arg(
        long,
        env = "CULVERT_CONFIG",
        value_name = "DIR",
        required_unless_present = "kubernetes",
        conflicts_with = "kubernetes"
    )]
    pub config: Option<PathBuf>,
    /// Watch the objects in a Kubernetes cluster, instead of --config
    #[arg(long, env = "CULVERT_KUBERNETES")]
    pub kubernetes: bool,
    /// Directory of the certificate authority: ca.pem and ca-key.pem, made if there are none, and the record of certificates
    #[arg(long, env = "CULVERT_CA_DIR", value_name = "DIR")]
    pub ca_dir: PathBuf,
    /// Where nodes connect to
    #[arg(long, env = "CULVERT_LISTEN", value_name = "ADDR", default_value = "[::]:15012")]
    pub listen: SocketAddr,
    /// Another host name or IP address that nodes call it by; goes into its certificate
    #[arg(long = "name", env = "CULVERT_NAMES", value_name = "NAME", value_delimiter = ',')]
    pub names: Vec<String>,
    /// Tokens of nodes without Kubernetes: YAML `{node: token}`, accessible to its owner only
    #[arg(long, env = "CULVERT_NODE_TOKENS", value_name = "FILE")]
    pub node_tokens: Option<PathBuf>,
    /// Roots of client certificates that name a node as kubelet's do, with the common name system:node:NAME
    #[arg(long, env = "CULVERT_NODE_ROOTS", value_name = "FILE")]
    pub node_roots: Option<PathBuf>,
    /// Keys of the issuer of service accounts' tokens: a JSON Web Key Set, or one public key as PEM
    #[arg(long, env = "CULVERT_TOKEN_KEYS", value_name = "FILE")]
    pub token_keys: Option<PathBuf>,
    /// Who must have issued service accounts' tokens [default: whoever has the key]
    #[arg(long, env = "TOKEN_ISSUER", value_name = "URL", requires = "token_keys")]
    pub token_issuer: Option<String>,
    /// Whom service accounts' tokens must be meant for
    #[arg(long, env = "TOKEN_AUDIENCE", value_name = "NAME", default_value = "istio-ca")]
    pub token_audience: String,
    /// Service accounts, as namespace/name, whose pods act for their node
    #[arg(
        long,
        env = "CA_TRUSTED_NODE_ACCOUNTS",
        value_name = "ACCOUNT",
        value_delimiter = ',',
        default_value = "istio-system/ztunnel,culvert-system/culvert"
    )]
    pub node_accounts: Vec<String>,
    /// Trust domain of the mesh
    #[arg(long, env = "TRUST_DOMAIN", value_name = "NAME", default_value = "cluster.local")]
    pub trust_domain: String,
    /// Cluster that the objects are of
    #[arg(long, env = "CLUSTER_ID", value_name = "NAME", default_value = "Kubernetes")]
    pub cluster_id: String,
    /// Suffix of services' host names
    #[arg(long, env = "DOMAIN_SUFFIX", value_name = "NAME", default_value = "cluster.local")]
    pub domain: String,
    /// Network that pods and services are in
    #[arg(long, env = "NETWORK", value_name = "NAME", default_value = "")]
    pub network: String,
    /// Namespace whose policies are for the whole mesh
    #[arg(long, env = "ROOT_NAMESPACE", value_name = "NAME", default_value = "istio-system")]
    pub root_namespace: String,
    /// Longest validity of a certificate
    #[arg(long, env = "MAX_WORKLOAD_CERT_TTL", value_name = "DURATION", default_value = "24h", value_parser = humantime::parse_duration)]
    pub max_ttl: Duration,
    /// Port of the endpoints /metrics and /ready
    #[arg(long, env = "CULVERT_STATS_PORT", value_name = "PORT", default_value_t = 15014)]
    pub stats_port: u16,
    /// How long streams may go on once it is asked to stop
    #[arg(long, env = "CULVERT_DRAIN", value_name = "DURATION", default_value = "5s", value_parser = humantime::parse_duration)]
    pub drain: Duration,
    /// Form of the log
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Plain)]
    pub log_format: LogFormat,
    /// Which log lines are written: LEVEL or TARGET=LEVEL,...
    #[arg(long, env = "RUST_LOG", value_name = "FILTER", default_value = "info")]
    pub log_filter: String,
}

/// Arguments of `culvert rotate-root`.
#[derive(ClapArgs, Debug)]
pub struct RotateRootArgs {
    /// Directory of the certificate authority
    #[arg(long, env = "CULVERT_CA_DIR", value_name = "DIR")]
    pub ca_dir: PathBuf,
    /// Trust domain of the mesh, for the new root's name
    #[arg(long, env = "TRUST_DOMAIN", value_name = "NAME", default_value = "cluster.local")]
    pub trust_domain: String,
    /// How long ago the last step must be: the longest validity of a certificate
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = humantime::parse_duration)]
    pub wait: Duration,
}
