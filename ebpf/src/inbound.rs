// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Which listener takes this connection, or does the application?
//!
//! Whether the listener is there is the caller's question; [`without_listener`] answers for an empty slot.

use culvert_abi::{DNS_PORT, HBONE_PORT, Outcome, Slot};

use crate::{Family, WhenDown, endpoint::Place};

/// Protocol number of TCP (IANA).
pub const TCP: u32 = 6;
/// Protocol number of UDP (IANA).
pub const UDP: u32 = 17;

/// The proxy's listeners in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// For what the pod dials.
    Outbound,
    /// For plaintext that reaches the pod.
    Inbound,
    /// For HBONE that reaches the pod.
    Hbone,
    /// For connections of the pod to name servers.
    DnsTcp,
    /// For queries of the pod to name servers.
    DnsUdp,
}

impl Role {
    /// The role for a connection that is addressed to the pod.
    #[inline(always)]
    pub const fn at_port(port: u16) -> Self {
        if port == HBONE_PORT { Self::Hbone } else { Self::Inbound }
    }

    /// Where its listener of that family is.
    #[inline(always)]
    pub const fn slot(self, family: Family) -> Slot {
        match (self, family) {
            (Self::Outbound, Family::V4) => Slot::OutboundV4,
            (Self::Outbound, Family::V6) => Slot::OutboundV6,
            (Self::Inbound, Family::V4) => Slot::InboundV4,
            (Self::Inbound, Family::V6) => Slot::InboundV6,
            (Self::Hbone, Family::V4) => Slot::HboneV4,
            (Self::Hbone, Family::V6) => Slot::HboneV6,
            (Self::DnsTcp, Family::V4) => Slot::DnsTcpV4,
            (Self::DnsTcp, Family::V6) => Slot::DnsTcpV6,
            (Self::DnsUdp, Family::V4) => Slot::DnsUdpV4,
            (Self::DnsUdp, Family::V6) => Slot::DnsUdpV6,
        }
    }

    /// What counts a connection given to it.
    #[inline(always)]
    pub const fn outcome(self) -> Outcome {
        match self {
            Self::Outbound => Outcome::PickOutbound,
            Self::Inbound => Outcome::PickInbound,
            Self::Hbone => Outcome::PickHbone,
            Self::DnsTcp | Self::DnsUdp => Outcome::PickDns,
        }
    }
}

/// Whether `exempt` holds the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exemption {
    /// It does.
    Granted,
    /// It does not.
    Absent,
}

/// What a pod's settings say about a connection. Asked only where the answer matters.
pub trait Settings {
    /// Whether DNS of the pod is captured.
    fn captures_dns(&self) -> bool;

    /// Whether the pod takes plaintext to this port of its own itself.
    fn excludes_inbound(&self, port: u16) -> bool;
}

/// What `pick_listener` does with a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not ours to decide (loopback, or a protocol that is not captured): the kernel's own look-up goes on.
    Pass,
    /// The pod connects to itself: the kernel's own look-up goes on.
    Itself,
    /// The proxy delivers to the application: the kernel's own look-up goes on.
    Exempt,
    /// The pod takes it without the proxy: the kernel's own look-up goes on.
    Excluded,
    /// The listener of this role takes it.
    Assign(Role),
}

/// Decides by protocol number and the pod's view of both ends.
///
/// `remote` and `exemption` are asked only about connections to an own address; HBONE comes first, so that a pod reaches
/// its own HBONE port as any other. Of UDP nothing is asked but where port 53 is.
#[inline(always)]
pub fn verdict(
    protocol: u32,
    local: impl FnOnce() -> Place,
    port: u16,
    settings: &impl Settings,
    remote: impl FnOnce() -> Place,
    exemption: impl FnOnce() -> Exemption,
) -> Verdict {
    match protocol {
        TCP => {}
        UDP if port == DNS_PORT && settings.captures_dns() && local() == Place::Elsewhere => {
            return Verdict::Assign(Role::DnsUdp);
        }
        _ => return Verdict::Pass,
    }
    match local() {
        Place::Loopback => Verdict::Pass,
        Place::Elsewhere if port == DNS_PORT && settings.captures_dns() => {
            Verdict::Assign(Role::DnsTcp)
        }
        Place::Elsewhere => Verdict::Assign(Role::Outbound),
        own => match Role::at_port(port) {
            // From loopback, too: the kernel lets nobody else send from there.
            Role::Inbound if remote().is_inside() => Verdict::Itself,
            Role::Inbound if exemption() == Exemption::Granted => Verdict::Exempt,
            Role::Inbound if own == Place::Excluded || settings.excludes_inbound(port) => {
                Verdict::Excluded
            }
            role => Verdict::Assign(role),
        },
    }
}

/// What becomes of a connection whose listener is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// It is dropped.
    Drop,
    /// The kernel's own look-up goes on.
    Pass,
}

