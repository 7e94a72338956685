//! What a container runtime keeps from a process that is meant to serve its node: sysctls that can be written. Also whether
//! a mount made here would be seen beyond the container.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::mount::{MsFlags, mount};

const SYSCTLS: &str = "/proc/sys";

/// Makes `/proc/sys` writable where a runtime has mounted it read-only on its own, as it does for containers that are not
/// privileged. Gives whether that was so. Concerns nothing beyond this process's mount namespace.
pub fn unmask_sysctls() -> io::Result<bool> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
    let Some(found) = Mount::at(&mounts, Path::new(SYSCTLS)) else { return Ok(false) };
    let Some(flags) = found.writable() else { return Ok(false) };
    let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    mount(None::<&str>, SYSCTLS, None::<&str>, flags, None::<&str>)?;
    Ok(true)
}

/// Whether what is mounted beneath `path` is seen in this process's mount namespace alone, and ends with it, while process 1
/// has another. False where that cannot be told.
pub fn mounts_stay_inside(path: &Path) -> bool {
    let inode = |path| fs::metadata(path).map(|meta| meta.ino()).ok();
    let (Some(own), Some(init)) = (inode("/proc/thread-self/ns/mnt"), inode("/proc/1/ns/mnt"))
    else {
        return false;
    };
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    own != init && Mount::above(&mounts, path).is_some_and(|mount| !mount.is_shared)
}

/// A line of `/proc/PID/mountinfo` (`proc_pid_mountinfo(5)`).
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    point: PathBuf,
    options: &'a str,
    is_shared: bool,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(' ').skip(4);
        let (point, options) = (fields.next()?, fields.next()?);
        let is_shared =
            fields.take_while(|field| *field != "-").any(|field| field.starts_with("shared:"));
        Some(Self { point: point.into(), options, is_shared })
    }

    /// What is mounted at `path`: of several, the last.
    fn at(mounts: &'a str, path: &Path) -> Option<Self> {
        mounts.lines().filter_map(Self::parse).rfind(|mount| mount.point == path)
    }

    /// What `path` is in.
    fn above(mounts: &'a str, path: &Path) -> Option<Self> {
        path.ancestors().find_map(|above| Self::at(mounts, above))
    }

    /// Its flags without the one that it is read-only, if it is.
    fn writable(&self) -> Option<MsFlags> {
        let mut read_only = false;
        let mut flags = MsFlags::empty();
        for option in self.options.split(',') {
            match option {
                "ro" => read_only = true,
                "nosuid" => flags |= MsFlags::MS_NOSUID,
                "nodev" => flags |= MsFlags::MS_NODEV,
                "noexec" => flags |= MsFlags::MS_NOEXEC,
                "noatime" => flags |= MsFlags::MS_NOATIME,
                "relatime" => flags |= MsFlags::MS_RELATIME,
                _ => {}
            }
        }
        read_only.then_some(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "20 1 0:20 / / rw,relatime shared:1 - ext4 /dev/a rw\n\
                          21 20 0:21 / /proc rw,nosuid - proc proc rw\n\
                          22 21 0:21 /sys /proc/sys rw,nosuid - proc proc rw\n\
                          23 22 0:21 /sys /proc/sys ro,nosuid,nodev,noexec,relatime - proc proc rw\n\
                          24 20 0:22 / /sys/fs/bpf rw shared:9 master:2 - bpf bpf rw\n";

    #[test]
    fn of_mounts_at_one_point_the_last_counts() {
        let flags = Mount::at(MOUNTS, Path::new(SYSCTLS)).unwrap().writable().unwrap();
        let want = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        assert_eq!(flags, want | MsFlags::MS_RELATIME);
        assert_eq!(Mount::at(MOUNTS, Path::new("/proc")).unwrap().writable(), None);
        assert_eq!(Mount::at(MOUNTS, Path::new("/pro")), None);
    }

    #[test]
    fn whether_a_mount_has_peers_is_that_of_what_is_above() {
        for (path, shared) in
            [("/sys/fs/bpf", true), ("/sys/fs/bpf/x", true), ("/etc", true), ("/proc/x", false)]
        {
            assert_eq!(Mount::above(MOUNTS, Path::new(path)).unwrap().is_shared, shared, "{path}");
        }
    }
}
