// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What culvert's BPF programs decide, as pure functions that are tested on the host.
//!
//! The programs themselves are the `bin` targets, one object an attach scope: each reads its context, asks this library
//! for a verdict and applies it. Layouts shared with user space are `culvert-abi`'s; attaching is `culvert-capture`'s.
//!
//! Invariants: a verdict reads no map and calls no kernel helper (look-ups are passed in, and asked only where the answer
//! matters); every frame is read through bounds that the verifier can follow; what cannot be decided fails closed and is
//! counted as an [`Outcome`](culvert_abi::Outcome).
#![no_std]
#![expect(
    clippy::inline_always,
    reason = "kernels before 5.13 refuse functions of a program that take pointers"
)]
// Inline assembly for this target is not stable yet; `helpers` says what needs it.
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod endpoint;
pub mod exempt;
pub mod guard;
pub mod host;
pub mod inbound;
pub mod outbound;
pub mod packet;

#[cfg(feature = "programs")]
pub mod helpers;

/// Whose socket it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The proxy's: never captured, never dropped.
    Proxy,
    /// Anybody else's in the pod.
    App,
}

/// Whether the proxy is there, as a pod's listeners tell: the kernel takes them away with the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proxy {
    /// A listener is in its slot.
    Here,
    /// The slot is empty.
    Gone,
}

/// What happens to new connections while the proxy is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenDown {
    /// None gets through; user space decides whether they are held.
    Closed,
    /// They go where they would go without us.
    Open,
}

impl WhenDown {
    /// From the global that user space sets: only 1 is open.
    #[inline(always)]
    pub const fn of(global: u32) -> Self {
        if global == 1 { Self::Open } else { Self::Closed }
    }
}

/// Address family of a packet (not of the socket: IPv4 also arrives at dual-stack `AF_INET6` sockets).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The bits of `mark` that are culvert's.
pub const fn own_bits(mark: u32) -> u32 {
    mark & culvert_abi::MARK_MASK
}

/// `mark` with culvert's bits replaced by `bits`; those of others stay.
pub const fn with_bits(mark: u32, bits: u32) -> u32 {
    (mark & !culvert_abi::MARK_MASK) | bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_closed_unless_told_otherwise() {
        assert_eq!([0, 1, 2, u32::MAX].map(WhenDown::of), {
            use WhenDown::{Closed, Open};
            [Closed, Open, Closed, Closed]
        });
    }

    #[test]
    fn marks_keep_the_bits_of_others() {
        assert_eq!(with_bits(0xabcd_0fff, 0x111), 0xabcd_0111);
        assert_eq!(own_bits(0xabcd_f53a), 0x53a);
    }
}
