//! Start of a node: its programs are loaded, attached to their cgroups, and seen to work.

use std::{
    fmt,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::AsFd as _,
    sync::{Arc, Mutex},
};

use aya::{
    Ebpf,
    programs::{CgroupSockAddr, SockOps, links::FdLink},
};
use culvert_abi::Outcome;
use culvert_sys::{
    bpf::{self, LinkTarget},
    caps::{Capability, Effective},
    cgroup,
    netns::Netns,
};

use crate::{
    attach::{self, Cgroup},
    error::{CaptureError, HostError, Remedy, chain},
    logs::BpfLogs,
    maps::Maps,
    node::{BpfLog, GuardHost, Loaded, NodeOptions, SharedMaps, WhenDown},
    object::{self, Loader, programs},
    pins::{PodPins, VersionPins},
    probes::{self, Probes, Surroundings},
    removal,
    rewriters::Rewriters,
    seat::{Elder, Seat},
};

/// Loads and attaches all that a node has once. Where that fails on a node that is new, nothing of it is left.
pub(crate) fn load(
    options: &NodeOptions,
    seat: Seat,
    home: &Netns,
) -> Result<Loaded, CaptureError> {
    let (own, version) = match prepare(options, &seat) {
        Ok(prepared) => prepared,
        Err(error) => {
            seat.leave();
            return Err(error);
        }
    };
    match install(options, &version, &seat, own) {
        Ok(Installed { loader, maps, programs, attached, logs }) => Ok(Loaded {
            seat,
            version,
            loader: Arc::new(Mutex::new(loader)),
            maps: SharedMaps::new(maps),
            programs: Mutex::new(programs),
            attached: Mutex::new(attached),
            options: options.clone(),
            rewriters: Rewriters::new(&options.cgroup_root),
            guarded_home: match options.guard_host {
                GuardHost::Off => None,
                GuardHost::On => Some(home.clone()),
            },
            logs: Mutex::new(logs),
        }),
        Err(error) => {
            if seat.pins.is_new() && seat.pins.hold_alone() {
                match removal::remove_version(&version) {
                    Ok(()) => seat.pins.remove_empty(),
                    Err(undo) => {
                        tracing::error!(error = chain(&undo), "cannot undo a failed start");
                    }
                }
            }
            Err(error)
        }
    }
}

/// The id of the own cgroup, and the folder of pins.
fn prepare(options: &NodeOptions, seat: &Seat) -> Result<(u64, VersionPins), CaptureError> {
    check_capabilities()?;
    let root = cgroup::id(&options.cgroup_root).map_err(HostError::Cgroup)?;
    let own = cgroup::id(&options.own_cgroup).map_err(HostError::Cgroup)?;
    if root == own {
        return Err(HostError::RootCgroup { path: options.own_cgroup.clone() }.into());
    }
    let remedy = match seat.elder() {
        Some(Elder { pid, .. }) => Remedy::Stop { pid },
        None => Remedy::Cleanup,
    };
    Ok((own, seat.pins.open_version(remedy)?))
}

const NOTING: [&str; 2] = [programs::NOTE_NETNS4, programs::NOTE_NETNS6];

struct Installed {
    loader: Loader,
    maps: Maps,
    programs: NodePrograms,
    attached: Attached,
    logs: Option<BpfLogs>,
}

fn install(
    options: &NodeOptions,
    version: &VersionPins,
    seat: &Seat,
    own: u64,
) -> Result<Installed, CaptureError> {
    Maps::create(version)?;
    let mut loader = Loader::new(version, options.log, options.when_down);
    let mut programs = NodePrograms::load(&mut loader)?;
    let mut maps = Maps::open(version)?;
    maps.add_own_cgroup(own)?;
    sweep_own(version, seat.elder(), seat.number(), &mut maps, own)?;
    let attached = programs.attach(options, version, seat.number())?;
    check_mark_own(&maps)?;
    let logs = match options.log {
        BpfLog::Off => None,
        BpfLog::On => BpfLogs::of([&mut programs.node, &mut programs.exempt]),
    };
    Ok(Installed { loader, maps, programs, attached, logs })
}

