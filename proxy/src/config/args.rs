//! The command line, as written. Environment variables of ztunnel's chart keep their names.

mod controlplane;

use std::{path::PathBuf, time::Duration};

use clap::{ArgAction, Args as ClapArgs, Parser, Subcommand, ValueEnum};

use self::controlplane::{CONTROL_PLANE_HELP, ROTATE_HELP};
pub use self::controlplane::{ControlPlaneArgs, RotateRootArgs};
use crate::config::{
    control::ControlArgs,
    ztunnel::{ManifestArgs, Threads},
};

/// The dataplane of one node of an ambient mesh.
///
/// Captures the TCP connections of enrolled pods with eBPF and carries them to other mesh members over HBONE (HTTP/2
/// CONNECT inside mutual TLS). Needs root on Linux 5.10 or newer.
#[derive(Debug, Parser)]
#[command(name = "culvert", version, propagate_version = true)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the node: enrol pods, attach the BPF programs and carry their traffic
    Run(Box<RunArgs>),
    /// Hand this node's pods to proxies that are processes of their own: `culvert run --zds`, or ztunnel
    Agent(AgentArgs),
    /// Remove every trace of a node that is not running: programs, maps, rules, routes and changed settings
    Cleanup(CleanupArgs),
    /// Tell nodes what the mesh consists of and sign their certificates, from a directory of YAML
    #[command(after_long_help = CONTROL_PLANE_HELP)]
    Controlplane(Box<ControlPlaneArgs>),
    /// Take the next step of a change of the mesh's root of trust
    #[command(after_long_help = ROTATE_HELP)]
    RotateRoot(RotateRootArgs),
}

/// Where pods come from: any of these, together.
#[derive(ClapArgs, Clone, Debug)]
pub struct PodArgs {
    /// Pods to enrol: YAML `pods: [{name, namespace, serviceAccount, netns, annotations}]`, read again when it changes
    #[arg(long, env = "CULVERT_PODS", value_name = "FILE")]
    pub pods: Option<PathBuf>,
    /// Enrol this node's pods that their labels, or their namespaces', put into the mesh; the API is found as kubectl and
    /// programs in pods find it
    #[arg(long, env = "CULVERT_KUBERNETES_PODS")]
    pub kubernetes_pods: bool,
    /// Namespaces whose pods are never enrolled
    #[arg(
        long,
        env = "EXCLUDED_NAMESPACES",
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "kube-system"
    )]
    pub excluded_namespaces: Vec<String>,
    /// The node's /proc, where the networks of its pods are found
    #[arg(long, env = "CULVERT_PROC", value_name = "DIR", default_value = "/proc")]
    pub proc: PathBuf,
}

/// Arguments of `culvert agent`.
#[derive(ClapArgs, Clone, Debug)]
pub struct AgentArgs {
    /// Name of this node, as the cluster calls it
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node: String,
    /// Where pods come from
    #[command(flatten)]
    pub sources: PodArgs,
    /// Where proxies connect; the folder is made if need be
    #[arg(
        long,
        env = "CULVERT_AGENT_LISTEN",
        value_name = "SOCKET",
        default_value = "/var/run/ztunnel/ztunnel.sock"
    )]
    pub listen: PathBuf,
    /// Form of the log
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Plain)]
    pub log_format: LogFormat,
    /// Which log lines are written
    #[arg(long, env = "RUST_LOG", value_name = "FILTER", default_value = "info")]
    pub log_filter: String,
}

