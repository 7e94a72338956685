// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Maps of the `pod` object beside those of `shared`. `listeners` is the pod's; the others are pinned once a node and shared by name.

use aya_ebpf::{
    Global,
    bindings::BPF_F_NO_PREALLOC,
    macros::map,
    maps::{HashMap, LruHashMap, PerCpuArray, SockMap},
};
use culvert_abi::{Flow, Outcome, Slot};

/// The pod whose namespace this copy of the object is attached to; capture sets it before the load.
#[expect(unsafe_code, reason = "user space finds the global by its symbol")]
#[unsafe(no_mangle)]
pub(crate) static POD_ID: Global<u32> = Global::new(0);

/// 1 where connections are to go around the proxy while it is gone; capture sets it before the load, the same in all
/// pods of a node.
#[expect(unsafe_code, reason = "user space finds the global by its symbol")]
#[unsafe(no_mangle)]
pub(crate) static OPEN_WHEN_DOWN: Global<u32> = Global::new(0);

/// The proxy's listeners in this pod, by [`Slot`]. Writer: capture; a slot empties by itself when its listener closes.
/// Readers: all programs of this object.
#[map(name = "listeners")]
pub(crate) static LISTENERS: SockMap = SockMap::with_max_entries(Slot::COUNT, 0);

/// Deliveries to applications and probes, as the pod sees them. Writers: `mark_own` and `mark_probe`, before the SYN,
/// until the socket closes.
/// Readers: `pick_listener`, `hold_in`, of a connection's first packets only. So the size bounds handshakes under way,
/// and eviction of the least recently used costs an established connection nothing.
#[map(name = "exempt")]
pub(crate) static EXEMPT: LruHashMap<Flow, u8> = LruHashMap::with_max_entries(65536, 0);

/// Cgroups of culvert's processes: one, two during a handover, more only until pins of dead ones are swept. Writer:
/// capture. Reader: `guard`. No eviction.
#[map(name = "own_cgroups")]
pub(crate) static OWN_CGROUPS: HashMap<u64, u8> = HashMap::with_max_entries(64, BPF_F_NO_PREALLOC);

/// Counters by [`Outcome`]. Writers: all programs. Reader: observe. Never reset.
#[map(name = "outcomes")]
pub(crate) static OUTCOMES: PerCpuArray<u64> = PerCpuArray::with_max_entries(Outcome::COUNT, 0);
