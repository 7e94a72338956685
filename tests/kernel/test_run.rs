//! `BPF_PROG_TEST_RUN` for `sk_lookup`, which aya does not offer, and contexts for those that it does.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, BorrowedFd},
};

/// `enum bpf_cmd` of `linux/bpf.h`.
const BPF_PROG_TEST_RUN: libc::c_long = 10;

/// Of the kernel's own numbers, which `libc` leaves out.
pub(crate) const ENOTSUPP: i32 = 524;

/// `struct bpf_sk_lookup`, all of it.
#[derive(Default)]
#[repr(C)]
struct SkLookup {
    cookie: u64,
    family: u32,
    protocol: u32,
    remote_ip4: [u8; 4],
    remote_ip6: [u8; 16],
    remote_port: [u8; 2],
    pad: u16,
    local_ip4: [u8; 4],
    local_ip6: [u8; 16],
    local_port: u32,
    ingress_ifindex: u32,
    /// Named, because the kernel refuses padding that is not zero.
    end: u32,
}

/// `union bpf_attr`, the `test` member.
#[derive(Default)]
#[repr(C)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    end: u32,
}

/// What an `sk_lookup` program answered.
pub(crate) struct Answer {
    /// `SK_PASS` (1) or `SK_DROP` (0).
    pub(crate) action: u32,
    /// Cookie of the socket that it assigned, 0 for none.
    pub(crate) cookie: u64,
}

/// Asks `program` about one packet. Linux 5.14 or newer; [`ENOTSUPP`] before.
pub(crate) fn sk_lookup(
    program: BorrowedFd<'_>,
    protocol: u8,
    remote: SocketAddr,
    local: SocketAddr,
) -> io::Result<Answer> {
    let input = context(protocol, remote, local);
    let mut output = SkLookup::default();
    let size = u32::try_from(size_of::<SkLookup>()).unwrap();
    let mut attr = TestRun {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        repeat: 1,
        ctx_size_in: size,
        ctx_size_out: size,
        ctx_in: (&raw const input) as u64,
        ctx_out: (&raw mut output) as u64,
        ..TestRun::default()
    };
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given; both contexts outlive the call and have the
    // sizes that it states.
    #[expect(unsafe_code, reason = "aya has no test run for sk_lookup programs")]
    let rc = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw mut attr, size_of::<TestRun>())
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Answer { action: attr.retval, cookie: output.cookie })
}

fn context(protocol: u8, remote: SocketAddr, local: SocketAddr) -> SkLookup {
    let mut context = SkLookup {
        protocol: protocol.into(),
        remote_port: remote.port().to_be_bytes(),
        local_port: local.port().into(),
        ..SkLookup::default()
    };
    match (remote.ip(), local.ip()) {
        (IpAddr::V4(remote), IpAddr::V4(local)) => {
            context.family = libc::AF_INET.cast_unsigned();
            context.remote_ip4 = remote.octets();
            context.local_ip4 = local.octets();
        }
        (IpAddr::V6(remote), IpAddr::V6(local)) => {
            context.family = libc::AF_INET6.cast_unsigned();
            context.remote_ip6 = remote.octets();
            context.local_ip6 = local.octets();
        }
        _ => panic!("{remote} and {local} are of two families"),
    }
    context
}

/// A `struct __sk_buff` in which only the mark is set.
pub(crate) fn sk_buff(mark: u32) -> Vec<u8> {
    const SIZE: usize = 192;
    const MARK_AT: usize = 8;
    let mut context = vec![0; SIZE];
    context[MARK_AT..MARK_AT + 4].copy_from_slice(&mark.to_ne_bytes());
    context
}
