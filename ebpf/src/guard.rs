// SPDX-License-Identifier: GPL-2.0 OR MIT
//! May this packet leave the pod?
//!
//! It only ever drops: capturing what it catches would need a look-up a packet, and is left to `mark_connect`.

use culvert_abi::{MARK_CAPTURED, MARK_DELIVERY, Outcome};

use crate::{
    Owner, own_bits,
    packet::{Kind, Packet},
};

/// What `guard` does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it go.
    Pass,
    /// Let it go, and count it.
    PassCounted(Outcome),
    /// Drop it, and count it.
    Drop(Outcome),
}

/// Decides by the packet, its mark, and whose socket sent it.
///
/// `owner` costs a look-up, so it is asked only about what would be dropped: never for a packet of an established flow.
#[inline(always)]
pub fn verdict(packet: Packet, mark: u32, owner: impl FnOnce() -> Owner) -> Verdict {
    let marked = matches!(own_bits(mark), MARK_CAPTURED | MARK_DELIVERY);
    let outcome = match packet.kind {
        Kind::Malformed => Outcome::GuardMalformed,
        Kind::Tcp if marked => Outcome::GuardRouteLost,
        Kind::Tcp if packet.opens() => Outcome::GuardUncaptured,
        Kind::Tcp | Kind::Other => return Verdict::Pass,
    };
    match owner() {
        Owner::App => Verdict::Drop(outcome),
        Owner::Proxy if packet.opens() => Verdict::PassCounted(Outcome::GuardOwn),
        Owner::Proxy => Verdict::Pass,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Family,
        packet::{ACK, SYN},
    };

    fn packet(kind: Kind, flags: u8) -> Packet {
        Packet {
            kind,
            family: Family::V4,
            network: 14,
            source_port: 40000,
            destination_port: 80,
            flags,
        }
    }

    fn tcp(flags: u8) -> Packet {
        packet(Kind::Tcp, flags)
    }

    #[track_caller]
    fn check(packet: Packet, mark: u32, owner: Owner, want: Verdict) {
        assert_eq!(verdict(packet, mark, || owner), want);
    }

    #[test]
    fn established_flows_and_other_protocols_are_not_looked_up() {
        for (packet, mark) in [
            (tcp(ACK), 0),
            (tcp(SYN | ACK), 0),
            (packet(Kind::Other, 0), 0),
            (packet(Kind::Other, 0), 0x111),
        ] {
            assert_eq!(verdict(packet, mark, || unreachable!("no look-up")), Verdict::Pass);
        }
    }

    #[test]
    fn a_syn_that_escaped_capture_is_dropped() {
        check(tcp(SYN), 0, Owner::App, Verdict::Drop(Outcome::GuardUncaptured));
        check(tcp(SYN), 0x539, Owner::App, Verdict::Drop(Outcome::GuardUncaptured));
    }

    #[test]
    fn a_marked_packet_that_lost_its_route_is_dropped() {
        for mark in [0x111, 0x53a, 0x8_0111] {
            for flags in [SYN, ACK, SYN | ACK] {
                check(tcp(flags), mark, Owner::App, Verdict::Drop(Outcome::GuardRouteLost));
            }
        }
    }

    #[test]
    fn what_cannot_be_read_is_dropped() {
        check(packet(Kind::Malformed, 0), 0, Owner::App, Verdict::Drop(Outcome::GuardMalformed));
    }

    #[test]
    fn the_proxys_packets_pass_and_only_its_syns_are_counted() {
        check(tcp(SYN), 0, Owner::Proxy, Verdict::PassCounted(Outcome::GuardOwn));
        check(tcp(SYN), 0x53a, Owner::Proxy, Verdict::PassCounted(Outcome::GuardOwn));
        check(tcp(ACK), 0x53a, Owner::Proxy, Verdict::Pass);
        check(packet(Kind::Malformed, 0), 0, Owner::Proxy, Verdict::Pass);
    }
}
