//! What the operator asked for: arguments as written ([`args`]) become a proved [`Config`].
//!
//! The only reader of environment variables. Files are read by the parts that watch them.

pub mod args;
pub mod control;
pub mod ztunnel;

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use culvert_dns::Zone;

use crate::config::{
    args::{PodArgs, RunArgs},
    control::Control,
};
pub use args::{CompliancePolicy, LogFormat, ProbeCgroup, Steering, WhenDown};

/// The configuration of a node, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Tells this node's pins from those of other culverts on the kernel.
    pub node: String,
    /// Where pods come from.
    pub pods: PodSources,
    /// Where the mesh and the certificates come from.
    pub control: Control,
    /// The network this node is in; empty is the default network.
    pub network: String,
    /// The cluster's name, for the `baggage` header.
    pub cluster_id: String,
    /// Where the kernel keeps pins.
    pub bpffs: PathBuf,
    /// How connections reach the proxy.
    pub steering: Steering,
    /// What happens to connections while no culvert runs.
    pub when_down: WhenDown,
    /// Whose connections are probes.
    pub probe_cgroup: ProbeCgroup,
    /// Stop what pods send past their own filters at the node's end.
    pub guard_host: bool,
    /// Capture DNS where a pod does not say otherwise.
    pub dns_capture: bool,
    /// What names of the mesh mean.
    pub zone: Zone,
    /// Let pods take connections out of the mesh.
    pub allow_pod_bypass: bool,
    /// Undo everything at exit.
    pub ephemeral: bool,
    /// Admin endpoints, loopback only.
    pub admin: SocketAddr,
    /// Metrics endpoint.
    pub stats: SocketAddr,
    /// Readiness endpoint.
    pub readiness: SocketAddr,
    /// Validity that certificates are asked for.
    pub secret_ttl: Duration,
    /// The file of revocation lists, if there is one.
    pub crl: Option<PathBuf>,
    /// Trust domains whose peers are accepted like our own's.
    pub trust_domain_aliases: Vec<String>,
    /// To what TLS is restricted.
    pub compliance_policy: Option<CompliancePolicy>,
    /// How long connections may go on once the node is asked to stop.
    pub drain: Duration,
    /// Threads of the data path.
    pub threads: usize,
    /// Let the BPF programs log their failures.
    pub bpf_log: bool,
    /// Form of the log.
    pub log_format: LogFormat,
    /// Which log lines are written, as `RUST_LOG` has it.
    pub log_filter: String,
}

/// How long connections may go on where nothing says so.
const DRAIN: Duration = Duration::from_secs(5);
/// Of a node whose cluster has no name.
const CLUSTER: &str = "Kubernetes";

/// Where pods come from: at least one of these, and all that are given.
#[derive(Clone, Debug)]
pub struct PodSources {
    /// The pods file.
    pub file: Option<PathBuf>,
    /// The socket of a node agent.
    pub zds: Option<PathBuf>,
    /// The cluster.
    pub kubernetes: bool,
    /// Namespaces of the cluster that are left out.
    pub excluded_namespaces: Vec<String>,
    /// The node's `/proc`.
    pub proc: PathBuf,
}

impl PodSources {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.file.is_none() && self.zds.is_none() && !self.kubernetes
    }
}

impl From<PodArgs> for PodSources {
    fn from(args: PodArgs) -> Self {
        Self {
            file: args.pods,
            zds: None,
            kubernetes: args.kubernetes_pods,
            excluded_namespaces: args.excluded_namespaces,
            proc: args.proc,
        }
    }
}

/// Why arguments were refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Mesh or certificates come from nowhere, or from two places.
    #[error(transparent)]
    Control(#[from] control::ControlError),
    /// Nothing tells which pods to enrol.
    #[error(
        "no source of pods; give --pods FILE or --kubernetes-pods, or to a proxy --zds SOCKET of an agent"
    )]
    NoPods,
    /// The node's name becomes a folder's.
    #[error(
        "--node {node:?}: must be 1 to 63 letters, digits, '-', '_' or '.', and not start with '.'"
    )]
    Node {
        /// The name as given.
        node: String,
    },
    /// A certificate must live long enough to be rotated at half of its life.
    #[error("--secret-ttl {}: must be at least 10s", humantime::format_duration(*ttl))]
    Ttl {
        /// The validity as given.
        ttl: Duration,
    },
    /// A domain becomes a part of names.
    #[error(
        "--cluster-domain {domain:?}: must be labels of letters, digits and '-' with dots between, such as cluster.local"
    )]
    Domain {
        /// The domain as given.
        domain: String,
    },
    /// Two endpoints cannot share a port.
    #[error("{a} and {b} are both {port}; give them different ports")]
    Ports {
        /// One flag.
        a: &'static str,
        /// The other.
        b: &'static str,
        /// What both say.
        port: u16,
    },
}

