// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Maps that are both the `node` object's and the `pod` object's: pinned once a node, and shared by name, which takes that
//! both describe them alike.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    btf_maps::SkStorage,
    macros::{btf_map, map},
    maps::{HashMap, LpmTrie},
};
use culvert_abi::{Exclusion, PodAddr, Settings};

/// Addresses of enrolled pods. Writer: capture, from before a pod's enrolment until after its end. Readers: both marking
/// programs, `pick_listener`, `hold_in`, `guard`. Four addresses a pod. No eviction.
#[map(name = "addrs")]
pub(crate) static ADDRS: HashMap<PodAddr, u8> = HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// Settings of enrolled pods; a pod without an entry has none. Writer: capture, before a pod's enrolment and when they
/// change. Readers: both marking programs, `pick_listener`, `hold_in`, `guard`. No eviction.
#[map(name = "settings")]
pub(crate) static SETTINGS: HashMap<u32, Settings> =
    HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// Ports and interfaces that pods exclude, if their settings say that there are any. Writer: capture. Readers: both marking
/// programs, `pick_listener`, `hold_in`, `guard`. No eviction: settings that do not fit are refused.
#[map(name = "exclusions")]
pub(crate) static EXCLUSIONS: HashMap<Exclusion, u8> =
    HashMap::with_max_entries(16384, BPF_F_NO_PREALLOC);

/// Networks that pods exclude, if their settings say that there are any; the key is laid out as
/// [`PodNetwork`](culvert_abi::PodNetwork). Writer: capture. Readers: both marking programs, `guard`. No eviction:
/// settings that do not fit are refused.
#[map(name = "excluded_cidrs")]
pub(crate) static EXCLUDED_CIDRS: LpmTrie<PodAddr, u8> = LpmTrie::with_max_entries(16384, 0);

/// Sockets whose SYN may leave without capture. Writers: both marking programs. Reader: `guard`, for a SYN that it would
/// drop. An entry lives as long as its socket, in the socket: no size, no eviction.
#[btf_map(name = "bypass")]
pub(crate) static BYPASS: SkStorage<u32> = SkStorage::new();
