//! What the configuration means to capture and to TLS.

use culvert_capture::{BpfLog, GuardHost, NodeOptions, ProbeCgroup, WhenDown};
use culvert_sys::cgroup::{self, Hierarchy};
use culvert_tls::{KeyExchange, Profile, Revocations};

use crate::{
    config::{self, CompliancePolicy, Config},
    enroll::Marks,
};

/// The mark of the proxy's sockets where Istio's iptables rules steer.
const REDIRECT_MARK: u32 = 0x539;
/// The ports that Istio's iptables rules redirect to.
const REDIRECT_PORTS: &[u16] = &[15001, 15006];

/// What all TLS of the node has in common.
pub(super) fn tls_profile(config: &Config, revocations: Option<Revocations>) -> Profile {
    let key_exchange = match config.compliance_policy {
        None => KeyExchange::Any,
        Some(CompliancePolicy::Pqc) => KeyExchange::PostQuantum,
    };
    let profile = Profile::new(key_exchange)
        .with_trust_domain_aliases(config.trust_domain_aliases.as_slice());
    match revocations {
        Some(revocations) => profile.with_revocations(revocations),
        None => profile,
    }
}

pub(super) fn node_options(
    config: &Config,
    hierarchy: &Hierarchy,
    cgroup: &cgroup::Own,
) -> NodeOptions {
    NodeOptions {
        cgroup_root: hierarchy.root().to_owned(),
        own_cgroup: cgroup.path().to_owned(),
        when_down: match config.when_down {
            config::WhenDown::Hold => WhenDown::Hold,
            config::WhenDown::Refuse => WhenDown::Refuse,
            config::WhenDown::Open => WhenDown::Open,
        },
        probes: match &config.probe_cgroup {
            config::ProbeCgroup::Off => ProbeCgroup::Off,
            config::ProbeCgroup::Auto => ProbeCgroup::Auto,
            config::ProbeCgroup::At(path) => ProbeCgroup::At(path.clone()),
        },
        guard_host: if config.guard_host { GuardHost::On } else { GuardHost::Off },
        log: if config.bpf_log { BpfLog::On } else { BpfLog::Off },
    }
}

/// Sockets are known by their cgroup with our own steering, by their mark with Istio's.
pub(super) fn marks(steering: config::Steering) -> Marks {
    match steering {
        config::Steering::Ebpf => Marks { proxy: None, delivery: Some(culvert_abi::MARK_DELIVERY) },
        config::Steering::Redirect => {
            Marks { proxy: Some(REDIRECT_MARK), delivery: Some(REDIRECT_MARK) }
        }
    }
}

pub(super) fn proxy_ports(steering: config::Steering) -> &'static [u16] {
    match steering {
        config::Steering::Ebpf => &[],
        config::Steering::Redirect => REDIRECT_PORTS,
    }
}
