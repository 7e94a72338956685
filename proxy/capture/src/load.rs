//! Start of a node: its programs are loaded, attached to their cgroups, and seen to work.

use std::{
    fs::{self, File},
    io,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    path::Path,
    sync::Mutex,
};

use aya::{
    Ebpf,
    programs::{CgroupAttachMode, ProgramError, SockOps, links::FdLink},
};
use culvert_abi::Outcome;
use culvert_sys::{
    bpf::{self, LinkTarget},
    caps::{Capability, Effective},
    cgroup,
};

use crate::{
    error::{CaptureError, HostError, chain},
    logs::BpfLogs,
    maps::Maps,
    node::{BpfLog, Loaded, Marking, NodeOptions, SharedMaps},
    object::{self, Loader, programs},
    pins::{self, NodePins, VersionPins, pin_error},
    removal,
};

/// Loads and attaches all that a node has once. Where that fails on a node that is new, nothing of it is left.
pub(crate) fn load(options: &NodeOptions) -> Result<Loaded, CaptureError> {
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
        Ok((loader, maps, marking, logs)) => {
            let (loader, logs) = (Mutex::new(loader), Mutex::new(logs));
            Ok(Loaded { pins, version, loader, maps: SharedMaps::new(maps), marking, logs })
        }
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

fn install(
    options: &NodeOptions,
    version: &VersionPins,
    root: u64,
    own: u64,
) -> Result<(Loader, Maps, Marking, Option<BpfLogs>), CaptureError> {
    Maps::create(version)?;
    let mut loader = Loader::new(version, options.log);
    let mut node = loader.load("node", object::NODE)?;
    let mut exempt = loader.load("exempt", object::EXEMPT)?;
    let mut maps = Maps::open(version)?;
    maps.set_own_cgroup(own)?;

    // First ours: were it the other way round, a connection of our own could be captured in between.
    load_sock_ops(&mut exempt, programs::MARK_OWN)?;
    attach(&mut exempt, programs::MARK_OWN, version, &options.own_cgroup, own)?;
    let marking = load_marking(&mut node)?;
    let name = match marking {
        Marking::ByNetns => programs::MARK_CONNECT,
        Marking::ByAddress => programs::MARK_BY_ADDR,
    };
    attach(&mut node, name, version, &options.cgroup_root, root)?;
    check_mark_own(&maps)?;

    let logs = match options.log {
        BpfLog::Off => None,
        BpfLog::On => BpfLogs::of([&mut node, &mut exempt]),
    };
    Ok((loader, maps, marking, logs))
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
fn load_marking(node: &mut Ebpf) -> Result<Marking, CaptureError> {
    let refused = match load_sock_ops(node, programs::MARK_CONNECT) {
        Ok(()) => return Ok(Marking::ByNetns),
        Err(refused) => refused,
    };
    load_sock_ops(node, programs::MARK_BY_ADDR)?;
    tracing::warn!(
        reason = chain(&refused),
        "this kernel does not tell sockops programs the network namespace (Linux 5.15): pods are known by address",
    );
    Ok(Marking::ByAddress)
}

fn load_sock_ops(object: &mut Ebpf, name: &'static str) -> Result<(), CaptureError> {
    let program: &mut SockOps = object::program(object, name)?;
    program.load().map_err(|source| CaptureError::Program {
        attempt: "load",
        program: name,
        source,
    })
}

/// Attaches the program to the cgroup `id` at `path`: by its pinned link where that is attached there, else anew.
fn attach(
    object: &mut Ebpf,
    name: &'static str,
    version: &VersionPins,
    path: &Path,
    id: u64,
) -> Result<(), CaptureError> {
    let failed = |source| CaptureError::Program { attempt: "attach", program: name, source };
    // Either marking program goes by one link, so that a kernel update leaves no second one.
    let pin = version.link(if name == programs::MARK_OWN { name } else { programs::MARK_CONNECT });
    let program: &mut SockOps = object::program(object, name)?;
    if let Ok(link) = bpf::open_pin(&pin)
        && matches!(bpf::link_target(link.as_fd()), Ok(LinkTarget::Cgroup(found)) if found == id)
    {
        let fd = program.fd().map_err(failed)?;
        return bpf::link_update(link.as_fd(), fd.as_fd())
            .map_err(ProgramError::IOError)
            .map_err(failed);
    }
    let cgroup = File::open(path).map_err(pin_error("open cgroup", path))?;
    // A link is always one of many; any other mode is EINVAL for links.
    let id = program.attach(cgroup, CgroupAttachMode::Single).map_err(failed)?;
    let link = program.take_link(id).map_err(failed)?;
    let link =
        FdLink::try_from(link).map_err(|e| failed(ProgramError::IOError(io::Error::other(e))))?;
    let aside = pin.with_file_name(format!("{name}-new"));
    if aside.exists() {
        fs::remove_file(&aside).map_err(pin_error("remove", &aside))?;
    }
    let _pinned = link.pin(&aside).map_err(|e| pin_error("pin", &aside)(io::Error::other(e)))?;
    fs::rename(&aside, &pin).map_err(pin_error("pin", &pin))
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
