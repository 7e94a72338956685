// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Look-ups as `sk_lookup` programs get them, and the listeners that answer them.

use core::{
    ffi::{c_long, c_void},
    mem::offset_of,
    ptr::{self, NonNull},
};

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sk_lookup,
    helpers::{bpf_map_lookup_elem, bpf_sk_assign, bpf_sk_release},
    maps::SockMap,
    programs::SkLookupContext,
};
use culvert_abi::Slot;

use super::{AF_INET, AF_INET6, load_u32, map_ptr};
use crate::{
    Family,
    endpoint::{Connection, Endpoint, v4_mapped, v6},
};

/// A look-up that an `sk_lookup` program answers.
pub struct Lookup {
    /// Family of the packet.
    pub family: Family,
    /// IP protocol number.
    pub protocol: u32,
    /// Both ends, the local one being where the packet goes to.
    pub connection: Connection,
}

impl Lookup {
    /// Reads `ctx`; `None` for families other than IPv4 and IPv6.
    #[inline(always)]
    pub fn of(ctx: &SkLookupContext) -> Option<Self> {
        let (family, local, remote) = match load!(ctx.lookup, bpf_sk_lookup, family) {
            AF_INET => (
                Family::V4,
                v4_mapped(load!(ctx.lookup, bpf_sk_lookup, local_ip4)),
                v4_mapped(load!(ctx.lookup, bpf_sk_lookup, remote_ip4)),
            ),
            AF_INET6 => (
                Family::V6,
                load_v6!(ctx.lookup, bpf_sk_lookup, local_ip6),
                load_v6!(ctx.lookup, bpf_sk_lookup, remote_ip6),
            ),
            _ => return None,
        };
        let local_port = load!(ctx.lookup, bpf_sk_lookup, local_port) as u16;
        // A word in every kernel's eyes; since 5.17 the upper half is padding.
        let remote_port = u16::from_be(load!(ctx.lookup, bpf_sk_lookup, remote_port) as u16);
        Some(Self {
            family,
            protocol: load!(ctx.lookup, bpf_sk_lookup, protocol),
            connection: Connection {
                local: Endpoint { addr: local, port: local_port },
                remote: Endpoint { addr: remote, port: remote_port },
            },
        })
    }
}

/// A listening socket taken from a SOCKMAP, released on drop as the verifier demands.
pub struct Listener(NonNull<c_void>);

impl Listener {
    /// The listener in `slot`; `None` if the slot is empty.
    #[inline(always)]
    pub fn find(listeners: &SockMap, slot: Slot) -> Option<Self> {
        let slot = slot as u32;
        // SAFETY: `listeners` is a map and the key is of its key type.
        NonNull::new(unsafe {
            bpf_map_lookup_elem(map_ptr(listeners), ptr::from_ref(&slot).cast())
        })
        .map(Self)
    }

    /// Answers the look-up with this listener.
    #[inline(always)]
    pub fn assign(&self, ctx: &SkLookupContext) -> Result<(), c_long> {
        // SAFETY: the context is the kernel's, and the reference to the socket is held by `self`.
        match unsafe { bpf_sk_assign(ctx.as_ptr(), self.0.as_ptr(), 0) } {
            0 => Ok(()),
            errno => Err(errno),
        }
    }
}

impl Drop for Listener {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: `find` acquired this reference, and nothing else releases it.
        unsafe { bpf_sk_release(self.0.as_ptr()) };
    }
}
