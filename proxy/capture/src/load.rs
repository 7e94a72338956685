//! Start of a node: its programs are loaded, attached to their cgroups, and seen to work.

use std::{
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
};

use aya::{
    Ebpf,
    programs::{CgroupSockAddr, SockOps, links::FdLink},
};
use culvert_abi::Outcome;
use culvert_sys::{
    caps::{Capability, Effective},
    cgroup,
    netns::Netns,
};

use crate::{
    attach::{self, Cgroup},
    error::{CaptureError, HostError, chain},
    logs::BpfLogs,
    maps::Maps,
    node::{BpfLog, GuardHost, Loaded, Marking, NodeOptions, SharedMaps, WhenDown},
    object::{self, Loader, programs},
    pins::{self, NodePins, PodPins, VersionPins},
    probes::{self, Probes, Surroundings},
    removal,
};

/// Loads and attaches all that a node has once. Where that fails on a node that is new, nothing of it is left.
pub(crate) fn load(options: &NodeOptions, home: &Netns) -> Result<Loaded, CaptureError> {
    check_capabilities()?;
    let root = cgroup::id(&options.cgroup_root).map_err(HostError::Cgroup)?;
    let own = cgroup::id(&options.own_cgroup).map_err(HostError::Cgroup)?;
    if root == own {
        return Err(HostError::RootCgroup { path: options.own_cgroup.clone() }.into());
    }
    pins::ensure_bpffs(&options.bpffs)?;
    let pins = NodePins::lock(&options.bpffs, &options.name)?;
    let version = pins.open_version()?;
    match install(options, &version, root, own) {
        Ok(Installed { loader, maps, marking, link, probes, logs }) => Ok(Loaded {
            pins,
            version,
            loader: Arc::new(Mutex::new(loader)),
            maps: SharedMaps::new(maps),
            marking,
            link: Mutex::new(link),
            when_down: options.when_down,
            guard_host: match options.guard_host {
                GuardHost::Off => None,
                GuardHost::On => Some(home.clone()),
            },
            probes,
            logs: Mutex::new(logs),
        }),
        Err(error) => {
            if pins.is_new() {
                match removal::remove_version(&version) {
                    Ok(()) => pins.remove_empty(),
                    Err(undo) => {
                        tracing::error!(error = chain(&undo), "cannot undo a failed start");
                    }
                }
            }
            Err(error)
        }
    }
}

struct Installed {
    loader: Loader,
    maps: Maps,
    marking: Marking,
    link: Option<FdLink>,
    probes: Option<Probes>,
    logs: Option<BpfLogs>,
}

fn install(
    options: &NodeOptions,
    version: &VersionPins,
    root: u64,
    own: u64,
) -> Result<Installed, CaptureError> {
    Maps::create(version)?;
    let mut loader = Loader::new(version, options.log, options.when_down);
    let mut node = loader.load("node", object::NODE)?;
    let mut exempt = loader.load("exempt", object::EXEMPT)?;
    let mut maps = Maps::open(version)?;
    maps.set_own_cgroup(own)?;

    // First ours: were it the other way round, a connection of our own could be captured in between.
    let own = Cgroup { path: &options.own_cgroup, id: own };
    let root = Cgroup { path: &options.cgroup_root, id: root };
    let mark_own = load_sock_ops(&mut exempt, programs::MARK_OWN)?;
    attach::pinned(mark_own, programs::MARK_OWN, own, &version.link(programs::MARK_OWN))?;
    let (marking, mark) = load_marking(&mut node)?;
    // Either marking program goes by one link, so that a kernel update leaves no second one.
    let pin = version.link(programs::MARK_CONNECT);
    let link = match options.when_down {
        WhenDown::Hold | WhenDown::Refuse => {
            attach::pinned(mark, programs::MARK_CONNECT, root, &pin)?;
            None
        }
        // What is marked has nowhere else to go, so that marking must end with the process.
        WhenDown::Open => Some(attach::unpinned(mark, programs::MARK_CONNECT, root, &pin)?),
    };
    check_mark_own(&maps)?;
    let probes = attach_probes(options, version, &mut exempt)?;
    attach_reuse(&mut node, version, root)?;

    let logs = match options.log {
        BpfLog::Off => None,
        BpfLog::On => BpfLogs::of([&mut node, &mut exempt]),
    };
    Ok(Installed { loader, maps, marking, link, probes, logs })
}

