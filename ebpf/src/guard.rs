// SPDX-License-Identifier: GPL-2.0 OR MIT
//! May this packet leave the pod?
//!
//! It never captures TCP, which would need a look-up a packet and is left to `mark_connect`: it drops what that has missed.
//! DNS queries, of which each stands for itself, it sends to `lo`.

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
    /// Mark it as captured, and let it arrive at `lo`.
    ToLoopback,
}

/// What is known at either end of the pod's interface beyond the packet. Each costs look-ups, so it is asked only where the
/// answer matters.
pub trait Origin {
    /// Whose socket sent the packet.
    fn owner(&self) -> Owner;

    /// Whether `mark_connect` has found that the pod excludes the destination of the socket.
    fn bypasses(&self) -> bool;

    /// Whether there is an outbound listener.
    fn proxy(&self, family: Family) -> Proxy;
}

/// What is known in the pod beside that. Each costs look-ups, so it is asked only where the answer matters: never for a packet
/// of an established flow.
pub trait Facts: Origin {
    /// Whether the pod excludes the interface that the packet is about to leave by.
    fn excludes_interface(&self) -> bool;

    /// Whether this DNS query is one to capture.
    fn captures_dns(&self, packet: Packet) -> bool;

    /// Whether there is a DNS server.
    fn dns_server(&self, family: Family) -> Proxy;
}

/// Decides by the packet, its mark, and the facts. While there is no proxy and [`WhenDown::Open`] says so, SYNs without our
/// marks and DNS queries may go.
#[inline(always)]
pub fn verdict(packet: Packet, mark: u32, facts: &impl Facts, when_down: WhenDown) -> Verdict {
    let marked = matches!(own_bits(mark), MARK_CAPTURED | MARK_DELIVERY);
    let outcome = match packet.kind {
        Kind::Malformed => Outcome::GuardMalformed,
        Kind::Tcp if marked => Outcome::GuardRouteLost,
        Kind::Tcp if packet.opens() => Outcome::GuardUncaptured,
        Kind::Dns => Outcome::GuardDns,
        Kind::Tcp | Kind::Other => return Verdict::Pass,
    };
    if facts.owner() == Owner::Proxy {
        return if packet.opens() {
            Verdict::PassCounted(Outcome::GuardOwn)
        } else {
            Verdict::Pass
        };
    }
    let excludable = matches!(outcome, Outcome::GuardUncaptured | Outcome::GuardDns);
    if excludable && facts.excludes_interface() {
        return Verdict::PassCounted(Outcome::GuardExcluded);
    }
    match outcome {
        Outcome::GuardUncaptured if facts.bypasses() => {
            Verdict::PassCounted(Outcome::GuardExcluded)
        }
        Outcome::GuardUncaptured
            if when_down == WhenDown::Open && facts.proxy(packet.family) == Proxy::Gone =>
        {
            Verdict::PassCounted(Outcome::GuardOpen)
        }
        Outcome::GuardDns if !facts.captures_dns(packet) => Verdict::Pass,
        Outcome::GuardDns => match (facts.dns_server(packet.family), when_down) {
            (Proxy::Here, _) => Verdict::ToLoopback,
            (Proxy::Gone, WhenDown::Closed) => Verdict::Drop(Outcome::GuardDnsHeld),
            (Proxy::Gone, WhenDown::Open) => Verdict::PassCounted(Outcome::GuardDnsOpen),
        },
        outcome => Verdict::Drop(outcome),
    }
}

#[cfg(test)]
pub(crate) mod tests {
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

    #[derive(Clone, Copy)]
    struct Known {
        owner: Owner,
        interface: bool,
        bypass: bool,
        dns: bool,
        proxy: Proxy,
    }

    const APP: Known = Known {
        owner: Owner::App,
        interface: false,
        bypass: false,
        dns: false,
        proxy: Proxy::Here,
    };
    const DOWN: Known = Known { proxy: Proxy::Gone, ..APP };
    const PROXY: Known = Known { owner: Owner::Proxy, ..APP };

    impl Origin for Known {
        fn owner(&self) -> Owner {
            self.owner
        }

        fn bypasses(&self) -> bool {
            self.bypass
        }

        fn proxy(&self, _: Family) -> Proxy {
            self.proxy
        }
    }

    impl Facts for Known {
        fn excludes_interface(&self) -> bool {
            self.interface
        }

        fn captures_dns(&self, _: Packet) -> bool {
            self.dns
        }

        fn dns_server(&self, _: Family) -> Proxy {
            self.proxy
        }
    }

    /// Of whom nothing may be asked.
    pub(crate) struct Unasked;

    impl Origin for Unasked {
        fn owner(&self) -> Owner {
            unreachable!("no look-up")
        }

        fn bypasses(&self) -> bool {
            unreachable!("no look-up")
        }

        fn proxy(&self, _: Family) -> Proxy {
            unreachable!("no look-up")
        }
    }

