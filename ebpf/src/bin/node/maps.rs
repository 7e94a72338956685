// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Maps of the `node` object beside those of `shared`. All are pinned once a node and shared with the other objects by name.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::SkStorage,
    macros::{btf_map, map},
    maps::{HashMap, PerCpuArray},
};
use culvert_abi::{Addr, Outcome, Pod};

/// Enrolled pods by netns cookie. Writer: capture, at enrolment (its commit point) and un-enrolment. Readers:
/// `mark_connect`, `reuse_bind4`, `reuse_bind6`. 4096 is eight times the largest number of pods on a node that Kubernetes is tested with. No eviction:
/// an enrolment that finds it full fails.
#[map(name = "pods")]
pub(crate) static PODS: HashMap<u64, Pod> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// Enrolled pods by address. Writer: capture, with every change of a pod's addresses. Readers: `mark_by_addr`,
/// `mark_probe`. Four addresses a pod. No eviction.
#[map(name = "pods_by_addr")]
pub(crate) static PODS_BY_ADDR: HashMap<Addr, Pod> =
    HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// Sockets that the proxy dialled. Writer: `mark_own`. Readers: both marking programs. An entry lives as long as its
/// socket, in the socket: no size, no eviction.
#[btf_map(name = "own")]
pub(crate) static OWN: SkStorage<u32> = SkStorage::new();

/// Counters by [`Outcome`]. Writers: all programs. Reader: observe. Never reset.
#[map(name = "outcomes")]
pub(crate) static OUTCOMES: PerCpuArray<u64> = PerCpuArray::with_max_entries(Outcome::COUNT, 0);