/// Takes away what belonged to the cgroups of processes that are gone: all but the one in `seat`, and the elder.
pub(crate) fn sweep_own(
    version: &VersionPins,
    elder: Option<Elder>,
    seat: u8,
    maps: &mut Maps,
    own: u64,
) -> Result<(), CaptureError> {
    let mut living = vec![own];
    for pin in version.links()? {
        let name = pin.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(programs::MARK_OWN) || *name == *mark_own_pin(seat) {
            continue;
        }
        let is_elders = elder.is_some_and(|elder| *name == *mark_own_pin(elder.seat));
        match bpf::open_pin(&pin).and_then(|link| bpf::link_target(link.as_fd())) {
            Ok(LinkTarget::Cgroup(id)) if is_elders && id != 0 => living.push(id),
            _ => attach::remove(&pin)?,
        }
    }
    maps.keep_own_cgroups(&living)
}

/// The pin of `mark_own` at the cgroup of the process in a seat.
fn mark_own_pin(seat: u8) -> String {
    format!("{}-{seat}", programs::MARK_OWN)
}

/// How the marking program knows whose socket it is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marking {
    /// It asks the kernel for the network namespace.
    Asks,
    /// Before Linux 5.15: programs that run first note it at the socket.
    Noted,
}

/// The node's programs: loaded once, attached whenever this process comes to lead the node.
pub(crate) struct NodePrograms {
    node: Ebpf,
    exempt: Ebpf,
    marking: Marking,
    /// What this kernel takes of `reuse_bind`.
    reuse: Vec<&'static str>,
}

impl fmt::Debug for NodePrograms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePrograms").finish_non_exhaustive()
    }
}

/// What is attached in a way that must be remembered.
#[derive(Debug, Default)]
pub(crate) struct Attached {
    /// What marks, where that must end with the process.
    pub(crate) marking: Option<FdLink>,
    pub(crate) probes: Option<Probes>,
}

impl NodePrograms {
    fn load(loader: &mut Loader) -> Result<Self, CaptureError> {
        let mut node = loader.load("node", object::NODE)?;
        let mut exempt = loader.load("exempt", object::EXEMPT)?;
        load_sock_ops(&mut exempt, programs::MARK_OWN)?;
        load_sock_ops(&mut exempt, programs::MARK_PROBE)?;
        let marking = load_marking(&mut node)?;
        let mut reuse = Vec::new();
        for name in [programs::REUSE_BIND4, programs::REUSE_BIND6] {
            let program: &mut CgroupSockAddr = object::program(&mut node, name)?;
            match program.load() {
                Ok(()) => reuse.push(name),
                Err(refused) => tracing::warn!(
                    program = name,
                    reason = chain(&refused),
                    "this kernel does not let bind programs set options (Linux 6.1): an application without \
                     SO_REUSEADDR that starts again may find its port taken by connections through the proxy",
                ),
            }
        }
        Ok(Self { node, exempt, marking, reuse })
    }

