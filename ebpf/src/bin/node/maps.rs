// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Maps of the `node` object beside those of `shared`. All are pinned once a node and shared with the other objects by name.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::SkStorage,
    macros::{btf_map, map},
    maps::{HashMap, PerCpuArray},
};
use culvert_abi::{Outcome, Pod};

/// Enrolled pods by netns cookie. Writer: capture, at enrolment (its commit point) and un-enrolment. Readers:
/// `mark_connect`, `mark_noted`, `note_netns4`, `note_netns6`, `reuse_bind4`, `reuse_bind6`. 4096 is eight times the largest number of pods on a node that Kubernetes is tested with. No eviction:
/// an enrolment that finds it full fails.
#[map(name = "pods")]
pub(crate) static PODS: HashMap<u64, Pod> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// The netns cookie of sockets. Writers: `note_netns4`, `note_netns6`; user space makes room at a socket of its own that is
/// to be told. Reader: `mark_noted`. An entry lives as long as its socket, in the socket: no size, no eviction.
#[btf_map(name = "noted")]
pub(crate) static NOTED: SkStorage<u64> = SkStorage::new();

/// Sockets that the proxy dialled. Writer: `mark_own`. Readers: both marking programs. An entry lives as long as its
/// socket, in the socket: no size, no eviction.
#[btf_map(name = "own")]
pub(crate) static OWN: SkStorage<u32> = SkStorage::new();

/// Counters by [`Outcome`]. Writers: all programs. Reader: observe. Never reset.
#[map(name = "outcomes")]
pub(crate) static OUTCOMES: PerCpuArray<u64> = PerCpuArray::with_max_entries(Outcome::COUNT, 0);
