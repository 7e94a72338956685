// SPDX-License-Identifier: GPL-2.0 OR MIT
//! May this packet, which has left the pod, enter the node?
//!
//! What `guard` has seen it does not judge again: this is for frames that a packet socket sent around it. A packet keeps
//! its socket on the way through a veth pair, but not its mark.

use culvert_abi::Outcome;

use crate::{
    Owner, Proxy, WhenDown,
    guard::Origin,
    packet::{Kind, Packet},
};

/// What `guard_host` does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it go.
    Pass,
    /// Let it go, and count it.
    PassCounted(Outcome),
    /// Drop it, and count it.
    Drop(Outcome),
}

/// What a frame's socket tells of who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// A socket of IP: the kernel made the headers, or `guard` has seen those that it did not make.
    Kernel,
    /// A socket that takes whole frames (`AF_PACKET`, `AF_XDP`).
    Hand,
    /// There is no socket: the kernel answers for a closed one, or something on the way has taken it off.
    Unknown,
}

/// Decides by the packet, its socket, and the facts, which are asked only about what would be dropped: never for a packet
/// of an established flow that the kernel made. While there is no proxy and [`WhenDown::Open`] says so, all may go.
#[inline(always)]
pub fn verdict(packet: Packet, maker: Maker, facts: &impl Origin, when_down: WhenDown) -> Verdict {
    let outcome = match (packet.kind, maker) {
        (Kind::Tcp | Kind::Malformed, Maker::Hand) => Outcome::HostHandmade,
        (Kind::Tcp, Maker::Kernel) if packet.opens() => Outcome::HostUncaptured,
        // Dropped, it would cut off every pod of a node whose devices lose the sockets of what they carry.
        (Kind::Tcp, Maker::Unknown) if packet.opens() => {
            return Verdict::PassCounted(Outcome::HostUnowned);
        }
        _ => return Verdict::Pass,
    };
    if facts.owner() == Owner::Proxy {
        return Verdict::Pass;
    }
    // Of the pod's settings only those that a socket bears are known here: an excluded interface is left unguarded.
    if outcome == Outcome::HostUncaptured && facts.bypasses() {
        return Verdict::Pass;
    }
    if when_down == WhenDown::Open && facts.proxy(packet.family) == Proxy::Gone {
        return Verdict::PassCounted(Outcome::HostOpen);
    }
    Verdict::Drop(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{ACK, NETWORK, Position, SYN};
    use crate::{Family, guard::tests::Unasked};

    const RST: u8 = 0x04;

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
        bypass: bool,
        proxy: Proxy,
    }

    const APP: Known = Known { owner: Owner::App, bypass: false, proxy: Proxy::Here };
    const PROXY: Known = Known { owner: Owner::Proxy, ..APP };
    const BYPASS: Known = Known { bypass: true, ..APP };

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

    #[track_caller]
    fn check(packet: Packet, maker: Maker, facts: Known, want: Verdict) {
        assert_eq!(verdict(packet, maker, &facts, WhenDown::Open), want);
        let gone = Known { proxy: Proxy::Gone, ..facts };
        assert_eq!(verdict(packet, maker, &gone, WhenDown::Closed), want);
    }

    #[test]
    fn established_flows_and_other_protocols_are_not_looked_up() {
        for (packet, maker) in [
            (tcp(ACK), Maker::Kernel),
            (tcp(SYN | ACK), Maker::Kernel),
            (tcp(RST), Maker::Kernel),
            (tcp(ACK), Maker::Unknown),
            (packet(Kind::Malformed, 0), Maker::Kernel),
            (packet(Kind::Other, 0), Maker::Hand),
            (packet(Kind::Dns, 0), Maker::Hand),
        ] {
            assert_eq!(verdict(packet, maker, &Unasked, WhenDown::Open), Verdict::Pass);
        }
    }

    #[test]
    fn tcp_that_was_made_by_hand_is_dropped_whatever_it_is() {
        for packet in [tcp(SYN), tcp(ACK), tcp(SYN | ACK), tcp(RST), packet(Kind::Malformed, 0)] {
            for facts in [APP, BYPASS] {
                check(packet, Maker::Hand, facts, Verdict::Drop(Outcome::HostHandmade));
            }
        }
    }

    #[test]
    fn a_syn_is_dropped_unless_it_is_the_proxys_or_excluded() {
        check(tcp(SYN), Maker::Kernel, APP, Verdict::Drop(Outcome::HostUncaptured));
        check(tcp(SYN), Maker::Kernel, PROXY, Verdict::Pass);
        check(tcp(SYN), Maker::Kernel, BYPASS, Verdict::Pass);
    }

    #[test]
    fn a_syn_of_nobody_passes_and_is_counted() {
        let want = Verdict::PassCounted(Outcome::HostUnowned);
        assert_eq!(verdict(tcp(SYN), Maker::Unknown, &Unasked, WhenDown::Closed), want);
    }

    #[test]
    fn all_may_go_while_the_proxy_is_gone_and_the_node_is_open_then() {
        let down = Known { proxy: Proxy::Gone, ..APP };
        for maker in [Maker::Kernel, Maker::Hand] {
            let open = verdict(tcp(SYN), maker, &down, WhenDown::Open);
            assert_eq!(open, Verdict::PassCounted(Outcome::HostOpen));
        }
    }
}
