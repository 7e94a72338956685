// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The bytes that the BPF programs and the proxy share: marks, map names, keys, values and counters.
//!
//! Nothing but layout lives here: no logic, no std. A change of any size, offset, number or name below is a change of
//! [`ABI_VERSION`], because pinned maps outlive the process that made them.

#![no_std]

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Version of everything in this crate; it names the bpffs folder that the maps are pinned under.
pub const ABI_VERSION: u32 = 2;

/// The bits of a packet or socket mark that culvert reads and writes; all others belong to whoever set them.
pub const MARK_MASK: u32 = 0xfff;

/// A captured application socket: its packets are routed to `lo`, where `pick_listener` finds them.
pub const MARK_CAPTURED: u32 = 0x111;

/// The proxy's leg to the application, from the client's address: replies are routed to `lo`.
pub const MARK_DELIVERY: u32 = 0x53a;

/// The HBONE port, terminated by the proxy in every enrolled pod.
pub const HBONE_PORT: u16 = 15008;

/// The port of DNS.
pub const DNS_PORT: u16 = 53;

/// An IPv6 address, or an IPv4 address in its v4-mapped form (RFC 4291 §2.5.5.2), in network order.
///
/// Aligned to words, because BPF copies what is not byte by byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(4))]
pub struct Addr(pub [u8; 16]);

/// Key of [`maps::ADDRS`]: an address that a pod's network namespace owns. Its value is [`ADDR_CAPTURED`] or
/// [`ADDR_EXCLUDED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct PodAddr {
    /// The pod, as [`Pod::id`].
    pub pod: u32,
    /// One of its addresses.
    pub addr: Addr,
}

/// Value of [`maps::PODS`] and [`maps::PODS_BY_ADDR`]: an enrolled pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Pod {
    /// Inode number of the pod's network namespace, unique among namespaces that exist.
    pub id: u32,
}

/// Value of [`maps::ADDRS`]: the address of an interface whose connections are captured.
pub const ADDR_CAPTURED: u8 = 1;

/// Value of [`maps::ADDRS`]: the address of interfaces that the pod excludes from capture.
pub const ADDR_EXCLUDED: u8 = 2;

/// Value of [`maps::SETTINGS`]: what differs for a pod from [`Self::NONE`], which a pod without an entry has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Settings {
    /// The constants of this type, or-ed.
    pub flags: u32,
}

impl Settings {
    /// Everything is captured but DNS.
    pub const NONE: Self = Self { flags: 0 };
    /// DNS queries of the pod are captured, by UDP and by TCP.
    pub const CAPTURE_DNS: u32 = 1;
    /// Plaintext to the pod reaches the application; port 15008 is captured still.
    pub const BYPASS_INBOUND: u32 = 2;
    /// [`maps::EXCLUSIONS`] has ports of the pod.
    pub const INBOUND_PORTS: u32 = 4;
    /// [`maps::EXCLUSIONS`] has ports that the pod dials.
    pub const OUTBOUND_PORTS: u32 = 8;
    /// [`maps::EXCLUDED_CIDRS`] has networks that the pod dials.
    pub const OUTBOUND_CIDRS: u32 = 16;
    /// [`maps::EXCLUSIONS`] has interfaces of the pod.
    pub const INTERFACES: u32 = 32;
    /// What virtual interfaces of the pod bring in is captured as the pod's own.
    pub const REROUTES: u32 = 64;

    /// Whether a flag is set.
    #[must_use]
    pub const fn has(self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// Key of [`maps::EXCLUSIONS`]: a port or an interface whose connections a pod keeps out of capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Exclusion {
    /// The pod, as [`Pod::id`].
    pub pod: u32,
    /// What `value` is: a constant of this type.
    pub kind: u32,
    /// A port in host order, or the index of an interface.
    pub value: u32,
}

impl Exclusion {
    /// A port of the pod.
    pub const INBOUND_PORT: u32 = 0;
    /// A port that the pod dials.
    pub const OUTBOUND_PORT: u32 = 1;
    /// An interface of the pod.
    pub const INTERFACE: u32 = 2;
}

/// Key of [`maps::EXCLUDED_CIDRS`], as `struct bpf_lpm_trie_key` wants it: a network that a pod dials without capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct PodNetwork {
    /// How many bits of what follows are compared: all of `pod`, and the prefix of `addr`.
    pub bits: u32,
    /// The pod, as [`Pod::id`].
    pub pod: u32,
    /// The network, or an address that is looked up.
    pub addr: Addr,
}

