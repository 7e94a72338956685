// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The object that is attached to the proxy's own cgroup: its attach point is its authority to say "ours".
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
    exempt,
    helpers::{self, Event, Socket},
};
use maps::{EXEMPT, OUTCOMES, OWN};

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

#[inline(always)]
fn tag(ctx: &SockOpsContext) {
    let Some(socket) = Socket::of(ctx) else { return };
    if socket.tag(&OWN).is_none() {
        helpers::count(&OUTCOMES, Outcome::OwnFailed);
        return;
    }
    helpers::count(&OUTCOMES, Outcome::OwnTagged);
    if exempt::is_delivery(socket.mark()) {
        exempt(ctx);
    }
}

#[inline(always)]
fn exempt(ctx: &SockOpsContext) {
    let Some(connection) = helpers::connection(ctx) else { return };
    match EXEMPT
        .insert(exempt::dialled(&connection), 1, 0)
        .and_then(|()| helpers::report_close(ctx))
    {
        Ok(()) => helpers::count(&OUTCOMES, Outcome::OwnExempted),
        Err(errno) => {
            helpers::count(&OUTCOMES, Outcome::OwnFailed);
            warn!(ctx, "a delivery stays captured: error {}", errno);
        }
    }
}

#[inline(always)]
fn release(ctx: &SockOpsContext) {
    if let Some(connection) = helpers::connection(ctx)
        && EXEMPT.remove(exempt::dialled(&connection)).is_ok()
    {
        helpers::count(&OUTCOMES, Outcome::OwnReleased);
    }
}