    /// Attaches all of them, in place of another process's where it has any. What `mark_own` another has stays.
    pub(crate) fn attach(
        &mut self,
        options: &NodeOptions,
        version: &VersionPins,
        seat: u8,
    ) -> Result<Attached, CaptureError> {
        let id = |path| cgroup::id(path).map_err(HostError::Cgroup);
        let own = Cgroup { path: &options.own_cgroup, id: id(&options.own_cgroup)? };
        let root = Cgroup { path: &options.cgroup_root, id: id(&options.cgroup_root)? };
        // First ours: were it the other way round, a connection of our own could be captured in between.
        let mark_own: &mut SockOps = object::program(&mut self.exempt, programs::MARK_OWN)?;
        attach::pinned(mark_own, programs::MARK_OWN, own, &version.link(&mark_own_pin(seat)))?;
        for name in NOTING {
            let wanted = self.marking == Marking::Noted;
            self.attach_address_hook(name, wanted, root, version)?;
        }
        let name = match self.marking {
            Marking::Asks => programs::MARK_CONNECT,
            Marking::Noted => programs::MARK_NOTED,
        };
        let mark: &mut SockOps = object::program(&mut self.node, name)?;
        // Either marking program goes by one link, so that a kernel update leaves no second one.
        let pin = version.link(programs::MARK_CONNECT);
        let marking = match options.when_down {
            WhenDown::Hold | WhenDown::Refuse => {
                attach::pinned(mark, programs::MARK_CONNECT, root, &pin)?;
                None
            }
            // What is marked has nowhere else to go, so that marking must end with the process.
            WhenDown::Open => Some(attach::unpinned(mark, programs::MARK_CONNECT, root, &pin)?),
        };
        let probes = self.attach_probes(options, version)?;
        for name in [programs::REUSE_BIND4, programs::REUSE_BIND6] {
            self.attach_address_hook(name, self.reuse.contains(&name), root, version)?;
        }
        Ok(Attached { marking, probes })
    }

    /// Attaches the program, or takes away what a process before has attached where it is not `wanted`.
    fn attach_address_hook(
        &mut self,
        name: &'static str,
        wanted: bool,
        root: Cgroup<'_>,
        version: &VersionPins,
    ) -> Result<(), CaptureError> {
        let pin = version.link(name);
        if !wanted {
            return attach::remove(&pin);
        }
        let program: &mut CgroupSockAddr = object::program(&mut self.node, name)?;
        attach::pinned(program, name, root, &pin)
    }

    /// Exempts what kubelet dials, where its cgroup is known.
    fn attach_probes(
        &mut self,
        options: &NodeOptions,
        version: &VersionPins,
    ) -> Result<Option<Probes>, CaptureError> {
        let pods: Vec<u32> = version.pods()?.iter().map(PodPins::id).collect();
        let around =
            Surroundings { root: &options.cgroup_root, own: &options.own_cgroup, pods: &pods };
        let pin = version.link(programs::MARK_PROBE);
        let Some((path, id)) = probes::find(&options.probes, around) else {
            attach::remove(&pin)?;
            return Ok(None);
        };
        let program: &mut SockOps = object::program(&mut self.exempt, programs::MARK_PROBE)?;
        attach::pinned(program, programs::MARK_PROBE, Cgroup { path: &path, id }, &pin)?;
        tracing::info!(cgroup = %path.display(), "probes from kubelet's cgroup are not captured");
        Ok(Some(Probes { path, pin }))
    }
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

/// Tries the program that asks for the namespace; only where the kernel refuses it, those that note it first.
fn load_marking(node: &mut Ebpf) -> Result<Marking, CaptureError> {
    let Err(refused) = load_sock_ops(node, programs::MARK_CONNECT) else {
        return Ok(Marking::Asks);
    };
    load_sock_ops(node, programs::MARK_NOTED)?;
    for name in NOTING {
        let program: &mut CgroupSockAddr = object::program(node, name)?;
        program.load().map_err(|source| CaptureError::Program {
            attempt: "load",
            program: name,
            source,
        })?;
    }
    tracing::info!(
        reason = chain(&refused),
        "this kernel does not tell sockops programs the network namespace (Linux 5.15): it is noted at each connect()",
    );
    Ok(Marking::Noted)
}

fn load_sock_ops(object: &mut Ebpf, name: &'static str) -> Result<(), CaptureError> {
    let program: &mut SockOps = object::program(object, name)?;
    program.load().map_err(|source| CaptureError::Program {
        attempt: "load",
        program: name,
        source,
    })
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
        "mark_own does not run for them; a net_cls or net_prio cgroup may hide cgroup2 from sockets: mount neither".to_owned(),
    ))
}
