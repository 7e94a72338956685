//! The `bpf(2)` commands on links that aya does not offer: pin a link and open a pin, ask what a link is and where it is
//! attached, swap its program. Those about what runs at a hook are in [`crate::chain`].

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

/// `enum bpf_cmd` of `linux/bpf.h`.
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_LINK_DETACH: libc::c_long = 34;

/// `enum bpf_link_type` of `linux/bpf.h`.
const BPF_LINK_TYPE_CGROUP: u32 = 3;
const BPF_LINK_TYPE_NETNS: u32 = 5;

/// `union bpf_attr`, the member of `BPF_OBJ_PIN` and `BPF_OBJ_GET`.
#[repr(C)]
struct Object {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// `union bpf_attr`, the `info` member.
#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// `struct bpf_link_info`, as far as the identity of what the link is attached to.
#[derive(Default)]
#[repr(C)]
struct LinkInfo {
    kind: u32,
    id: u32,
    prog_id: u32,
    pad: u32,
    /// `cgroup.cgroup_id`, or `netns.netns_ino` with its attach type behind it.
    target: u64,
    rest: [u64; 16],
}

/// Numbers of a link, never used twice within a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkIds {
    /// The link's own.
    pub link: u32,
    /// Its program's.
    pub program: u32,
}

/// What a link is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkTarget {
    /// A cgroup, by [`crate::cgroup::id`]; `0` once the cgroup is gone.
    Cgroup(u64),
    /// A network namespace, by its inode number; `0` once the namespace is gone.
    Netns(u32),
    /// Something else.
    Other,
}

/// Opens what is pinned at `path` in a bpffs, of whatever kind it is.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attr = Object { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    let len = size_of::<Object>();
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given, and `path` outlives the call.
    #[expect(unsafe_code, reason = "aya hides the descriptor of a pinned link")]
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET, &raw const attr, len) };
    let fd = libc::c_int::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given this descriptor to us alone.
    #[expect(unsafe_code, reason = "a raw descriptor has no other way to become an owned one")]
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pins `link` at `path` in a bpffs, where nothing is yet.
pub fn pin(link: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let bpf_fd = link.as_raw_fd().cast_unsigned();
    let attr = Object { pathname: path.as_ptr() as u64, bpf_fd, file_flags: 0 };
    let len = size_of::<Object>();
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given, `path` outlives the call, and `link` is open.
    #[expect(unsafe_code, reason = "aya pins only links that it has made itself")]
    let rc = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_PIN, &raw const attr, len) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How the kernel numbers a link and its program, as [`crate::chain`] lists them.
pub fn link_ids(link: BorrowedFd<'_>) -> io::Result<LinkIds> {
    link_info(link).map(|info| LinkIds { link: info.id, program: info.prog_id })
}

/// What `link` is attached to.
pub fn link_target(link: BorrowedFd<'_>) -> io::Result<LinkTarget> {
    let info = link_info(link)?;
    Ok(match info.kind {
        BPF_LINK_TYPE_CGROUP => LinkTarget::Cgroup(info.target),
        // The inode number is the first of two `u32` in these eight bytes.
        BPF_LINK_TYPE_NETNS => {
            let [a, b, c, d, ..] = info.target.to_ne_bytes();
            LinkTarget::Netns(u32::from_ne_bytes([a, b, c, d]))
        }
        _ => LinkTarget::Other,
    })
}

fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let mut info = LinkInfo::default();
    let mut attr = InfoByFd {
        bpf_fd: link.as_raw_fd().cast_unsigned(),
        info_len: u32::try_from(size_of::<LinkInfo>()).unwrap_or(0),
        info: (&raw mut info) as u64,
    };
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given, and `info` is valid for `info_len` bytes.
    #[expect(unsafe_code, reason = "aya's LinkInfo leaves out what the link is attached to")]
    let rc = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &raw mut attr, size_of::<InfoByFd>())
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(info)
}

/// `union bpf_attr`, the `link_update` member.
#[repr(C)]
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// Detaches a link now, whoever else holds it; unlinking its pin would do so only some time later.
///
/// Errors: `EOPNOTSUPP` for kinds of link that cannot.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let fd = link.as_raw_fd().cast_unsigned();
    // SAFETY: `link_detach` of `union bpf_attr` is this one number, and `link` is borrowed, hence open.
    #[expect(unsafe_code, reason = "aya has no BPF_LINK_DETACH")]
    let rc =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, &raw const fd, size_of::<u32>()) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Replaces the program of a link atomically: no packet or connect sees neither or both.
///
/// Errors: `ENOLINK` when what the link was attached to is gone, `EINVAL` for a program of another type.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let attr = LinkUpdate {
        link_fd: link.as_raw_fd().cast_unsigned(),
        new_prog_fd: program.as_raw_fd().cast_unsigned(),
        flags: 0,
        old_prog_fd: 0,
    };
    // SAFETY: `attr` is a prefix of `union bpf_attr` of the size given, and both descriptors are borrowed, hence open.
    #[expect(unsafe_code, reason = "aya has no BPF_LINK_UPDATE for sk_lookup and cgroup links")]
    let rc = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_LINK_UPDATE, &raw const attr, size_of::<LinkUpdate>())
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd as _};

    use super::*;

    #[test]
    fn a_path_outside_a_bpffs_holds_no_pin() {
        assert!(open_pin(Path::new("/proc/self/status")).is_err());
    }

    #[test]
    fn a_file_is_attached_nowhere() {
        let file = File::open("/proc/self/status").unwrap();
        assert!(link_target(file.as_fd()).is_err());
        assert!(link_ids(file.as_fd()).is_err());
        assert!(link_detach(file.as_fd()).is_err());
    }

    #[test]
    fn a_file_that_is_no_link_is_refused() {
        let file = File::open("/proc/self/status").unwrap();
        let error = link_update(file.as_fd(), file.as_fd()).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPERM)), "{error}");
    }
}