impl Config {
    /// Checks `args`. What can only be known by trying (files, ports, privileges) is tried later.
    pub fn new(args: RunArgs) -> Result<Self, ConfigError> {
        if !is_node_name(&args.node) {
            return Err(ConfigError::Node { node: args.node });
        }
        if args.secret_ttl < Duration::from_secs(10) {
            return Err(ConfigError::Ttl { ttl: args.secret_ttl });
        }
        distinct_ports(&args)?;
        let pods = PodSources { zds: args.zds, ..args.pods.into() };
        if pods.is_empty() {
            return Err(ConfigError::NoPods);
        }
        let cluster_id = args.cluster_id.or(args.cluster).unwrap_or_else(|| CLUSTER.to_owned());
        let control = Control::new(args.control, &args.node, &cluster_id, std::env::vars_os())?;
        Ok(Self {
            node: args.node,
            pods,
            control,
            network: args.network,
            cluster_id,
            bpffs: args.bpffs,
            steering: args.steering,
            when_down: args.when_down,
            probe_cgroup: args.probe_cgroup,
            guard_host: args.guard_host,
            dns_capture: args.dns_capture && args.manifest.answers_dns(),
            zone: Zone {
                domain: domain(&args.cluster_domain)?,
                preferred_namespace: args.preferred_service_namespace.map(Into::into),
                ipv6: args.ipv6,
            },
            allow_pod_bypass: args.allow_pod_bypass,
            ephemeral: args.ephemeral,
            admin: SocketAddr::from(([127, 0, 0, 1], args.admin_port)),
            stats: SocketAddr::from(([0_u16; 8], args.stats_port)),
            readiness: SocketAddr::from(([0_u16; 8], args.readiness_port)),
            secret_ttl: args.secret_ttl,
            crl: args.crl,
            trust_domain_aliases: args.trust_domain_aliases,
            compliance_policy: args.compliance_policy,
            drain: args.drain.or_else(|| args.manifest.drain()).unwrap_or(DRAIN),
            threads: args.manifest.threads(args.threads, processors()),
            bpf_log: args.bpf_log,
            log_format: args.log_format,
            log_filter: args.log_filter,
        })
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether `name` can be a node's: it becomes a folder on bpffs and part of a cgroup's name.
pub fn is_node_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=63).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.')
}

/// A domain in the form in which names are compared.
fn domain(text: &str) -> Result<Arc<str>, ConfigError> {
    let name = text.trim_end_matches('.').to_ascii_lowercase();
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let is_label = |label: &str| (1..=63).contains(&label.len()) && label.chars().all(plain);
    // Room for `a.b.svc.` in front of it.
    if name.len() <= 100 && name.split('.').all(is_label) {
        Ok(name.into())
    } else {
        Err(ConfigError::Domain { domain: text.to_owned() })
    }
}

fn distinct_ports(args: &RunArgs) -> Result<(), ConfigError> {
    let ports = [
        ("--admin-port", args.admin_port),
        ("--stats-port", args.stats_port),
        ("--readiness-port", args.readiness_port),
    ];
    for (i, (a, port)) in ports.iter().enumerate() {
        for (b, other) in ports.iter().skip(i + 1) {
            if port == other && *port != 0 {
                return Err(ConfigError::Ports { a, b, port: *port });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::config::args::{Args, Command};

    fn parse(extra: &[&str]) -> Result<Config, ConfigError> {
        let fixed = ["culvert", "run", "--pods", "p", "--mesh", "m", "--ca-dir", "c"];
        match Args::parse_from(fixed.iter().chain(extra)).command {
            Command::Run(args) => Config::new(*args),
            _ => unreachable!("the arguments say `run`"),
        }
    }

    #[track_caller]
    fn refused(extra: &[&str], want: &str) {
        let error = parse(extra).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }

    #[test]
    fn impossible_values_are_refused_with_the_flag() {
        refused(&["--node", "../x"], "--node");
        refused(&["--node", ""], "--node");
        refused(&["--node", "a", "--cluster-domain", "a b"], "--cluster-domain");
        refused(&["--node", "a", "--cluster-domain", ""], "--cluster-domain");
        refused(&["--node", "a", "--secret-ttl", "1s"], "--secret-ttl");
        refused(&["--node", "a", "--admin-port", "1", "--stats-port", "1"], "--stats-port");
    }

    #[test]
    fn what_a_manifest_says_yields_to_our_own_flags() {
        let manifest =
            ["--node", "a", "--grace-period", "30", "--dns-capture-of-manifest", "false"];
        let config = parse(&manifest).unwrap();
        assert_eq!((config.drain, config.dns_capture), (Duration::from_secs(25), false));
        let config =
            parse(&[&manifest[..], &["--drain", "7s", "--threads", "3"]].concat()).unwrap();
        assert_eq!((config.drain, config.threads), (Duration::from_secs(7), 3));
    }

    #[test]
    fn defaults_are_those_of_ztunnel() {
        let config = parse(&["--node", "n1"]).unwrap();
        assert_eq!(
            (config.admin.port(), config.stats.port(), config.readiness.port()),
            (15000, 15020, 15021)
        );
        assert!(config.admin.ip().is_loopback());
        assert_eq!(config.cluster_id, "Kubernetes");
        assert!(config.dns_capture);
        assert_eq!(config.zone, Zone::default());
        assert_eq!(config.secret_ttl, Duration::from_hours(24));
    }
}
