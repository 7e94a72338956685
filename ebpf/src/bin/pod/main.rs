// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The object that is loaded once a pod and attached in its network namespace: picks listeners, holds and guards.
//!
//! It cannot see which process is behind a packet: that is told by `exempt`, `own_cgroups` and the marks.
#![no_std]
#![no_main]
#![expect(
    clippy::inline_always,
    reason = "kernels before 5.13 refuse functions of a program that take pointers"
)]

mod maps;
#[path = "../shared/maps.rs"]
mod shared;

use aya_ebpf::{
    bindings::{
        TC_ACT_SHOT, TC_ACT_UNSPEC,
        sk_action::{SK_DROP, SK_PASS},
    },
    macros::{classifier, sk_lookup},
    programs::{SkLookupContext, TcContext},
};
use culvert_abi::{Addr, Exclusion, MARK_CAPTURED, Outcome, PodAddr, Settings};
use culvert_ebpf::{
    Family, Owner, Proxy, WhenDown,
    endpoint::{self, Connection, Place},
    exempt, guard,
    helpers::{self, Listener, Lookup, Skb},
    host,
    inbound::{self, Absence, Exemption, Role, TCP, Verdict},
    own_bits,
    packet::{self, Packet},
    with_bits,
};
use maps::{EXEMPT, LISTENERS, OPEN_WHEN_DOWN, OUTCOMES, OWN_CGROUPS, POD_ID};
use shared::{ADDRS, BYPASS, EXCLUDED_CIDRS, EXCLUSIONS, SETTINGS};

culvert_ebpf::object!();

const PASS: i32 = TC_ACT_UNSPEC;
const DROP: i32 = TC_ACT_SHOT;
/// Length of an Ethernet header.
const ETHERNET: u32 = 14;

/// Gives a new connection to the proxy's listener, or leaves it to the application. `sk_lookup`, Linux 5.10.
///
/// Fails closed: an empty slot, or a listener that the kernel refuses, drops (`no_listener`, `failed`), unless the node
/// is to be open while the proxy is gone: then plaintext to the pod passes an empty slot (`open`).
#[sk_lookup]
fn pick_listener(ctx: SkLookupContext) -> u32 {
    let Some(lookup) = Lookup::of(&ctx) else { return SK_PASS };
    let (answer, outcome) = match verdict(lookup.protocol, &lookup.connection) {
        Verdict::Pass => return SK_PASS,
        Verdict::Itself => (SK_PASS, Outcome::PickSelf),
        Verdict::Exempt => (SK_PASS, Outcome::PickExempt),
        Verdict::Excluded => (SK_PASS, Outcome::PickExcluded),
        Verdict::Assign(role) => match Listener::find(&LISTENERS, role.slot(lookup.family)) {
            None => match inbound::without_listener(role, when_down()) {
                Absence::Drop => (SK_DROP, Outcome::PickNoListener),
                Absence::Pass => (SK_PASS, Outcome::PickOpen),
            },
            Some(listener) if listener.assign(&ctx).is_err() => (SK_DROP, Outcome::PickFailed),
            Some(_) => (SK_PASS, role.outcome()),
        },
    };
    helpers::count(&OUTCOMES, outcome);
    answer
}

/// Drops a SYN to the pod while `pick_listener` would find no listener: the peer retries instead of being refused.
/// tc ingress of every interface but `lo`, Linux 5.10.
///
/// Fails open: what it lets through by mistake is dropped by `pick_listener`, with a RST.
#[classifier]
fn hold_in(ctx: TcContext) -> i32 {
    let skb = Skb(&ctx);
    let packet = packet::parse(&skb);
    if !packet.opens() {
        return PASS;
    }
    let role = Role::at_port(packet.destination_port);
    if Listener::find(&LISTENERS, role.slot(packet.family)).is_some() {
        return PASS;
    }
    let Some(connection) = packet.connection(&skb) else { return PASS };
    let held = match verdict(TCP, &connection) {
        Verdict::Assign(Role::Inbound | Role::Hbone) => true,
        // All listeners come and go together.
        Verdict::Assign(_) => settings().has(Settings::REROUTES),
        _ => false,
    };
    if !held {
        return PASS;
    }
    helpers::count(&OUTCOMES, Outcome::HoldIn);
    DROP
}

/// Drops a captured IPv6 SYN while there is no outbound listener. tc ingress of `lo`, Linux 5.10.
///
/// Only IPv6: a dropped look-up of IPv4 sends no RST from an address that is not the pod's. Fails open, as `hold_in`.
#[classifier]
fn hold_out(ctx: TcContext) -> i32 {
    let skb = Skb(&ctx);
    if own_bits(skb.mark()) != MARK_CAPTURED {
        return PASS;
    }
    let packet = packet::parse(&skb);
    if packet.family == Family::V4 || !packet.opens() {
        return PASS;
    }
    if Listener::find(&LISTENERS, Role::Outbound.slot(Family::V6)).is_some() {
        return PASS;
    }
    helpers::count(&OUTCOMES, Outcome::HoldOut);
    DROP
}

