//! What runs at a hook: the tcx chains of a network interface in order, and a link of ours at the head of one; and what a
//! cgroup's processes meet when they connect.
//!
//! Which program belongs there is the caller's business, and so is the network namespace: an interface's index means
//! one of the calling thread's namespace.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use crate::bpf::LinkIds;

/// `enum bpf_cmd` of `linux/bpf.h`.
const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_LINK_CREATE: libc::c_long = 28;

/// Before all others, where no other is named (`linux/bpf.h`).
const BPF_F_BEFORE: u32 = 1 << 3;

/// With the programs of a cgroup's ancestors (`linux/bpf.h`).
const BPF_F_QUERY_EFFECTIVE: u32 = 1 << 0;

/// `BPF_MPROG_MAX`: the kernel lets no chain be longer.
const MAX_CHAIN: usize = 64;

/// Of a cgroup with all of its ancestors, each of which may have `BPF_CGROUP_MAX_PROGS` of them, 64.
const MAX_EFFECTIVE: usize = 1024;

/// A chain of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Hook {
    /// What comes in (`BPF_TCX_INGRESS`).
    Ingress = 46,
    /// What goes out (`BPF_TCX_EGRESS`).
    Egress = 47,
}

/// What a process meets when it connects a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ConnectHook {
    /// To an IPv4 address (`BPF_CGROUP_INET4_CONNECT`).
    V4 = 10,
    /// To an IPv6 address (`BPF_CGROUP_INET6_CONNECT`).
    V6 = 11,
}

/// `union bpf_attr`, the `link_create` member up to its union, whose rest is zero.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

/// `union bpf_attr`, the `query` member.
#[derive(Default)]
#[repr(C)]
struct Query {
    target: u32,
    attach_type: u32,
    flags: u32,
    first_attach_flags: u32,
    prog_ids: u64,
    count: u32,
    pad: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Attaches a `sched_cls` program before all others at the hook, for as long as the link lives.
///
/// Errors: `EINVAL` where the kernel has no tcx (before 6.6), `EEXIST` when this very program is in the chain already,
/// `ERANGE` when the chain is full.
pub fn attach_first(program: BorrowedFd<'_>, interface: u32, hook: Hook) -> io::Result<OwnedFd> {
    let attr = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        target: interface,
        attach_type: hook as u32,
        flags: BPF_F_BEFORE,
    };
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given, and `program` is borrowed, hence open.
    #[expect(unsafe_code, reason = "aya knows interfaces by names alone, which change hands")]
    let fd = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_LINK_CREATE, &raw const attr, size_of::<LinkCreate>())
    };
    let fd = libc::c_int::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given this descriptor to us alone.
    #[expect(unsafe_code, reason = "a raw descriptor has no other way to become an owned one")]
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What is attached at the hook, in the order in which packets meet it; the link is 0 where a program has none.
///
/// Errors: `EINVAL` where the kernel has no tcx (before 6.6), `ENODEV` when the interface is gone.
pub fn attached(interface: u32, hook: Hook) -> io::Result<Vec<LinkIds>> {
    let (mut programs, mut links) = ([0_u32; MAX_CHAIN], [0_u32; MAX_CHAIN]);
    let mut attr = Query {
        target: interface,
        attach_type: hook as u32,
        prog_ids: (&raw mut programs) as u64,
        count: u32::try_from(MAX_CHAIN).unwrap_or(0),
        link_ids: (&raw mut links) as u64,
        ..Query::default()
    };
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given; both arrays outlive the call and hold `count`
    // numbers.
    #[expect(unsafe_code, reason = "aya's query leaves out the links")]
    let rc =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut attr, size_of::<Query>()) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    let count = usize::try_from(attr.count).unwrap_or(MAX_CHAIN);
    let both = programs.into_iter().zip(links).take(count);
    Ok(both.map(|(program, link)| LinkIds { link, program }).collect())
}

/// The programs, by id, that run for processes of the cgroup at this hook: its own and its ancestors'.
///
/// Errors: `EBADF` for what is no cgroup2, `ENOSPC` when there are more than can be told.
pub fn effective(cgroup: BorrowedFd<'_>, hook: ConnectHook) -> io::Result<Vec<u32>> {
    let mut programs = vec![0_u32; MAX_EFFECTIVE];
    let mut attr = Query {
        target: cgroup.as_raw_fd().cast_unsigned(),
        attach_type: hook as u32,
        flags: BPF_F_QUERY_EFFECTIVE,
        prog_ids: programs.as_mut_ptr() as u64,
        count: u32::try_from(programs.len()).unwrap_or(0),
        ..Query::default()
    };
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given; the array outlives the call and holds `count`
    // numbers.
    #[expect(unsafe_code, reason = "aya has no query of cgroups")]
    let rc =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut attr, size_of::<Query>()) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    programs.truncate(usize::try_from(attr.count).unwrap_or(0));
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd as _};

    use super::*;

    #[test]
    fn an_interface_that_is_not_there_has_no_chain() {
        for hook in [Hook::Ingress, Hook::Egress] {
            let errno = attached(u32::MAX >> 1, hook).unwrap_err().raw_os_error();
            assert!(
                matches!(errno, Some(libc::ENODEV | libc::EINVAL | libc::EPERM)),
                "{hook:?}: {errno:?}"
            );
        }
    }

    #[test]
    fn a_file_is_no_cgroup() {
        let file = File::open("/proc/self/status").unwrap();
        assert!(effective(file.as_fd(), ConnectHook::V4).is_err());
    }

    #[test]
    fn what_is_no_program_is_not_attached() {
        let file = File::open("/proc/self/status").unwrap();
        assert!(attach_first(file.as_fd(), 1, Hook::Ingress).is_err());
    }
}
