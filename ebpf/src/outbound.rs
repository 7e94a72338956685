// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Is this `connect()` of an enrolled pod captured?
//!
//! Whether the pod is enrolled is the caller's question; it asks nothing here for any other pod.

use culvert_abi::MARK_CAPTURED;

use crate::{Owner, endpoint::Place, own_bits, with_bits};

/// What `mark_connect` does with a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The proxy's own socket: leave it alone.
    Own,
    /// The connection stays in the pod: leave it alone.
    Local,
    /// The connection stays in the pod, and the mark of an earlier `connect()` of this socket must go: set this one.
    Clear(u32),
    /// Capture: set this mark and unbind the socket from its device.
    Capture(u32),
}

/// Decides by who owns the socket, where it connects to, and the mark that it carries.
///
/// A mark that the application chose is overwritten under the mask: it must not be a way around capture.
#[inline(always)]
pub fn verdict(owner: Owner, destination: Place, mark: u32) -> Verdict {
    match (owner, destination) {
        (Owner::Proxy, _) => Verdict::Own,
        (Owner::App, Place::Elsewhere) => Verdict::Capture(with_bits(mark, MARK_CAPTURED)),
        (Owner::App, Place::Loopback | Place::Own) if own_bits(mark) == MARK_CAPTURED => {
            Verdict::Clear(with_bits(mark, 0))
        }
        (Owner::App, Place::Loopback | Place::Own) => Verdict::Local,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(owner: Owner, destination: Place, mark: u32, want: Verdict) {
        assert_eq!(verdict(owner, destination, mark), want);
    }

    #[test]
    fn the_proxys_sockets_are_left_alone_whatever_they_carry() {
        for destination in [Place::Loopback, Place::Own, Place::Elsewhere] {
            check(Owner::Proxy, destination, 0x111, Verdict::Own);
        }
    }

    #[test]
    fn connections_out_of_the_pod_are_captured_whatever_they_carry() {
        for (mark, want) in [(0, 0x111), (0x111, 0x111), (0x53a, 0x111), (0x8_0539, 0x8_0111)] {
            check(Owner::App, Place::Elsewhere, mark, Verdict::Capture(want));
        }
    }

    #[test]
    fn connections_within_the_pod_lose_only_a_stale_capture_mark() {
        for destination in [Place::Loopback, Place::Own] {
            check(Owner::App, destination, 0, Verdict::Local);
            check(Owner::App, destination, 0x53a, Verdict::Local);
            check(Owner::App, destination, 0x8_0111, Verdict::Clear(0x8_0000));
        }
    }
}