/// Drops TCP that would leave the pod around the proxy, and sends DNS queries to `lo` where they are captured. tc egress of
/// every interface but `lo`, Linux 5.10.
///
/// Fails closed for what it cannot read (`malformed`). Lets SYNs go (`open`) where the node is to be open while the proxy
/// is gone, and DNS queries (`dns_open`).
#[classifier]
fn guard(ctx: TcContext) -> i32 {
    let skb = Skb(&ctx);
    let packet = packet::parse_with_dns(&skb);
    let (answer, outcome) = match guard::verdict(packet, skb.mark(), &Facts(&skb), when_down()) {
        guard::Verdict::Pass => return PASS,
        guard::Verdict::PassCounted(outcome) => (PASS, outcome),
        guard::Verdict::Drop(outcome) => (DROP, outcome),
        guard::Verdict::ToLoopback => match skb.to_loopback(with_bits(skb.mark(), MARK_CAPTURED)) {
            Some(redirected) => (redirected, Outcome::GuardDns),
            None => (DROP, Outcome::GuardDnsFailed),
        },
    };
    helpers::count(&OUTCOMES, outcome);
    answer
}

/// Drops TCP that a packet socket sent around `guard`. tc ingress of the node's end of the pod's interface, Linux 5.10.
///
/// Fails closed for what it cannot read of such a socket's. Fails open for what has no socket any more (`unowned`).
#[classifier]
fn guard_host(ctx: TcContext) -> i32 {
    let skb = Skb(&ctx);
    let packet = packet::parse(&skb);
    let (answer, outcome) = match host::verdict(packet, skb.maker(), &Facts(&skb), when_down()) {
        host::Verdict::Pass => return PASS,
        host::Verdict::PassCounted(outcome) => (PASS, outcome),
        host::Verdict::Drop(outcome) => (DROP, outcome),
    };
    helpers::count(&OUTCOMES, outcome);
    answer
}

/// What `guard` and `guard_host` know beyond the packet.
struct Facts<'a>(&'a Skb<'a>);

impl guard::Origin for Facts<'_> {
    #[inline(always)]
    fn owner(&self) -> Owner {
        match helpers::find(&OWN_CGROUPS, &self.0.cgroup_id()) {
            Some(_) => Owner::Proxy,
            None => Owner::App,
        }
    }

    #[inline(always)]
    fn bypasses(&self) -> bool {
        self.0.bypasses(&BYPASS)
    }

    #[inline(always)]
    fn proxy(&self, family: Family) -> Proxy {
        listens(Role::Outbound, family)
    }
}

impl guard::Facts for Facts<'_> {
    #[inline(always)]
    fn excludes_interface(&self) -> bool {
        settings().has(Settings::INTERFACES)
            && is_excluded(Exclusion::INTERFACE, self.0.interface())
    }

    /// One that is the pod's own, with an Ethernet header, without which it cannot arrive at `lo`; and that an answer which
    /// comes by `lo` finds the way back to.
    #[inline(always)]
    fn captures_dns(&self, packet: Packet) -> bool {
        let settings = settings();
        if !settings.has(Settings::CAPTURE_DNS)
            || packet.link_length(self.0) != Some(ETHERNET)
            || self.0.is_bound()
        {
            return false;
        }
        let Some(Connection { local: server, remote: client }) = packet.connection(self.0) else {
            return false;
        };
        place(&client.addr).is_inside()
            && !endpoint::is_link_local_v6(&server.addr)
            && !(settings.has(Settings::OUTBOUND_CIDRS)
                && helpers::in_networks(&EXCLUDED_CIDRS, POD_ID.load(), server.addr))
    }

    #[inline(always)]
    fn dns_server(&self, family: Family) -> Proxy {
        listens(Role::DnsUdp, family)
    }
}

#[inline(always)]
fn listens(role: Role, family: Family) -> Proxy {
    match Listener::find(&LISTENERS, role.slot(family)) {
        Some(_) => Proxy::Here,
        None => Proxy::Gone,
    }
}

#[inline(always)]
fn verdict(protocol: u32, connection: &Connection) -> Verdict {
    inbound::verdict(
        protocol,
        || place(&connection.local.addr),
        connection.local.port,
        &OfPod,
        || place(&connection.remote.addr),
        || {
            if helpers::holds(&EXEMPT, &exempt::arriving(connection)) {
                Exemption::Granted
            } else {
                Exemption::Absent
            }
        },
    )
}

/// What the pod's settings say.
struct OfPod;

impl inbound::Settings for OfPod {
    #[inline(always)]
    fn captures_dns(&self) -> bool {
        settings().has(Settings::CAPTURE_DNS)
    }

    #[inline(always)]
    fn excludes_inbound(&self, port: u16) -> bool {
        let settings = settings();
        settings.has(Settings::BYPASS_INBOUND)
            || settings.has(Settings::INBOUND_PORTS)
                && is_excluded(Exclusion::INBOUND_PORT, port.into())
    }
}

#[inline(always)]
fn settings() -> Settings {
    helpers::find(&SETTINGS, &POD_ID.load()).unwrap_or(Settings::NONE)
}

#[inline(always)]
fn is_excluded(kind: u32, value: u32) -> bool {
    helpers::find(&EXCLUSIONS, &Exclusion { pod: POD_ID.load(), kind, value }).is_some()
}

#[inline(always)]
fn when_down() -> WhenDown {
    WhenDown::of(OPEN_WHEN_DOWN.load())
}

#[inline(always)]
fn place(addr: &Addr) -> Place {
    Place::of(addr, |addr| helpers::find(&ADDRS, &PodAddr { pod: POD_ID.load(), addr: *addr }))
}