    impl Facts for Unasked {
        fn excludes_interface(&self) -> bool {
            unreachable!("no look-up")
        }

        fn captures_dns(&self, _: Packet) -> bool {
            unreachable!("no look-up")
        }

        fn dns_server(&self, _: Family) -> Proxy {
            unreachable!("no look-up")
        }
    }

    #[track_caller]
    fn check(packet: Packet, mark: u32, facts: Known, want: Verdict) {
        assert_eq!(verdict(packet, mark, &facts, WhenDown::Open), want);
        let gone = Known { proxy: Proxy::Gone, ..facts };
        assert_eq!(verdict(packet, mark, &gone, WhenDown::Closed), want);
    }

    #[test]
    fn established_flows_and_other_protocols_are_not_looked_up() {
        for (packet, mark) in [
            (tcp(ACK), 0),
            (tcp(SYN | ACK), 0),
            (packet(Kind::Other, 0), 0),
            (packet(Kind::Other, 0), 0x111),
        ] {
            assert_eq!(verdict(packet, mark, &Unasked, WhenDown::Open), Verdict::Pass);
        }
    }

    #[test]
    fn a_syn_that_escaped_capture_is_dropped() {
        check(tcp(SYN), 0, APP, Verdict::Drop(Outcome::GuardUncaptured));
        check(tcp(SYN), 0x539, APP, Verdict::Drop(Outcome::GuardUncaptured));
    }

    #[test]
    fn a_syn_may_go_while_the_proxy_is_gone_and_the_node_is_open_then() {
        let open = |packet, mark, facts| verdict(packet, mark, &facts, WhenDown::Open);
        let want = Verdict::PassCounted(Outcome::GuardOpen);
        assert_eq!(open(tcp(SYN), 0, DOWN), want);
        assert_eq!(open(tcp(SYN), 0x539, DOWN), want);
        let lost = Verdict::Drop(Outcome::GuardRouteLost);
        assert_eq!(open(tcp(SYN), 0x111, DOWN), lost);
        let malformed = Verdict::Drop(Outcome::GuardMalformed);
        assert_eq!(open(packet(Kind::Malformed, 0), 0, DOWN), malformed);
        let own = Verdict::PassCounted(Outcome::GuardOwn);
        assert_eq!(open(tcp(SYN), 0, Known { owner: Owner::Proxy, ..DOWN }), own);
    }

    #[test]
    fn a_marked_packet_that_lost_its_route_is_dropped() {
        for mark in [0x111, 0x53a, 0x8_0111] {
            for flags in [SYN, ACK, SYN | ACK] {
                for facts in [APP, Known { interface: true, bypass: true, ..APP }] {
                    check(tcp(flags), mark, facts, Verdict::Drop(Outcome::GuardRouteLost));
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_read_is_dropped() {
        let excluded = Known { interface: true, bypass: true, ..APP };
        for facts in [APP, excluded] {
            check(packet(Kind::Malformed, 0), 0, facts, Verdict::Drop(Outcome::GuardMalformed));
        }
    }

    #[test]
    fn the_proxys_packets_pass_and_only_its_syns_are_counted() {
        check(tcp(SYN), 0, PROXY, Verdict::PassCounted(Outcome::GuardOwn));
        check(tcp(SYN), 0x53a, PROXY, Verdict::PassCounted(Outcome::GuardOwn));
        check(tcp(ACK), 0x53a, PROXY, Verdict::Pass);
        check(packet(Kind::Malformed, 0), 0, PROXY, Verdict::Pass);
        check(packet(Kind::Dns, 0), 0, Known { dns: true, ..PROXY }, Verdict::Pass);
    }

    #[test]
    fn a_syn_that_the_pod_excludes_may_go() {
        let want = Verdict::PassCounted(Outcome::GuardExcluded);
        check(tcp(SYN), 0, Known { bypass: true, ..APP }, want);
        check(tcp(SYN), 0, Known { interface: true, ..APP }, want);
    }

    #[test]
    fn dns_goes_to_its_server_where_it_is_captured() {
        let query = packet(Kind::Dns, 0);
        let captured = Known { dns: true, ..APP };
        let gone = Known { dns: true, ..DOWN };
        let excluded = Known { interface: true, ..captured };
        for (facts, when_down, want) in [
            (APP, WhenDown::Closed, Verdict::Pass),
            (captured, WhenDown::Closed, Verdict::ToLoopback),
            (excluded, WhenDown::Closed, Verdict::PassCounted(Outcome::GuardExcluded)),
            (captured, WhenDown::Open, Verdict::ToLoopback),
            (gone, WhenDown::Closed, Verdict::Drop(Outcome::GuardDnsHeld)),
            (gone, WhenDown::Open, Verdict::PassCounted(Outcome::GuardDnsOpen)),
        ] {
            assert_eq!(verdict(query, 0, &facts, when_down), want);
            // A mark that the pod has set changes nothing.
            assert_eq!(verdict(query, 0x111, &facts, when_down), want);
        }
    }
}
