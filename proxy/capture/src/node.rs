//! The node: what is loaded and attached once, and the pods that are enrolled in it.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use culvert_abi::Outcome;
use culvert_sys::{cgroup, netns::Netns};

use crate::{
    counts::Counts,
    enrolment,
    error::{CaptureError, HostError},
    load::{Attached, NodePrograms, load, sweep_own},
    logs::BpfLogs,
    maps::Maps,
    object::Loader,
    pins::{PodPins, VersionPins},
    pod::{Pod, PodCapture},
    probes::ProbeCgroup,
    removal,
    rewriters::Rewriters,
    seat::Seat,
    settings::Settings,
};

/// How connections reach the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Steering {
    /// By our programs.
    Ebpf,
    /// By iptables rules that someone else has installed, to Istio's ports; nothing is loaded.
    Redirect,
}

/// Whether the programs log what they do, connection by connection. For a debugging session, not for production.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpfLog {
    /// They are silent.
    Off,
    /// They log; [`Node::take_logs`] gives the records.
    On,
}

/// Whether frames that a pod sends past its own filters are stopped at the node's end of its interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardHost {
    /// Nothing is attached in the node's namespace.
    Off,
    /// They are.
    On,
}

/// What becomes of new connections of pods and to them while no process holds the node. Those of before are reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenDown {
    /// They wait for the next process.
    Hold,
    /// They are refused at once; those that a pod makes by IPv4 time out, for the kernel refuses in nobody else's name.
    Refuse,
    /// They go around the proxy: in plaintext, and past every policy. Those to port 15008 are refused.
    Open,
}

/// What a node needs to start.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Root of cgroup2 as this process sees it: the pods' cgroups must be beneath it.
    pub cgroup_root: PathBuf,
    /// This process's own cgroup, which holds nothing else.
    pub own_cgroup: PathBuf,
    /// What becomes of connections while no process holds the node.
    pub when_down: WhenDown,
    /// Whose connections to pods are probes, which are not captured.
    pub probes: ProbeCgroup,
    /// Whether the node's end of pods' interfaces is guarded.
    pub guard_host: GuardHost,
    /// Whether the programs log.
    pub log: BpfLog,
}

/// A node that captures.
#[derive(Debug)]
pub struct Node {
    home: Netns,
    engine: Engine,
    counts: Arc<Counts>,
}

#[derive(Debug)]
enum Engine {
    Redirect,
    Ebpf(Box<Loaded>),
}

/// What [`Steering::Ebpf`] holds for the life of the process.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) seat: Seat,
    pub(crate) version: VersionPins,
    pub(crate) loader: Arc<Mutex<Loader>>,
    pub(crate) maps: SharedMaps,
    pub(crate) programs: Mutex<NodePrograms>,
    pub(crate) attached: Mutex<Attached>,
    pub(crate) options: NodeOptions,
    /// Where the node's ends of the pods' interfaces are, if they are to be guarded.
    pub(crate) guarded_home: Option<Netns>,
    pub(crate) rewriters: Rewriters,
    pub(crate) logs: Mutex<Option<BpfLogs>>,
}

/// The maps, for the node and the watch of each pod.
#[derive(Clone, Debug)]
pub(crate) struct SharedMaps(Arc<Mutex<Maps>>);