/// Exempts what kubelet dials, where its cgroup is known.
fn attach_probes(
    options: &NodeOptions,
    version: &VersionPins,
    exempt: &mut Ebpf,
) -> Result<Option<Probes>, CaptureError> {
    let pods: Vec<u32> = version.pods()?.iter().map(PodPins::id).collect();
    let around = Surroundings { root: &options.cgroup_root, own: &options.own_cgroup, pods: &pods };
    let pin = version.link(programs::MARK_PROBE);
    let Some((path, id)) = probes::find(&options.probes, around) else {
        attach::remove(&pin)?;
        return Ok(None);
    };
    let program = load_sock_ops(exempt, programs::MARK_PROBE)?;
    attach::pinned(program, programs::MARK_PROBE, Cgroup { path: &path, id }, &pin)?;
    tracing::info!(cgroup = %path.display(), "probes from kubelet's cgroup are not captured");
    Ok(Some(Probes { path, pin }))
}

/// Lets pods bind ports that proxied connections hold, where the kernel can (Linux 6.1).
fn attach_reuse(
    node: &mut Ebpf,
    version: &VersionPins,
    root: Cgroup<'_>,
) -> Result<(), CaptureError> {
    for name in [programs::REUSE_BIND4, programs::REUSE_BIND6] {
        let program: &mut CgroupSockAddr = object::program(node, name)?;
        if let Err(refused) = program.load() {
            tracing::warn!(
                program = name,
                reason = chain(&refused),
                "this kernel does not let bind programs set options (Linux 6.1): an application without SO_REUSEADDR \
                 that starts again may find its port taken by connections through the proxy",
            );
            attach::remove(&version.link(name))?;
            continue;
        }
        attach::pinned(program, name, root, &version.link(name))?;
    }
    Ok(())
}

/// Whether this process may do what capture does; [`Node::start`](crate::Node::start) asks it too. Every capability that
/// is missing is named.
pub fn check_capabilities() -> Result<(), HostError> {
    let effective = Effective::read()?;
    let needed = [Capability::Bpf, Capability::NetAdmin, Capability::NetRaw, Capability::SysAdmin];
    let missing: Vec<_> =
        needed.into_iter().filter(|c| !effective.has(*c)).map(Capability::name).collect();
    if missing.is_empty() { Ok(()) } else { Err(HostError::Capabilities { missing }) }
}

/// Tries the program that knows the namespace; only where the kernel refuses it, the one that knows addresses.
fn load_marking(node: &mut Ebpf) -> Result<(Marking, &mut SockOps), CaptureError> {
    let marking = match load_sock_ops(node, programs::MARK_CONNECT) {
        Ok(_) => Marking::ByNetns,
        Err(refused) => {
            load_sock_ops(node, programs::MARK_BY_ADDR)?;
            tracing::warn!(
                reason = chain(&refused),
                "this kernel does not tell sockops programs the network namespace (Linux 5.15): pods are known by \
                 address",
            );
            Marking::ByAddress
        }
    };
    let name = match marking {
        Marking::ByNetns => programs::MARK_CONNECT,
        Marking::ByAddress => programs::MARK_BY_ADDR,
    };
    Ok((marking, object::program(node, name)?))
}

fn load_sock_ops<'a>(
    object: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut SockOps, CaptureError> {
    let program: &mut SockOps = object::program(object, name)?;
    match program.load() {
        Ok(()) => Ok(program),
        Err(source) => Err(CaptureError::Program { attempt: "load", program: name, source }),
    }
}

/// On hybrid hosts a `net_cls` or `net_prio` controller can take a socket's cgroup2 away; then nothing of ours is known as
/// ours, and each connection of the proxy would be captured again.
fn check_mark_own(maps: &Maps) -> Result<(), CaptureError> {
    let failed = |reason| CaptureError::SelfCheck { reason };
    let before = maps.outcome(Outcome::OwnTagged)?;
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| TcpStream::connect(listener.local_addr()?))
        .map_err(|e| failed(format!("a connection over loopback failed: {e}; is lo up?")))?;
    if maps.outcome(Outcome::OwnTagged)? > before {
        return Ok(());
    }
    Err(failed(
        "it does not run; a net_cls or net_prio cgroup may hide cgroup2 from sockets: mount neither".to_owned(),
    ))
}
