// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Is this `connect()` of an enrolled pod captured?
//!
//! Whether the pod is enrolled is the caller's question; it asks nothing here for any other pod.

use culvert_abi::MARK_CAPTURED;

use crate::{Owner, endpoint::Place, own_bits, with_bits};

/// Why a pod's settings keep a connection out of capture, if they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excluded {
    /// They do not.
    No,
    /// The source address is of an excluded interface. `guard` lets it pass there, and nowhere else.
    BySource,
    /// The port or the network is excluded, by whatever interface it is reached.
    ByDestination,
}

/// What `mark_connect` does with a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The proxy's own socket: leave it alone.
    Own,
    /// The connection stays in the pod: let it have this mark, which is the one that it carries, or the same without that
    /// of an earlier `connect()`.
    Local(u32),
    /// The pod excludes it from capture: the same, and where `bypass` is set the SYN may leave by any interface.
    Exclude {
        /// The mark.
        mark: u32,
        /// Whether `guard` is to let it pass.
        bypass: bool,
    },
    /// Capture: set this mark and unbind the socket from its device.
    Capture(u32),
}

/// Decides by who owns the socket, where it connects to, and the mark that it carries. `excluded` is asked only about
/// what would be captured.
///
/// A mark that the application chose is overwritten under the mask: it must not be a way around capture.
#[inline(always)]
pub fn verdict(
    owner: Owner,
    destination: Place,
    mark: u32,
    excluded: impl FnOnce() -> Excluded,
) -> Verdict {
    if owner == Owner::Proxy {
        return Verdict::Own;
    }
    let fresh = if own_bits(mark) == MARK_CAPTURED { with_bits(mark, 0) } else { mark };
    if destination.is_inside() {
        return Verdict::Local(fresh);
    }
    match excluded() {
        Excluded::No => Verdict::Capture(with_bits(mark, MARK_CAPTURED)),
        Excluded::BySource => Verdict::Exclude { mark: fresh, bypass: false },
        Excluded::ByDestination => Verdict::Exclude { mark: fresh, bypass: true },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(owner: Owner, destination: Place, mark: u32, want: Verdict) {
        assert_eq!(verdict(owner, destination, mark, || Excluded::No), want);
    }

    const INSIDE: [Place; 3] = [Place::Loopback, Place::Own, Place::Excluded];

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
        for destination in INSIDE {
            check(Owner::App, destination, 0, Verdict::Local(0));
            check(Owner::App, destination, 0x53a, Verdict::Local(0x53a));
            check(Owner::App, destination, 0x8_0111, Verdict::Local(0x8_0000));
        }
    }

    #[test]
    fn what_the_pod_excludes_is_not_captured_and_loses_a_stale_mark() {
        for (excluded, bypass) in [(Excluded::BySource, false), (Excluded::ByDestination, true)] {
            for (mark, fresh) in [(0, 0), (0x8_0111, 0x8_0000), (0x53a, 0x53a)] {
                let verdict = verdict(Owner::App, Place::Elsewhere, mark, || excluded);
                assert_eq!(verdict, Verdict::Exclude { mark: fresh, bypass });
            }
        }
    }

    #[test]
    fn exclusions_are_looked_up_only_for_what_would_be_captured() {
        let ask = || unreachable!("no look-up");
        assert_eq!(verdict(Owner::Proxy, Place::Elsewhere, 0, ask), Verdict::Own);
        for destination in INSIDE {
            assert_eq!(verdict(Owner::App, destination, 0, ask), Verdict::Local(0));
        }
    }
}