impl SharedMaps {
    pub(crate) fn new(maps: Maps) -> Self {
        Self(Arc::new(Mutex::new(maps)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Maps> {
        // Each operation is one system call: there is no half-made state for a panic to leave.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Loaded {
    pub(crate) fn attached(&self) -> MutexGuard<'_, Attached> {
        // Each field is replaced whole: there is no half-made state for a panic to leave.
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// Loads and attaches the node's programs, in place of another process's where it has any; without a seat, loads nothing:
    /// connections reach the proxy by iptables rules that someone else has installed, to Istio's ports. Blocks.
    ///
    /// An elder must have yielded the node, with [`PodCapture::release`] for each of its pods. The seat is held until this value is
    /// dropped; what is attached stays then.
    pub fn start(options: &NodeOptions, seat: Option<Seat>) -> Result<Self, CaptureError> {
        let home = Netns::current().map_err(HostError::from)?;
        let engine = match seat {
            None => Engine::Redirect,
            Some(seat) => Engine::Ebpf(Box::new(load(options, seat, &home)?)),
        };
        Ok(Self { home, engine, counts: Arc::default() })
    }

    /// Whether no process before has left anything under this node name, so that what fails may be taken back whole.
    pub fn is_new(&self) -> bool {
        match &self.engine {
            Engine::Redirect => true,
            Engine::Ebpf(loaded) => loaded.seat.pins.is_new(),
        }
    }

    /// Captures the pod in `netns` as its settings say, or adopts it where a process before has enrolled it. Blocks; call it on a blocking
    /// thread of a tokio runtime with I/O and time enabled (it panics outside of one).
    ///
    /// On failure nothing of a pod that was not enrolled before is left; one that was stays as it was, held.
    pub fn enroll(&self, netns: &Netns, settings: &Settings) -> Result<Pod, CaptureError> {
        let host = Netns::open(Path::new("/proc/1/ns/net")).ok();
        if netns.is(&self.home) || host.is_some_and(|host| host.is(netns)) {
            return Err(CaptureError::HostNetns { inode: netns.inode() });
        }
        match &self.engine {
            Engine::Redirect => enrolment::redirect(netns, settings, &self.counts),
            Engine::Ebpf(loaded) => enrolment::enroll(loaded, netns, settings, &self.counts),
        }
    }

    /// Lets no new connection of the pod, or to it, be captured; the captured ones go on. What a drain begins with, before
    /// [`Self::unenroll`]. Blocks.
    pub fn withdraw(&self, pod: &Pod) -> Result<(), CaptureError> {
        let Engine::Ebpf(loaded) = &self.engine else { return Ok(()) };
        pod.leave();
        removal::withdraw(Some(&loaded.maps), &loaded.version.pod(pod.id()), Some(pod.netns()))
    }

    /// Ends the capture of a pod and restores its namespace. Blocks.
    pub fn unenroll(&self, pod: Pod) -> Result<(), CaptureError> {
        let Engine::Ebpf(loaded) = &self.engine else { return Ok(()) };
        pod.leave();
        let pins = loaded.version.pod(pod.id());
        removal::remove(Some(&loaded.maps), &pins, Some(pod.netns()))?;
        // Until now the listeners stayed open, so that no connection was refused in between.
        drop(pod);
        Ok(())
    }

    /// With [`WhenDown::Open`]: marks no more connections, which would have nowhere to go once this process has ended.
    /// What a clean end begins with.
    pub fn open_up(&self) {
        if let Engine::Ebpf(loaded) = &self.engine {
            drop(loaded.attached().marking.take());
        }
    }

    /// Ends the capture of every pinned pod but `keep`, by inode number of their namespaces: pods that went away, or
    /// ceased to be ours, while no process ran. One whose namespace exists, but at no path that can be found, stays; that is
    /// an error. Blocks.
    pub fn sweep(&self, keep: &[u32]) -> Result<(), CaptureError> {
        let Engine::Ebpf(loaded) = &self.engine else { return Ok(()) };
        let stale = loaded.version.pods()?.into_iter().filter(|pod| !keep.contains(&pod.id()));
        removal::remove_each(Some(&loaded.maps), stale).map(drop)
    }

    /// Attaches the node's programs again, which another process had replaced: the first step of taking the node back, before
    /// [`Self::reclaim_pod`]. Blocks.
    pub fn reclaim(&self) -> Result<(), CaptureError> {
        let Engine::Ebpf(loaded) = &self.engine else { return Ok(()) };
        let mut programs = loaded.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let again = programs.attach(&loaded.options, &loaded.version, loaded.seat.number())?;
        *loaded.attached() = again;
        Ok(())
    }

    /// Makes a pod that another process had taken over, and no more holds, this one's again, connections and all; `false`
    /// where the pod is no more enrolled. Blocks.
    pub fn reclaim_pod(&self, pod: &PodCapture) -> Result<bool, CaptureError> {
        match &self.engine {
            Engine::Redirect => Ok(true),
            Engine::Ebpf(loaded) => enrolment::reclaim(loaded, pod),
        }
    }

    /// Puts the pod's listeners into those slots that are empty, because another process that had taken the pod over has closed
    /// its own; gives how many. Blocks.
    pub fn refill(&self, pod: &PodCapture) -> Result<usize, CaptureError> {
        match &self.engine {
            Engine::Redirect => Ok(0),
            Engine::Ebpf(_) => enrolment::refill(pod),
        }
    }

    /// Takes away what belonged to another process alone that is gone; `false` where one is there still, or again. Blocks.
    pub fn sweep_seats(&self) -> Result<bool, CaptureError> {
        let Engine::Ebpf(loaded) = &self.engine else { return Ok(true) };
        let own = cgroup::id(&loaded.options.own_cgroup).map_err(HostError::Cgroup)?;
        loaded.seat.if_alone(|| {
            sweep_own(&loaded.version, None, loaded.seat.number(), &mut loaded.maps.lock(), own)
        })
    }

    /// Whether no other process holds the node, and from here on none can. Where one does, it is left alone with it: this one
    /// must touch nothing of the node any more.
    pub fn hold_alone(&self) -> bool {
        match &self.engine {
            Engine::Redirect => true,
            Engine::Ebpf(loaded) => loaded.seat.pins.hold_alone(),
        }
    }

    /// Ends all capture of this node and removes every trace of it; for who holds it alone. Blocks.
    pub fn dismantle(self) -> Result<(), CaptureError> {
        let Engine::Ebpf(loaded) = self.engine else { return Ok(()) };
        let Loaded { seat, version, maps, .. } = *loaded;
        removal::remove_each(Some(&maps), version.pods()?)?;
        removal::remove_version(&version)?;
        seat.pins.remove_empty();
        Ok(())
    }

    /// How often each program came to each outcome, since the node's maps were pinned; empty with redirect steering.
    pub fn outcomes(&self) -> Result<Vec<(Outcome, u64)>, CaptureError> {
        match &self.engine {
            Engine::Redirect => Ok(Vec::new()),
            Engine::Ebpf(loaded) => loaded.maps.lock().outcomes(),
        }
    }

    /// How often something was put back that somebody had removed or changed in a pod, by what it was: `rule`, `route`,
    /// `qdisc`, `filter`, `filter_order`, `sysctl`, `sk_lookup`. Since the process started.
    pub fn repairs(&self) -> Vec<(&'static str, u64)> {
        self.counts.repairs()
    }

    /// Reports programs of others that run when enrolled pods connect, and may rewrite where they connect to; each once,
    /// in the log and among [`Self::failures`]. Blocks.
    pub fn look_for_rewriters(&self) -> Result<(), CaptureError> {
        let Engine::Ebpf(loaded) = &self.engine else { return Ok(()) };
        let pods = loaded.version.pods()?.iter().map(PodPins::id).collect();
        let looked = loaded.rewriters.look(&pods, &self.counts);
        looked.map_err(HostError::ConnectHooks).map_err(CaptureError::from)
    }

    /// What the watches of all pods could not do: `refused` and `panicked` looks, each `address_ignored` because a pod
    /// had too many, each interface that is `unguarded` in spite of [`GuardHost::On`], and each `foreign_connect_program`. Since the process started.
    pub fn failures(&self) -> Vec<(&'static str, u64)> {
        self.counts.failures()
    }

    /// What the programs log, with [`BpfLog::On`]; once.
    pub fn take_logs(&self) -> Option<BpfLogs> {
        match &self.engine {
            Engine::Redirect => None,
            Engine::Ebpf(loaded) => {
                loaded.logs.lock().unwrap_or_else(PoisonError::into_inner).take()
            }
        }
    }
}
