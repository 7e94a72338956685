// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The object that is attached once a node, at the root of cgroup2: marks what enrolled pods dial, and lets them bind
//! ports that proxied connections hold.
//!
//! Whose socket it is was decided by `mark_own` in the object `exempt`, which the kernel runs before.
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
    macros::{cgroup_sock_addr, sock_ops},
    programs::{SockAddrContext, SockOpsContext},
};
use aya_log_ebpf::warn;
use culvert_abi::{ADDR_EXCLUDED, Addr, Exclusion, Outcome, Pod, PodAddr, Settings};
use culvert_ebpf::{
    endpoint::{Connection, Place},
    helpers::{self, Event, Socket},
    outbound::{self, Excluded, Verdict},
};
use maps::{NOTED, OUTCOMES, OWN, PODS};
use shared::{ADDRS, BYPASS, EXCLUDED_CIDRS, EXCLUSIONS, SETTINGS};

culvert_ebpf::object!();

/// What a program at an address hook says of a system call that is to go on.
const ALLOW: i32 = 1;

/// What the log says where a socket's storage could not be made.
const NO_ROOM: i64 = -12;

/// Marks `connect()`s of enrolled pods, which it knows by netns cookie. Linux 5.15.
///
/// Fails open here and closed at `guard`: a socket without the mark leaves as an uncaptured SYN, which is dropped there.
#[sock_ops]
fn mark_connect(ctx: SockOpsContext) -> u32 {
    if helpers::event(&ctx) == Event::Connect
        && let Some(pod) = helpers::find(&PODS, &helpers::netns_cookie(&ctx))
        && let Some(connection) = helpers::connection(&ctx)
    {
        mark(&ctx, pod, &connection);
    }
    0
}

/// The same, for kernels before 5.15: has the cookie from what `note_netns4` and `note_netns6` noted. Linux 5.10.
#[sock_ops]
fn mark_noted(ctx: SockOpsContext) -> u32 {
    if helpers::event(&ctx) == Event::Connect
        && let Some(socket) = Socket::of(&ctx)
        && let Some(cookie) = socket.noted(&NOTED)
        && let Some(pod) = helpers::find(&PODS, &cookie)
        && let Some(connection) = helpers::connection(&ctx)
    {
        mark(&ctx, pod, &connection);
    }
    0
}

/// Notes the network namespace of sockets of enrolled pods that connect by TCP, before `mark_noted` runs for them, and of
/// those that user space wants to know it of. Linux 5.10.
///
/// Never refuses a `connect()`. Fails open here and closed at `guard`, like `mark_noted`.
#[cgroup_sock_addr(connect4)]
fn note_netns4(ctx: SockAddrContext) -> i32 {
    note(&ctx)
}

/// The same for IPv6.
#[cgroup_sock_addr(connect6)]
fn note_netns6(ctx: SockAddrContext) -> i32 {
    note(&ctx)
}

#[inline(always)]
fn note(ctx: &SockAddrContext) -> i32 {
    let cookie = helpers::netns_cookie_of_address(ctx);
    let enrolled = || helpers::find(&PODS, &cookie).is_some();
    if !helpers::note(ctx, &NOTED, cookie) && helpers::is_tcp(ctx) && enrolled() {
        helpers::note_anew(ctx, &NOTED, cookie);
    }
    ALLOW
}

/// Sets `SO_REUSEADDR` on what enrolled pods bind to a TCP port: the proxy's side of a connection to the pod has the
/// application's port, and may have it still when the application starts again. Linux 6.1.
///
/// Never refuses a bind. Fails as without it: the application is told that its port is taken (`failed`).
#[cgroup_sock_addr(bind4)]
fn reuse_bind4(ctx: SockAddrContext) -> i32 {
    reuse(&ctx)
}

/// The same for IPv6.
#[cgroup_sock_addr(bind6)]
fn reuse_bind6(ctx: SockAddrContext) -> i32 {
    reuse(&ctx)
}

#[inline(always)]
fn reuse(ctx: &SockAddrContext) -> i32 {
    if helpers::binds_tcp_port(ctx)
        && helpers::find(&PODS, &helpers::netns_cookie_of_address(ctx)).is_some()
        && helpers::reuse_address(ctx).is_err()
    {
        helpers::count(&OUTCOMES, Outcome::ReuseFailed);
    }
    ALLOW
}

#[inline(always)]
fn mark(ctx: &SockOpsContext, pod: Pod, connection: &Connection) {
    let Some(socket) = Socket::of(ctx) else { return };
    let owned = |addr: &Addr| helpers::find(&ADDRS, &PodAddr { pod: pod.id, addr: *addr });
    let before = socket.mark();
    let verdict = outbound::verdict(
        socket.owner(&OWN),
        Place::of(&connection.remote.addr, owned),
        before,
        || excluded(pod, connection, owned),
    );
    let set_mark = |mark| if mark == before { Ok(()) } else { helpers::set_mark(ctx, mark) };
    let (outcome, applied) = match verdict {
        Verdict::Own => (Outcome::MarkOwn, Ok(())),
        Verdict::Local(mark) if mark == before => (Outcome::MarkLocal, Ok(())),
        Verdict::Local(mark) => (Outcome::MarkCleared, helpers::set_mark(ctx, mark)),
        Verdict::Exclude { mark, bypass } => (
            Outcome::MarkExcluded,
            socket.set_bypass(&BYPASS, bypass).ok_or(NO_ROOM).and_then(|()| set_mark(mark)),
        ),
        Verdict::Capture(mark) => (
            Outcome::Marked,
            socket
                .set_bypass(&BYPASS, false)
                .ok_or(NO_ROOM)
                .and_then(|()| helpers::unbind_device(ctx))
                .and_then(|()| helpers::set_mark(ctx, mark)),
        ),
    };
    match applied {
        Ok(()) => helpers::count(&OUTCOMES, outcome),
        Err(errno) => {
            helpers::count(&OUTCOMES, Outcome::MarkFailed);
            warn!(ctx, "a connect() stays unmarked: error {}", errno);
        }
    }
}

/// Whether the pod's settings keep the connection out of capture.
#[inline(always)]
fn excluded(pod: Pod, connection: &Connection, owned: impl Fn(&Addr) -> Option<u8>) -> Excluded {
    let settings = helpers::find(&SETTINGS, &pod.id).unwrap_or(Settings::NONE);
    let port = || Exclusion {
        pod: pod.id,
        kind: Exclusion::OUTBOUND_PORT,
        value: connection.remote.port.into(),
    };
    if settings.has(Settings::OUTBOUND_PORTS) && helpers::find(&EXCLUSIONS, &port()).is_some()
        || settings.has(Settings::OUTBOUND_CIDRS)
            && helpers::in_networks(&EXCLUDED_CIDRS, pod.id, connection.remote.addr)
    {
        return Excluded::ByDestination;
    }
    if settings.has(Settings::INTERFACES) && owned(&connection.local.addr) == Some(ADDR_EXCLUDED) {
        return Excluded::BySource;
    }
    Excluded::No
}
