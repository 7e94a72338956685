// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The object that is attached to cgroups of the proxy and of kubelet: the attach point is its authority to say what is
//! not captured.
//!
//! What follows from that is decided by `node` (never captured) and `pod` (delivered to the application).
#![no_std]
#![no_main]
#![expect(
    clippy::inline_always,
    reason = "kernels before 5.13 refuse functions of a program that take pointers"
)]

mod maps;

use aya_ebpf::{macros::sock_ops, programs::SockOpsContext};
use aya_log_ebpf::warn;
use culvert_abi::Outcome;
use culvert_ebpf::{
    endpoint::Connection,
    exempt,
    helpers::{self, Event, Socket},
};
use maps::{EXEMPT, OUTCOMES, OWN, PODS_BY_ADDR};

culvert_ebpf::object!();

/// Tags the proxy's sockets, and exempts its deliveries to applications until they close. Linux 5.10.
///
/// Fails closed: an untagged socket of the proxy would be captured like the pod's, which `failed` counts.
#[sock_ops]
fn mark_own(ctx: SockOpsContext) -> u32 {
    match helpers::event(&ctx) {
        Event::Connect => tag(&ctx),
        Event::Close => release(&ctx),
        Event::Other => {}
    }
    0
}

/// Exempts kubelet's probes of enrolled pods until they close. Linux 5.10.
///
/// Fails closed: a probe that is not exempted is captured, and judged by policy as any other connection.
#[sock_ops]
fn mark_probe(ctx: SockOpsContext) -> u32 {
    match helpers::event(&ctx) {
        Event::Connect => exempt_probe(&ctx),
        Event::Close => {
            if forget(&ctx) {
                helpers::count(&OUTCOMES, Outcome::ProbeReleased);
            }
        }
        Event::Other => {}
    }
    0
}

#[inline(always)]
fn exempt_probe(ctx: &SockOpsContext) {
    let Some(connection) = helpers::connection(ctx) else { return };
    // Whatever else kubelet dials needs no room in the map.
    if helpers::find(&PODS_BY_ADDR, &connection.remote.addr).is_none() {
        return;
    }
    let outcome = match exempt(ctx, &connection) {
        Ok(()) => Outcome::ProbeExempted,
        Err(errno) => {
            warn!(ctx, "a probe stays captured: error {}", errno);
            Outcome::ProbeFailed
        }
    };
    helpers::count(&OUTCOMES, outcome);
}

#[inline(always)]
fn tag(ctx: &SockOpsContext) {
    let Some(socket) = Socket::of(ctx) else { return };
    if socket.tag(&OWN).is_none() {
        helpers::count(&OUTCOMES, Outcome::OwnFailed);
        return;
    }
    helpers::count(&OUTCOMES, Outcome::OwnTagged);
    if exempt::is_delivery(socket.mark()) {
        exempt_delivery(ctx);
    }
}

#[inline(always)]
fn exempt_delivery(ctx: &SockOpsContext) {
    let Some(connection) = helpers::connection(ctx) else { return };
    match exempt(ctx, &connection) {
        Ok(()) => helpers::count(&OUTCOMES, Outcome::OwnExempted),
        Err(errno) => {
            helpers::count(&OUTCOMES, Outcome::OwnFailed);
            warn!(ctx, "a delivery stays captured: error {}", errno);
        }
    }
}

#[inline(always)]
fn release(ctx: &SockOpsContext) {
    if forget(ctx) {
        helpers::count(&OUTCOMES, Outcome::OwnReleased);
    }
}

#[inline(always)]
fn exempt(ctx: &SockOpsContext, connection: &Connection) -> Result<(), i32> {
    EXEMPT.insert(exempt::dialled(connection), 1, 0).and_then(|()| helpers::report_close(ctx))
}

/// Whether there was an exemption.
#[inline(always)]
fn forget(ctx: &SockOpsContext) -> bool {
    helpers::connection(ctx)
        .is_some_and(|connection| EXEMPT.remove(exempt::dialled(&connection)).is_ok())
}
