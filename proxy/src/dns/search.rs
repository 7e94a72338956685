//! Where a pod's own resolver searches: what the `resolv.conf` says that its processes see.
//!
//! A pod's files are the pod's to change. What is read from them only expands the pod's own questions, and reading is bounded
//! and never leaves the pod's root.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::{
        fd::AsFd as _,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
};

use culvert_dns::SearchPath;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

/// More than any resolver reads.
const LONGEST: u64 = 64 << 10;

/// The search path of the processes whose network namespace has this inode number; `None` while there is none that has
/// files of its own, or none that this process may see.
pub(super) fn find(netns: u32) -> Option<SearchPath> {
    let proc = Path::new("/proc");
    // Of these is who was only moved into the namespace: from here, or from the node.
    let others = ["self", "1"].map(|process| {
        fs::metadata(proc.join(process).join("ns/mnt")).ok().map(|files| files.ino())
    });
    let processes = fs::read_dir(proc).ok()?.flatten().map(|entry| entry.path());
    let of_pod = |process: &Path| {
        let inode = |of: &str| fs::metadata(process.join("ns").join(of)).ok().map(|ns| ns.ino());
        inode("net") == Some(netns.into())
            && inode("mnt").is_some_and(|files| !others.contains(&Some(files)))
    };
    let mut of_pod = processes.filter(|process| of_pod(process));
    of_pod.find_map(|process| SearchPath::parse(&read(&process.join("root")).ok()?))
}

/// The file as seen from `root`: neither its name nor a link of it leads out, and nothing but a file is read.
fn read(root: &Path) -> io::Result<String> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = OpenOptions::new().read(true).custom_flags(flags.bits()).open(root)?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let file = File::from(openat2(root.as_fd(), "etc/resolv.conf", how)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        root
    }

    #[test]
    fn a_file_is_read_also_through_links_within_the_root() {
        let root = root();
        fs::create_dir(root.path().join("run")).unwrap();
        fs::write(root.path().join("run/resolv.conf"), "search a b\n").unwrap();
        std::os::unix::fs::symlink("/run/resolv.conf", root.path().join("etc/resolv.conf"))
            .unwrap();
        assert_eq!(read(root.path()).unwrap(), "search a b\n");
    }

    #[test]
    fn nothing_outside_of_the_root_is_read_and_nothing_that_is_no_file() {
        let (root, outside) = (root(), tempfile::tempdir().unwrap());
        let secret = outside.path().join("secret");
        fs::write(&secret, "search secret\n").unwrap();
        let path = root.path().join("etc/resolv.conf");
        for target in [secret.as_path(), Path::new("/proc/self/environ"), Path::new("/dev/zero")] {
            std::os::unix::fs::symlink(target, &path).unwrap();
            assert!(read(root.path()).is_err(), "{}", target.display());
            fs::remove_file(&path).unwrap();
        }
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(read(root.path()).is_err());
    }

    #[test]
    fn a_long_file_is_read_in_part() {
        let root = root();
        let path = root.path().join("etc/resolv.conf");
        fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
        assert_eq!(read(root.path()).unwrap().len(), 64 << 10);
    }
}