impl PodNetwork {
    /// [`Self::bits`] that compare `prefix` bits of the address.
    #[must_use]
    pub const fn bits(prefix: u8) -> u32 {
        u32::BITS + prefix as u32
    }
}

/// Key of [`maps::EXEMPT`]: a connection that reaches the application without capture, as the pod sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Flow {
    /// Where the SYN comes from.
    pub remote: Addr,
    /// The pod's address.
    pub local: Addr,
    /// Source port of the SYN, host order.
    pub remote_port: u16,
    /// The application's port, host order.
    pub local_port: u16,
}

/// Value of [`maps::SAVED`]: what the pod's network namespace held before enrolment, each `0`, `1` or `2` as the sysctl
/// reads, or [`Saved::ABSENT`] where it could not be read (IPv6 compiled out).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Saved {
    /// `net.ipv4.tcp_fwmark_accept`.
    pub tcp_fwmark_accept: u8,
    /// `net.ipv4.fwmark_reflect`.
    pub fwmark_reflect_v4: u8,
    /// `net.ipv6.fwmark_reflect`.
    pub fwmark_reflect_v6: u8,
    /// `net.ipv4.conf.lo.accept_local`.
    pub lo_accept_local: u8,
}

impl Saved {
    /// The setting does not exist in this namespace.
    pub const ABSENT: u8 = 0xff;
}

/// Key of the `listeners` SOCKMAP of a pod: one slot a role and address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Slot {
    /// Captured connections of the pod, IPv4.
    OutboundV4 = 0,
    /// Captured connections of the pod, IPv6.
    OutboundV6 = 1,
    /// Plaintext connections to the pod, IPv4.
    InboundV4 = 2,
    /// Plaintext connections to the pod, IPv6.
    InboundV6 = 3,
    /// HBONE connections to the pod, IPv4.
    HboneV4 = 4,
    /// HBONE connections to the pod, IPv6.
    HboneV6 = 5,
    /// Connections of the pod to name servers, IPv4.
    DnsTcpV4 = 6,
    /// Connections of the pod to name servers, IPv6.
    DnsTcpV6 = 7,
    /// Datagrams of the pod to name servers, IPv4.
    DnsUdpV4 = 8,
    /// Datagrams of the pod to name servers, IPv6.
    DnsUdpV6 = 9,
}

impl Slot {
    /// Number of slots, hence the size of the SOCKMAP.
    pub const COUNT: u32 = 10;
}

