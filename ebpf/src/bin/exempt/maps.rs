// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Maps of the `exempt` object. All are pinned once a node and shared with the other objects by name.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::SkStorage,
    macros::{btf_map, map},
    maps::{HashMap, LruHashMap, PerCpuArray},
};
use culvert_abi::{Addr, Flow, Outcome, Pod};

/// Sockets that the proxy dialled. Writer: `mark_own`. Readers: the marking programs of `node`. An entry lives as long
/// as its socket, in the socket: no size, no eviction.
#[btf_map(name = "own")]
pub(crate) static OWN: SkStorage<u32> = SkStorage::new();

/// Deliveries to applications and probes, as the pod sees them. Writers: `mark_own` and `mark_probe`, before the SYN,
/// until the socket closes.
/// Readers: `pick_listener`, `hold_in`, of a connection's first packets only. So the size bounds handshakes under way,
/// and eviction of the least recently used costs an established connection nothing.
#[map(name = "exempt")]
pub(crate) static EXEMPT: LruHashMap<Flow, u8> = LruHashMap::with_max_entries(65536, 0);

/// Enrolled pods by address. Writer: capture, with every change of a pod's addresses. Reader: `mark_probe`. Four addresses a pod. No eviction.
#[map(name = "pods_by_addr")]
pub(crate) static PODS_BY_ADDR: HashMap<Addr, Pod> =
    HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// Counters by [`Outcome`]. Writers: all programs. Reader: observe. Never reset.
#[map(name = "outcomes")]
pub(crate) static OUTCOMES: PerCpuArray<u64> = PerCpuArray::with_max_entries(Outcome::COUNT, 0);
