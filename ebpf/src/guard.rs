// SPDX-License-Identifier: GPL-2.0 OR MIT
//! May this packet leave the pod?
//!
//! It only ever drops: capturing what it catches would need a look-up a packet, and is left to `mark_connect`.

use culvert_abi::{MARK_CAPTURED, MARK_DELIVERY, Outcome};

use crate::{
    Family, Owner, Proxy, WhenDown, own_bits,
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
/// `owner` and `proxy` cost look-ups, so they are asked only about what would be dropped: never for a packet of an
/// established flow. While there is no proxy and [`WhenDown::Open`] says so, a SYN without our marks may go.
#[inline(always)]
pub fn verdict(
    packet: Packet,
    mark: u32,
    owner: impl FnOnce() -> Owner,
    proxy: impl FnOnce(Family) -> Proxy,
    when_down: WhenDown,
) -> Verdict {
    let marked = matches!(own_bits(mark), MARK_CAPTURED | MARK_DELIVERY);
    let outcome = match packet.kind {
        Kind::Malformed => Outcome::GuardMalformed,
        Kind::Tcp if marked => Outcome::GuardRouteLost,
        Kind::Tcp if packet.opens() => Outcome::GuardUncaptured,
        Kind::Tcp | Kind::Other => return Verdict::Pass,
    };
    match owner() {
        Owner::App
            if outcome == Outcome::GuardUncaptured
                && when_down == WhenDown::Open
                && proxy(packet.family) == Proxy::Gone =>
        {
            Verdict::PassCounted(Outcome::GuardOpen)
        }
        Owner::App => Verdict::Drop(outcome),
        Owner::Proxy if packet.opens() => Verdict::PassCounted(Outcome::GuardOwn),
        Owner::Proxy => Verdict::Pass,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{ACK, NETWORK, Position, SYN};

    fn packet(kind: Kind, flags: u8) -> Packet {
        Packet {
            kind,
            family: Family::V4,
            network: Position { origin: NETWORK, offset: 0 },
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
        let up = |_| Proxy::Here;
        assert_eq!(verdict(packet, mark, || owner, up, WhenDown::Open), want);
        assert_eq!(verdict(packet, mark, || owner, |_| Proxy::Gone, WhenDown::Closed), want);
    }

    #[test]
    fn established_flows_and_other_protocols_are_not_looked_up() {
        for (packet, mark) in [
            (tcp(ACK), 0),
            (tcp(SYN | ACK), 0),
            (packet(Kind::Other, 0), 0),
            (packet(Kind::Other, 0), 0x111),
        ] {
            let verdict = verdict(
                packet,
                mark,
                || unreachable!("no look-up"),
                |_| unreachable!("no look-up"),
                WhenDown::Open,
            );
            assert_eq!(verdict, Verdict::Pass);
        }
    }

    #[test]
    fn a_syn_that_escaped_capture_is_dropped() {
        check(tcp(SYN), 0, Owner::App, Verdict::Drop(Outcome::GuardUncaptured));
        check(tcp(SYN), 0x539, Owner::App, Verdict::Drop(Outcome::GuardUncaptured));
    }

    #[test]
    fn a_syn_may_go_while_the_proxy_is_gone_and_the_node_is_open_then() {
        let open =
            |packet, mark, owner| verdict(packet, mark, || owner, |_| Proxy::Gone, WhenDown::Open);
        let want = Verdict::PassCounted(Outcome::GuardOpen);
        assert_eq!(open(tcp(SYN), 0, Owner::App), want);
        assert_eq!(open(tcp(SYN), 0x539, Owner::App), want);
        let lost = Verdict::Drop(Outcome::GuardRouteLost);
        assert_eq!(open(tcp(SYN), 0x111, Owner::App), lost);
        let malformed = Verdict::Drop(Outcome::GuardMalformed);
        assert_eq!(open(packet(Kind::Malformed, 0), 0, Owner::App), malformed);
        let own = Verdict::PassCounted(Outcome::GuardOwn);
        assert_eq!(open(tcp(SYN), 0, Owner::Proxy), own);
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