/// Arguments of `culvert run`.
#[derive(ClapArgs, Debug)]
pub struct RunArgs {
    /// Name of this node; nodes of different names can share a kernel
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node: String,
    /// Where pods come from
    #[command(flatten)]
    pub pods: PodArgs,
    /// Enrol what the node agent at this socket hands over, as istio-cni does
    #[arg(long, env = "INPOD_UDS", value_name = "SOCKET")]
    pub zds: Option<PathBuf>,
    /// Where the mesh and the certificates come from
    #[command(flatten)]
    pub control: ControlArgs,
    /// Network this node is in
    #[arg(long, env = "NETWORK", value_name = "NAME", default_value = "")]
    pub network: String,
    /// Cluster this node is in, told to peers and to the control plane [default: Kubernetes]
    #[arg(long, env = "ISTIO_META_CLUSTER_ID", value_name = "NAME")]
    pub cluster_id: Option<String>,
    /// The older name of the variable.
    #[arg(long, env = "CLUSTER_ID", hide = true)]
    pub cluster: Option<String>,
    /// How connections reach the proxy
    #[arg(long, env = "CULVERT_STEERING", value_enum, default_value_t = Steering::Ebpf)]
    pub steering: Steering,
    /// What happens to enrolled pods' connections while no culvert runs
    #[arg(long, env = "CULVERT_WHEN_DOWN", value_enum, default_value_t = WhenDown::Hold)]
    pub when_down: WhenDown,
    /// Whose connections to pods are probes, which are not captured: `auto` looks for kubelet's cgroup, `off` is
    /// nobody's; else a cgroup
    #[arg(
        long,
        env = "CULVERT_PROBE_CGROUP",
        value_name = "PATH|auto|off",
        default_value = "auto"
    )]
    pub probe_cgroup: ProbeCgroup,
    /// Stop, at the node's end of pods' interfaces, what a pod sends as whole frames past its own filters
    #[arg(long, env = "CULVERT_GUARD_HOST")]
    pub guard_host: bool,
    /// Capture DNS queries of pods that do not say otherwise by `ambient.istio.io/dns-capture`
    #[arg(long, env = "AMBIENT_DNS_CAPTURE", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub dns_capture: bool,
    /// Domain of the cluster's services
    #[arg(long, env = "CLUSTER_DOMAIN", value_name = "DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Namespace whose service a name means where several have it, and none is of the pod's namespace or canonical
    #[arg(long, env = "PREFERED_SERVICE_NAMESPACE", value_name = "NAME")]
    pub preferred_service_namespace: Option<String>,
    /// Tell pods the IPv6 addresses of services
    #[arg(long, env = "IPV6_ENABLED", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub ipv6: bool,
    /// Let pods' annotations take connections out of the mesh: in plaintext, and past every policy
    #[arg(long, env = "CULVERT_ALLOW_POD_BYPASS", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub allow_pod_bypass: bool,
    /// Un-enrol all pods and remove every pin at exit; for tests and demonstrations
    #[arg(long, env = "CULVERT_EPHEMERAL")]
    pub ephemeral: bool,
    /// Where the BPF file system is, or is to be mounted
    #[arg(long, env = "CULVERT_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
    /// Port of the admin endpoints, on loopback
    #[arg(long, env = "CULVERT_ADMIN_PORT", value_name = "PORT", default_value_t = 15000)]
    pub admin_port: u16,
    /// Port of the metrics endpoint
    #[arg(long, env = "CULVERT_STATS_PORT", value_name = "PORT", default_value_t = 15020)]
    pub stats_port: u16,
    /// Port of the readiness endpoint
    #[arg(long, env = "CULVERT_READINESS_PORT", value_name = "PORT", default_value_t = 15021)]
    pub readiness_port: u16,
    /// Validity of the certificates that are asked for
    #[arg(long, env = "SECRET_TTL", value_name = "DURATION", default_value = "24h", value_parser = humantime::parse_duration)]
    pub secret_ttl: Duration,
    /// Revocation lists, PEM or DER, for peers' certificates; read again when it changes
    #[arg(long, env = "CRL_PATH", value_name = "FILE")]
    pub crl: Option<PathBuf>,
    /// Trust domains whose peers are accepted like our own's; their certificates must chain to our roots
    #[arg(
        long = "trust-domain-alias",
        env = "CULVERT_TRUST_DOMAIN_ALIASES",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub trust_domain_aliases: Vec<String>,
    /// Restrict TLS: `pqc` agrees on keys by X25519MLKEM768 only, so that peers without it are not spoken to
    #[arg(long, env = "COMPLIANCE_POLICY", value_enum)]
    pub compliance_policy: Option<CompliancePolicy>,
    /// How long connections may go on once the node is asked to stop [default: 5 s less than the pod has to end, or 5s]
    #[arg(long, env = "CONNECTION_TERMINATION_DEADLINE", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub drain: Option<Duration>,
    /// Threads of the data path: a number, a percentage of the processors, or 0 for as many as those [default: a quarter
    /// of the processors, at least 2]
    #[arg(long, env = "ZTUNNEL_WORKER_THREADS", value_name = "N|P%")]
    pub threads: Option<Threads>,
    /// What else Istio's manifest says
    #[command(flatten)]
    pub manifest: ManifestArgs,
    /// Let the BPF programs log each failure; for debugging
    #[arg(long, env = "CULVERT_BPF_LOG")]
    pub bpf_log: bool,
    /// Form of the log
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value_t = LogFormat::Plain)]
    pub log_format: LogFormat,
    /// Which log lines are written: LEVEL or TARGET=LEVEL,...
    #[arg(long, env = "RUST_LOG", value_name = "FILTER", default_value = "info")]
    pub log_filter: String,
}

/// Arguments of `culvert cleanup`.
#[derive(ClapArgs, Debug)]
pub struct CleanupArgs {
    /// Name that the node ran under
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node: String,
    /// Where the BPF file system is
    #[arg(long, env = "CULVERT_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
}

/// How connections reach the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Steering {
    /// culvert's own BPF programs
    Ebpf,
    /// iptables rules in the pod that someone else made, as Istio's CNI plugin does
    Redirect,
}

/// To what TLS is restricted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompliancePolicy {
    /// Post-quantum key agreement
    Pqc,
}

/// What happens while no culvert runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenDown {
    /// New connections wait until culvert is back; none is refused, none leaves in plaintext
    Hold,
    /// New connections are refused, or time out; none leaves in plaintext
    Refuse,
    /// New connections go around culvert: in plaintext, and past every policy
    Open,
}

/// Whose connections are probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeCgroup {
    /// Nobody's.
    Off,
    /// kubelet's, where it is found.
    Auto,
    /// Those of a cgroup.
    At(PathBuf),
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Plain,
    /// One JSON object a line
    Json,
}

impl From<&str> for ProbeCgroup {
    fn from(text: &str) -> Self {
        match text {
            "off" => Self::Off,
            "auto" => Self::Auto,
            path => Self::At(path.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