/// Names of maps, pins and programs. Operators see them in `bpftool`, so each is at most 15 bytes.
pub mod maps {
    /// `HASH<u64 netns cookie, Pod>`: enrolled pods, the commit point of an enrolment.
    pub const PODS: &str = "pods";
    /// `HASH<Addr, Pod>`: the same by address, to know what kubelet probes.
    pub const PODS_BY_ADDR: &str = "pods_by_addr";
    /// `HASH<PodAddr, u8>`: every address of every enrolled pod, and whether it is excluded.
    pub const ADDRS: &str = "addrs";
    /// `HASH<u32 pod, Settings>`: settings of enrolled pods.
    pub const SETTINGS: &str = "settings";
    /// `HASH<Exclusion, u8>`: ports and interfaces that pods keep out of capture.
    pub const EXCLUSIONS: &str = "exclusions";
    /// `LPM_TRIE<PodNetwork, u8>`: 1 for networks that pods dial without capture, 0 for one within that is captured.
    pub const EXCLUDED_CIDRS: &str = "excluded_cidrs";
    /// `SK_STORAGE<u32>`: 1 for sockets of pods whose SYN leaves without capture because a setting says so.
    pub const BYPASS: &str = "bypass";
    /// `SK_STORAGE<u64>`: the netns cookie of sockets that connect, for sockops programs that cannot read it (before 5.15),
    /// and for user space that cannot (before 5.14).
    pub const NOTED: &str = "noted";
    /// `LRU_HASH<Flow, u8>`: connections in their handshake that bypass inbound capture.
    pub const EXEMPT: &str = "exempt";
    /// `SK_STORAGE<u32>`: sockets that the proxy itself dialled.
    pub const OWN: &str = "own";
    /// `HASH<u64 cgroup id, u8>`: cgroups of culvert's own processes.
    pub const OWN_CGROUPS: &str = "own_cgroups";
    /// `PERCPU_ARRAY<u64>`: one counter an [`super::Outcome`].
    pub const OUTCOMES: &str = "outcomes";
    /// `SOCKMAP`, one a pod, keyed by [`super::Slot`].
    pub const LISTENERS: &str = "listeners";
    /// `HASH<u32 pod, Saved>`: what to restore at un-enrolment.
    pub const SAVED: &str = "saved";
}

