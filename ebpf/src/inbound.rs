// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Which listener takes this connection, or does the application?
//!
//! Whether the listener is there is the caller's question; [`without_listener`] answers for an empty slot.

use culvert_abi::{HBONE_PORT, Outcome, Slot};

use crate::{Family, WhenDown, endpoint::Place};

/// Protocol number of TCP (IANA).
pub const TCP: u32 = 6;

/// The proxy's listeners in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// For what the pod dials.
    Outbound,
    /// For plaintext that reaches the pod.
    Inbound,
    /// For HBONE that reaches the pod.
    Hbone,
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
        }
    }

    /// What counts a connection given to it.
    #[inline(always)]
    pub const fn outcome(self) -> Outcome {
        match self {
            Self::Outbound => Outcome::PickOutbound,
            Self::Inbound => Outcome::PickInbound,
            Self::Hbone => Outcome::PickHbone,
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

/// What `pick_listener` does with a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not ours to decide (not TCP, or loopback): the kernel's own look-up goes on.
    Pass,
    /// The pod connects to itself: the kernel's own look-up goes on.
    Itself,
    /// The proxy delivers to the application: the kernel's own look-up goes on.
    Exempt,
    /// The listener of this role takes it.
    Assign(Role),
}

/// Decides by protocol number and the pod's view of both ends.
///
/// `remote` and `exemption` are asked only about connections to an own address; HBONE comes first, so that a pod reaches
/// its own HBONE port as any other.
#[inline(always)]
pub fn verdict(
    protocol: u32,
    local: Place,
    port: u16,
    remote: impl FnOnce() -> Place,
    exemption: impl FnOnce() -> Exemption,
) -> Verdict {
    match local {
        _ if protocol != TCP => Verdict::Pass,
        Place::Loopback => Verdict::Pass,
        Place::Elsewhere => Verdict::Assign(Role::Outbound),
        Place::Own => match Role::at_port(port) {
            // From loopback, too: the kernel lets nobody else send from there.
            Role::Inbound if matches!(remote(), Place::Own | Place::Loopback) => Verdict::Itself,
            Role::Inbound if exemption() == Exemption::Granted => Verdict::Exempt,
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
        (Role::Outbound | Role::Hbone, _) | (Role::Inbound, WhenDown::Closed) => Absence::Drop,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UDP: u32 = 17;

    #[track_caller]
    fn check(local: Place, port: u16, remote: Place, exemption: Exemption, want: Verdict) {
        assert_eq!(verdict(TCP, local, port, || remote, || exemption), want);
    }

    #[test]
    fn only_tcp_is_picked() {
        let verdict = verdict(UDP, Place::Elsewhere, 53, || unreachable!(), || unreachable!());
        assert_eq!(verdict, Verdict::Pass);
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
        for remote in [Place::Own, Place::Loopback] {
            check(Place::Own, 80, remote, Exemption::Absent, Verdict::Itself);
        }
    }

    #[test]
    fn only_plaintext_to_the_pod_gets_past_an_empty_slot_and_only_if_open() {
        for (role, open) in [
            (Role::Outbound, Absence::Drop),
            (Role::Hbone, Absence::Drop),
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
        for role in [Role::Outbound, Role::Inbound, Role::Hbone] {
            for family in [Family::V4, Family::V6] {
                let slot = &mut taken[role.slot(family) as usize];
                assert!(!*slot, "{role:?} {family:?} shares a slot");
                *slot = true;
            }
        }
        assert_eq!(taken, [true; 6]);
    }
}
