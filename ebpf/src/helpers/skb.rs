// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Packets as tc programs get them.

use core::{
    mem::{MaybeUninit, offset_of},
    ptr::{self, NonNull},
};

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_INGRESS, bpf_sock},
    btf_maps::SkStorage,
    helpers::{
        bpf_redirect, bpf_sk_fullsock, bpf_skb_cgroup_id, bpf_skb_load_bytes_relative,
        bpf_skb_store_bytes,
    },
    programs::TcContext,
};

use super::{load_u32, storage};
use crate::{
    host::Maker,
    packet::{Frame, Position},
};

const AF_PACKET: u32 = 17;
const AF_XDP: u32 = 44;

/// A frame at tc, with what the kernel knows about it.
pub struct Skb<'a>(pub &'a TcContext);

impl Skb<'_> {
    /// Its mark.
    #[inline(always)]
    pub fn mark(&self) -> u32 {
        load!(self.0.skb.skb, __sk_buff, mark)
    }

    /// The cgroup that created its socket; 0 without a full socket (forwarded, or answering for a closed one).
    #[inline(always)]
    pub fn cgroup_id(&self) -> u64 {
        // SAFETY: the helper takes the context of any tc program.
        unsafe { bpf_skb_cgroup_id(self.0.skb.skb) }
    }

    /// The index of the interface that it leaves by.
    #[inline(always)]
    pub fn interface(&self) -> u32 {
        load!(self.0.skb.skb, __sk_buff, ifindex)
    }

    /// The socket that it is of, if there is one.
    #[inline(always)]
    fn any_socket(&self) -> Option<NonNull<bpf_sock>> {
        // SAFETY: the context is the kernel's.
        let field = unsafe { &raw const (*self.0.skb.skb).__bindgen_anon_2 };
        // SAFETY: as above; a pointer in a context is loaded whole, as the verifier demands.
        let sk = unsafe { field.cast::<*mut bpf_sock>().read() };
        NonNull::new(sk)
    }

    /// What its socket tells of who made it.
    #[inline(always)]
    pub fn maker(&self) -> Maker {
        let Some(sk) = self.any_socket() else { return Maker::Unknown };
        match load!(sk.as_ptr(), bpf_sock, family) {
            AF_PACKET | AF_XDP => Maker::Hand,
            _ => Maker::Kernel,
        }
    }

    /// The full socket that it is of, if there is one.
    #[inline(always)]
    fn socket(&self) -> Option<NonNull<bpf_sock>> {
        let sk = self.any_socket()?;
        // SAFETY: the helper takes the socket of a context, once that is known to be there.
        NonNull::new(unsafe { bpf_sk_fullsock(sk.as_ptr()) })
    }

    /// Whether [`Socket::set_bypass`](super::Socket::set_bypass) has noted that it may leave without capture.
    #[inline(always)]
    pub fn bypasses(&self, bypass: &SkStorage<u32>) -> bool {
        let noted = self.socket().and_then(|sk| storage(bypass, sk, ptr::null_mut(), 0));
        // SAFETY: an element of this map is four bytes wide and aligned, and lives as long as the socket.
        noted.is_some_and(|noted| unsafe { noted.cast::<u32>().read() } == 1)
    }

    /// Whether its socket is bound to an interface, and so takes no answer that comes by another.
    #[inline(always)]
    pub fn is_bound(&self) -> bool {
        self.socket().is_some_and(|sk| load!(sk.as_ptr(), bpf_sock, bound_dev_if) != 0)
    }

    /// Marks it, and lets it arrive at `lo` from an Ethernet header without addresses: any other is for another host
    /// there. Gives the program's answer, or `None` if the header could not be written.
    #[inline(always)]
    pub fn to_loopback(&self, mark: u32) -> Option<i32> {
        /// Of `lo`, in every namespace.
        const LOOPBACK: u32 = 1;
        let skb = self.0.skb.skb;
        // SAFETY: the context is the kernel's.
        let field = unsafe { &raw mut (*skb).mark };
        // SAFETY: as above, and this field is one that it lets programs write.
        unsafe { field.write_volatile(mark) };
        let addresses = [0_u8; 12];
        // SAFETY: twelve initialised bytes, and the helper checks that the frame has as many.
        let stored = unsafe {
            bpf_skb_store_bytes(skb, 0, addresses.as_ptr().cast(), addresses.len() as u32, 0)
        };
        // SAFETY: the helper takes two numbers.
        (stored == 0).then(|| unsafe { bpf_redirect(LOOPBACK, BPF_F_INGRESS.into()) } as i32)
    }
}

impl Frame for Skb<'_> {
    #[inline(always)]
    fn protocol(&self) -> u16 {
        u16::from_be(load!(self.0.skb.skb, __sk_buff, protocol) as u16)
    }

    /// Of the first, linear part of the packet alone, in which the kernel keeps headers.
    #[inline(always)]
    fn bytes<const N: usize>(&self, position: Position) -> Option<[u8; N]> {
        let Position { origin, offset } = position;
        let mut bytes = MaybeUninit::<[u8; N]>::uninit();
        let to = bytes.as_mut_ptr().cast();
        let skb = self.0.skb.skb.cast();
        // SAFETY: `to` points to `N` bytes on the stack; the helper checks `offset` against the frame.
        let result = unsafe { bpf_skb_load_bytes_relative(skb, offset, to, N as u32, origin) };
        // SAFETY: the helper returned 0, so it wrote all `N` bytes.
        (result == 0).then(|| unsafe { bytes.assume_init() })
    }

    #[inline(always)]
    fn length(&self) -> u32 {
        load!(self.0.skb.skb, __sk_buff, len)
    }

    #[inline(always)]
    fn any(&self, value: u32) -> u32 {
        obscure(value, load!(self.0.skb.skb, __sk_buff, len))
    }
}

/// Gives `value` back, mixed with `unknown` and unmixed again, which the verifier does not see through.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn obscure(value: u32, unknown: u32) -> u32 {
    let mut value = u64::from(value);
    // SAFETY: changes nothing but this register.
    unsafe {
        core::arch::asm!(
            "{value} ^= {unknown}",
            "{value} ^= {unknown}",
            value = inout(reg) value,
            unknown = in(reg) u64::from(unknown),
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    value as u32
}

/// The same for the host.
#[cfg(not(target_arch = "bpf"))]
const fn obscure(value: u32, _unknown: u32) -> u32 {
    value
}