macro_rules! outcomes {
    ($($(#[$doc:meta])* $name:ident = $index:literal, $program:literal, $outcome:literal;)+) => {
        /// What a program did with a socket or packet; index into [`maps::OUTCOMES`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Outcome {
            $($(#[$doc])* $name = $index,)+
        }

        impl Outcome {
            /// Every outcome, in index order.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Number of outcomes, hence the size of [`maps::OUTCOMES`].
            #[expect(clippy::cast_possible_truncation, reason = "there are a few dozen")]
            pub const COUNT: u32 = Self::ALL.len() as u32;

            /// The program that counts it and the label of the outcome, as metrics and `bpf-fixtures` spell them.
            pub const fn labels(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$name => ($program, $outcome),)+
                }
            }
        }
    };
}

outcomes! {
    /// An enrolled pod's `connect()` was marked for capture.
    Marked = 0, "mark_connect", "marked";
    /// The proxy's own socket: left alone.
    MarkOwn = 1, "mark_connect", "own";
    /// The destination is loopback or the pod itself: left alone.
    MarkLocal = 2, "mark_connect", "local";
    /// A stale capture mark of an earlier `connect()` was cleared.
    MarkCleared = 3, "mark_connect", "cleared";
    /// The kernel refused to set the mark: `guard` then drops the connection.
    MarkFailed = 4, "mark_connect", "failed";
    /// A socket of the proxy was tagged as ours.
    OwnTagged = 5, "mark_own", "tagged";
    /// A delivery to the application was exempted from capture.
    OwnExempted = 6, "mark_own", "exempted";
    /// A delivery closed and its exemption was removed.
    OwnReleased = 7, "mark_own", "released";
    /// The tag or the exemption could not be stored.
    OwnFailed = 8, "mark_own", "failed";
    /// A captured connection was given to the outbound listener.
    PickOutbound = 9, "pick_listener", "outbound";
    /// A plaintext connection to the pod was given to the inbound listener.
    PickInbound = 10, "pick_listener", "inbound";
    /// A connection to port 15008 was given to the HBONE listener.
    PickHbone = 11, "pick_listener", "hbone";
    /// The pod connects to itself.
    PickSelf = 12, "pick_listener", "self";
    /// An exempted connection went to the application.
    PickExempt = 13, "pick_listener", "exempt";
    /// No listener in the slot: the connection was dropped (fails closed).
    PickNoListener = 14, "pick_listener", "no_listener";
    /// The kernel refused the listener: the connection was dropped (fails closed).
    PickFailed = 15, "pick_listener", "failed";
    /// A SYN to the pod was held because no listener was there.
    HoldIn = 16, "hold_in", "held";
    /// A captured SYN was held because no listener was there.
    HoldOut = 17, "hold_out", "held";
    /// The proxy's own SYN left the pod.
    GuardOwn = 18, "guard", "own";
    /// A marked packet had lost its route to `lo` and was dropped.
    GuardRouteLost = 19, "guard", "route_lost";
    /// A SYN that escaped capture was dropped.
    GuardUncaptured = 20, "guard", "uncaptured";
    /// A TCP packet whose header could not be read was dropped.
    GuardMalformed = 21, "guard", "malformed";
    /// Plaintext to the pod went to the application, because the proxy is gone and the node is open then.
    PickOpen = 22, "pick_listener", "open";
    /// A SYN left the pod in plaintext, because the proxy is gone and the node is open then.
    GuardOpen = 23, "guard", "open";
    /// A probe by kubelet was exempted from capture.
    ProbeExempted = 24, "mark_probe", "exempted";
    /// A probe closed and its exemption was removed.
    ProbeReleased = 25, "mark_probe", "released";
    /// The exemption could not be stored: the probe is captured.
    ProbeFailed = 26, "mark_probe", "failed";
    /// The kernel refused to set `SO_REUSEADDR`: the application is told if its port is taken.
    ReuseFailed = 27, "reuse_bind", "failed";
    /// The pod excludes the destination, or the interface: left alone.
    MarkExcluded = 28, "mark_connect", "excluded";
    /// A DNS query, or a connection for queries, was given to the DNS server.
    PickDns = 29, "pick_listener", "dns";
    /// The pod takes the plaintext connection itself: it went to the application.
    PickExcluded = 30, "pick_listener", "excluded";
    /// A SYN or a DNS query left the pod, which excludes its destination or this interface.
    GuardExcluded = 31, "guard", "excluded";
    /// A DNS query was sent to `lo`.
    GuardDns = 32, "guard", "dns";
    /// A DNS query was dropped because no DNS server was there.
    GuardDnsHeld = 33, "guard", "dns_held";
    /// A DNS query left the pod, because the proxy is gone and the node is open then.
    GuardDnsOpen = 34, "guard", "dns_open";
    /// A DNS query could not be rewritten and was dropped.
    GuardDnsFailed = 35, "guard", "dns_failed";
    /// TCP that a packet socket sent around `guard` was dropped at the node's end of the interface.
    HostHandmade = 36, "guard_host", "handmade";
    /// A SYN that `guard` has not stopped was dropped there.
    HostUncaptured = 37, "guard_host", "uncaptured";
    /// A SYN whose sender is not known there passed: the device has taken its socket off.
    HostUnowned = 38, "guard_host", "unowned";
    /// What would have been dropped there passed, because the proxy is gone and the node is open then.
    HostOpen = 39, "guard_host", "open";
}

const _: () = {
    assert!(size_of::<Addr>() == 16);
    assert!(size_of::<PodAddr>() == 20);
    assert!(size_of::<Pod>() == 4);
    assert!(size_of::<Settings>() == 4);
    assert!(size_of::<Exclusion>() == 12);
    assert!(size_of::<PodNetwork>() == 24);
    assert!(size_of::<Flow>() == 36);
    assert!(size_of::<Saved>() == 4);
};

/// Checks that a type has no padding and no invalid bit pattern, then lets aya copy it to and from maps.
#[cfg(feature = "user")]
macro_rules! pod {
    ($($ty:ty),+) => {$(
        const _: () = {
            const fn plain<T: FromBytes + IntoBytes + Immutable + Copy>() {}
            plain::<$ty>();
        };
        // SAFETY: `plain` proved that every bit pattern is valid and no byte is padding.
        #[expect(unsafe_code, reason = "aya asks for the promise that zerocopy has just checked")]
        unsafe impl aya::Pod for $ty {}
    )+};
}

#[cfg(feature = "user")]
pod!(Addr, PodAddr, Pod, Settings, Exclusion, PodNetwork, Flow, Saved);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_numbered_without_gaps() {
        for (index, outcome) in Outcome::ALL.iter().enumerate() {
            assert_eq!(*outcome as usize, index);
        }
    }
}
