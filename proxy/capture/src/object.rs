//! The embedded BPF objects and how each is loaded; attaching is left to `node` and `enrolment`.

use std::{collections::BTreeMap, fmt};

use aya::{Ebpf, EbpfLoader, programs::ProgramError};
use culvert_abi::maps;

use crate::{
    error::CaptureError,
    node::{BpfLog, WhenDown},
    pins::{PodPins, VersionPins},
};

/// Attached once a node, at the root of cgroup2.
pub(crate) static NODE: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/node.o"));
/// Attached at the proxy's own cgroup, and at kubelet's.
pub(crate) static EXEMPT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/exempt.o"));
/// Loaded once a pod, attached in its network namespace.
pub(crate) static POD: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pod.o"));

/// Maps that all objects of a node share, by pin.
const SHARED: [&str; 12] = [
    maps::PODS,
    maps::PODS_BY_ADDR,
    maps::ADDRS,
    maps::EXEMPT,
    maps::OWN,
    maps::OWN_CGROUPS,
    maps::OUTCOMES,
    maps::SETTINGS,
    maps::EXCLUSIONS,
    maps::EXCLUDED_CIDRS,
    maps::BYPASS,
    maps::NOTED,
];

/// Names of the programs, as the kernel and `bpftool` show them.
pub(crate) mod programs {
    pub(crate) const MARK_CONNECT: &str = "mark_connect";
    pub(crate) const MARK_NOTED: &str = "mark_noted";
    pub(crate) const NOTE_NETNS4: &str = "note_netns4";
    pub(crate) const NOTE_NETNS6: &str = "note_netns6";
    pub(crate) const MARK_OWN: &str = "mark_own";
    pub(crate) const MARK_PROBE: &str = "mark_probe";
    pub(crate) const REUSE_BIND4: &str = "reuse_bind4";
    pub(crate) const REUSE_BIND6: &str = "reuse_bind6";
    pub(crate) const PICK_LISTENER: &str = "pick_listener";
    pub(crate) const HOLD_IN: &str = "hold_in";
    pub(crate) const HOLD_OUT: &str = "hold_out";
    pub(crate) const GUARD: &str = "guard";
    pub(crate) const GUARD_HOST: &str = "guard_host";
}

/// Loads the objects of one node, with their maps pinned, or reused where they are pinned already.
///
/// One for the life of the process: a new [`EbpfLoader`] reads all of the kernel's BTF, which takes some 25 ms, and our
/// objects need none of it.
pub(crate) struct Loader {
    inner: EbpfLoader<'static>,
    /// The value of `POD_ID` must outlive the loader. The kernel uses inode numbers again, so these are never more than
    /// there were pods at one time.
    ids: BTreeMap<u32, &'static u32>,
    open_when_down: &'static u32,
}

impl Loader {
    pub(crate) fn new(pins: &VersionPins, log: BpfLog, when_down: WhenDown) -> Self {
        let mut loader = EbpfLoader::new();
        loader.btf(None);
        for map in SHARED {
            loader.map_pin_path(map, pins.map(map));
        }
        loader.override_global(aya_log::LEVEL, log_level(log), false);
        let open_when_down = match when_down {
            WhenDown::Hold | WhenDown::Refuse => &0,
            WhenDown::Open => &1,
        };
        Self { inner: loader, ids: BTreeMap::new(), open_when_down }
    }

    pub(crate) fn load(
        &mut self,
        object: &'static str,
        bytes: &[u8],
    ) -> Result<Ebpf, CaptureError> {
        self.inner.load(bytes).map_err(|source| CaptureError::Object { object, source })
    }

    /// Loads the pod's object; its `listeners` are pinned beside its links.
    pub(crate) fn load_pod(&mut self, pins: &PodPins) -> Result<Ebpf, CaptureError> {
        let id = *self.ids.entry(pins.id()).or_insert_with(|| Box::leak(Box::new(pins.id())));
        self.inner.override_global("POD_ID", id, true);
        self.inner.override_global("OPEN_WHEN_DOWN", self.open_when_down, true);
        self.inner.map_pin_path(maps::LISTENERS, pins.listeners());
        self.load("pod", POD)
    }
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader").finish_non_exhaustive()
    }
}

const fn log_level(log: BpfLog) -> &'static u8 {
    match log {
        BpfLog::Off => &0,
        BpfLog::On => &(aya_log::Level::Debug as u8),
    }
}

/// The program `name` of `object`, as its own kind.
pub(crate) fn program<'a, P>(
    object: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut P, CaptureError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program, Error = ProgramError>,
{
    let error = |source| CaptureError::Program { attempt: "find", program: name, source };
    let program = object.program_mut(name).ok_or_else(|| error(ProgramError::NotLoaded))?;
    program.try_into().map_err(error)
}