/// Decides about an empty slot. What was captured cannot be let go any more, and HBONE is nothing for an application;
/// plaintext to the pod may reach it where the node is open while the proxy is gone.
#[inline(always)]
pub fn without_listener(role: Role, when_down: WhenDown) -> Absence {
    match (role, when_down) {
        (Role::Inbound, WhenDown::Open) => Absence::Pass,
        (Role::Inbound, WhenDown::Closed)
        | (Role::Outbound | Role::Hbone | Role::DnsTcp | Role::DnsUdp, _) => Absence::Drop,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// DNS is captured or not, and one port is excluded.
    struct Set {
        dns: bool,
        port: u16,
    }

    impl Settings for Set {
        fn captures_dns(&self) -> bool {
            self.dns
        }

        fn excludes_inbound(&self, port: u16) -> bool {
            port == self.port
        }
    }

    const NOTHING: Set = Set { dns: false, port: 0 };
    const DNS: Set = Set { dns: true, port: 0 };

    #[track_caller]
    fn check(local: Place, port: u16, remote: Place, exemption: Exemption, want: Verdict) {
        assert_eq!(verdict(TCP, || local, port, &NOTHING, || remote, || exemption), want);
    }

    #[track_caller]
    fn decide(protocol: u32, local: Place, port: u16, settings: &Set) -> Verdict {
        let remote = || Place::Elsewhere;
        verdict(protocol, || local, port, settings, remote, || Exemption::Absent)
    }

    #[test]
    fn other_protocols_are_not_looked_up() {
        let place = || unreachable!("no look-up");
        let exemption = || unreachable!("no look-up");
        for (protocol, port) in [(UDP, 443), (1, 53), (132, 53)] {
            let verdict = verdict(protocol, place, port, &DNS, place, exemption);
            assert_eq!(verdict, Verdict::Pass);
        }
        assert_eq!(verdict(UDP, place, 53, &NOTHING, place, exemption), Verdict::Pass);
    }

    #[test]
    fn dns_that_leaves_the_pod_is_the_dns_servers_where_it_is_captured() {
        use Place::{Elsewhere, Loopback, Own};
        for (protocol, local, settings, want) in [
            (UDP, Elsewhere, &DNS, Verdict::Assign(Role::DnsUdp)),
            (UDP, Elsewhere, &NOTHING, Verdict::Pass),
            (UDP, Own, &DNS, Verdict::Pass),
            (UDP, Loopback, &DNS, Verdict::Pass),
            (TCP, Elsewhere, &DNS, Verdict::Assign(Role::DnsTcp)),
            (TCP, Elsewhere, &NOTHING, Verdict::Assign(Role::Outbound)),
            (TCP, Own, &DNS, Verdict::Assign(Role::Inbound)),
            (TCP, Loopback, &DNS, Verdict::Pass),
        ] {
            assert_eq!(decide(protocol, local, 53, settings), want, "{protocol} {local:?}");
        }
        assert_eq!(decide(TCP, Elsewhere, 853, &DNS), Verdict::Assign(Role::Outbound));
    }

    #[test]
    fn what_a_pod_takes_itself_is_its_own_but_never_hbone() {
        let set = Set { dns: false, port: 80 };
        assert_eq!(decide(TCP, Place::Own, 80, &set), Verdict::Excluded);
        assert_eq!(decide(TCP, Place::Own, 81, &set), Verdict::Assign(Role::Inbound));
        assert_eq!(decide(TCP, Place::Elsewhere, 80, &set), Verdict::Assign(Role::Outbound));
        let hbone = Set { dns: false, port: 15008 };
        assert_eq!(decide(TCP, Place::Own, 15008, &hbone), Verdict::Assign(Role::Hbone));
    }

    #[test]
    fn an_excluded_interface_keeps_its_plaintext_but_not_hbone() {
        assert_eq!(decide(TCP, Place::Excluded, 80, &NOTHING), Verdict::Excluded);
        let hbone = Verdict::Assign(Role::Hbone);
        assert_eq!(decide(TCP, Place::Excluded, 15008, &NOTHING), hbone);
    }

    #[test]
    fn loopback_is_the_applications() {
        check(Place::Loopback, 15008, Place::Loopback, Exemption::Absent, Verdict::Pass);
    }

    #[test]
    fn what_leaves_the_pod_is_outbound_whatever_its_port() {
        for port in [80, 15008] {
            check(
                Place::Elsewhere,
                port,
                Place::Own,
                Exemption::Granted,
                Verdict::Assign(Role::Outbound),
            );
        }
    }

    #[test]
    fn hbone_is_the_proxys_even_from_the_pod_itself_or_exempted() {
        for remote in [Place::Own, Place::Loopback, Place::Elsewhere] {
            check(Place::Own, 15008, remote, Exemption::Granted, Verdict::Assign(Role::Hbone));
        }
    }

    #[test]
    fn a_pod_reaches_itself() {
        for remote in [Place::Own, Place::Loopback, Place::Excluded] {
            check(Place::Own, 80, remote, Exemption::Absent, Verdict::Itself);
        }
    }

    #[test]
    fn only_plaintext_to_the_pod_gets_past_an_empty_slot_and_only_if_open() {
        for (role, open) in [
            (Role::Outbound, Absence::Drop),
            (Role::Hbone, Absence::Drop),
            (Role::DnsTcp, Absence::Drop),
            (Role::DnsUdp, Absence::Drop),
            (Role::Inbound, Absence::Pass),
        ] {
            assert_eq!(without_listener(role, WhenDown::Open), open, "{role:?}");
            assert_eq!(without_listener(role, WhenDown::Closed), Absence::Drop, "{role:?}");
        }
    }

    #[test]
    fn a_delivery_reaches_the_application() {
        check(Place::Own, 80, Place::Elsewhere, Exemption::Granted, Verdict::Exempt);
    }

    #[test]
    fn plaintext_to_the_pod_is_inbound() {
        check(Place::Own, 80, Place::Elsewhere, Exemption::Absent, Verdict::Assign(Role::Inbound));
    }

    #[test]
    fn every_role_and_family_has_a_slot_of_its_own() {
        let mut taken = [false; Slot::COUNT as usize];
        let roles = [Role::Outbound, Role::Inbound, Role::Hbone, Role::DnsTcp, Role::DnsUdp];
        for role in roles {
            for family in [Family::V4, Family::V6] {
                let slot = &mut taken[role.slot(family) as usize];
                assert!(!*slot, "{role:?} {family:?} shares a slot");
                *slot = true;
            }
        }
        assert_eq!(taken, [true; Slot::COUNT as usize]);
    }
}
