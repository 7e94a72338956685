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

use aya_ebpf::{
    bindings::{
        TC_ACT_SHOT, TC_ACT_UNSPEC,
        sk_action::{SK_DROP, SK_PASS},
    },
    macros::{classifier, sk_lookup},
    programs::{SkLookupContext, TcContext},
};
use culvert_abi::{Addr, MARK_CAPTURED, Outcome, PodAddr};
use culvert_ebpf::{
    Family, Owner, Proxy, WhenDown,
    endpoint::{Connection, Place},
    exempt, guard,
    helpers::{self, Listener, Lookup, Skb},
    inbound::{self, Absence, Exemption, Role, TCP, Verdict},
    own_bits, packet,
};
use maps::{ADDRS, EXEMPT, LISTENERS, OPEN_WHEN_DOWN, OUTCOMES, OWN_CGROUPS, POD_ID};

culvert_ebpf::object!();

const PASS: i32 = TC_ACT_UNSPEC;
const DROP: i32 = TC_ACT_SHOT;

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
    match packet.connection(&skb) {
        Some(connection) if verdict(TCP, &connection) == Verdict::Assign(role) => {
            helpers::count(&OUTCOMES, Outcome::HoldIn);
            DROP
        }
        _ => PASS,
    }
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

/// Drops TCP that would leave the pod around the proxy. tc egress of every interface but `lo`, Linux 5.10.
///
/// Fails closed for what it cannot read (`malformed`). Lets SYNs go (`open`) where the node is to be open while the proxy
/// is gone.
#[classifier]
fn guard(ctx: TcContext) -> i32 {
    let skb = Skb(&ctx);
    let owner = || match helpers::find(&OWN_CGROUPS, &skb.cgroup_id()) {
        Some(_) => Owner::Proxy,
        None => Owner::App,
    };
    let proxy = |family| match Listener::find(&LISTENERS, Role::Outbound.slot(family)) {
        Some(_) => Proxy::Here,
        None => Proxy::Gone,
    };
    match guard::verdict(packet::parse(&skb), skb.mark(), owner, proxy, when_down()) {
        guard::Verdict::Pass => PASS,
        guard::Verdict::PassCounted(outcome) => {
            helpers::count(&OUTCOMES, outcome);
            PASS
        }
        guard::Verdict::Drop(outcome) => {
            helpers::count(&OUTCOMES, outcome);
            DROP
        }
    }
}

#[inline(always)]
fn verdict(protocol: u32, connection: &Connection) -> Verdict {
    inbound::verdict(
        protocol,
        Place::of(&connection.local.addr, is_own),
        connection.local.port,
        || Place::of(&connection.remote.addr, is_own),
        || {
            if helpers::holds(&EXEMPT, &exempt::arriving(connection)) {
                Exemption::Granted
            } else {
                Exemption::Absent
            }
        },
    )
}

#[inline(always)]
fn when_down() -> WhenDown {
    WhenDown::of(OPEN_WHEN_DOWN.load())
}

#[inline(always)]
fn is_own(addr: &Addr) -> bool {
    helpers::find(&ADDRS, &PodAddr { pod: POD_ID.load(), addr: *addr }).is_some()
}
