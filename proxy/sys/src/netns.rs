//! Network namespaces: open one, name it, and run a closure inside it. What happens inside is the caller's business.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::sched::{CloneFlags, setns};

use crate::socket;

/// `NS_GET_NSTYPE` of `ioctl_ns(2)`: `_IO(0xb7, 0x3)`.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// Why a path could not be opened as a network namespace.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// The path could not be opened.
    #[error("open network namespace {}", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The path is there, but it is no network namespace.
    #[error(
        "{} is not a network namespace; give a file such as /run/netns/NAME or /proc/PID/ns/net",
        path.display()
    )]
    NotNetns {
        /// The path as given.
        path: PathBuf,
    },
}

/// A network namespace, kept alive as long as any clone of this value.
#[derive(Clone, Debug)]
pub struct Netns {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    inode: u64,
    device: u64,
}

impl Netns {
    /// Opens the namespace at `path`; a path that is something else is an error.
    pub fn open(path: &Path) -> Result<Self, NetnsError> {
        let open = |source| NetnsError::Open { path: path.to_owned(), source };
        Self::of(File::open(path).map_err(open)?, path)
    }

    /// Takes over an open file, whose errors call it `path`; one that is something else is an error.
    pub fn of(file: File, path: &Path) -> Result<Self, NetnsError> {
        if ns_type(file.as_fd()) != Some(libc::CLONE_NEWNET) {
            return Err(NetnsError::NotNetns { path: path.to_owned() });
        }
        let open = |source| NetnsError::Open { path: path.to_owned(), source };
        let meta = file.metadata().map_err(open)?;
        let (inode, device) = (meta.ino(), meta.dev());
        Ok(Self { inner: Arc::new(Inner { file, inode, device }) })
    }

    /// The calling thread's namespace.
    pub fn current() -> Result<Self, NetnsError> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// The namespace's inode number: unique among namespaces that exist, used again once this one is gone.
    pub fn inode(&self) -> u32 {
        // Inode numbers of nsfs are 32 bits wide (`ns_common.inum`).
        u32::try_from(self.inner.inode).unwrap_or(u32::MAX)
    }

    /// Whether both name one namespace.
    pub fn is(&self, other: &Self) -> bool {
        (self.inner.inode, self.inner.device) == (other.inner.inode, other.inner.device)
    }

    /// The namespace's cookie, never used twice within a boot; `None` on kernels before 5.14.
    pub fn cookie(&self) -> io::Result<Option<u64>> {
        let socket =
            self.run(|| socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None))??;
        socket::netns_cookie(socket.as_fd())
    }

    /// Runs `f` on this thread inside the namespace and comes back.
    ///
    /// Sockets that `f` makes, and what it reads beneath `/proc/sys/net`, belong to the namespace. `f` must not await:
    /// it holds the thread. If the thread cannot come back the process aborts, since anything it did next would happen
    /// in a pod's network.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> io::Result<T> {
        let home = File::open("/proc/thread-self/ns/net")?;
        self.visit(home.as_fd(), f)
    }

    /// The same for a caller that knows which namespace the thread is in: finding out costs more than all the rest.
    pub fn run_from<T>(&self, home: &Self, f: impl FnOnce() -> T) -> io::Result<T> {
        self.visit(home.as_fd(), f)
    }

    fn visit<T>(&self, home: BorrowedFd<'_>, f: impl FnOnce() -> T) -> io::Result<T> {
        setns(&self.inner.file, CloneFlags::CLONE_NEWNET)?;
        let _back = Back { home };
        Ok(f())
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.file.as_fd()
    }
}

/// Returns the thread to its namespace, also when the closure unwinds.
struct Back<'a> {
    home: BorrowedFd<'a>,
}

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if setns(self.home, CloneFlags::CLONE_NEWNET).is_err() {
            std::process::abort();
        }
    }
}

fn ns_type(fd: BorrowedFd<'_>) -> Option<libc::c_int> {
    // SAFETY: the ioctl takes no argument and `fd` is open for the length of the call.
    #[expect(unsafe_code, reason = "nix has no wrapper for ioctl_ns(2)")]
    let kind = unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE) };
    (kind >= 0).then_some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_file_is_not_a_namespace() {
        let error = Netns::open(Path::new("/proc/self/status")).unwrap_err();
        assert!(matches!(error, NetnsError::NotNetns { .. }), "{error}");
    }

    #[test]
    fn another_kind_of_namespace_is_refused() {
        let error = Netns::open(Path::new("/proc/self/ns/mnt")).unwrap_err();
        assert!(matches!(error, NetnsError::NotNetns { .. }), "{error}");
    }

    #[test]
    fn the_current_namespace_is_itself() {
        let a = Netns::current().unwrap();
        assert!(a.is(&Netns::current().unwrap()));
    }

    #[test]
    fn a_closure_runs_inside_and_the_thread_comes_back() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root to make a network namespace");
            return;
        }
        let home = Netns::current().unwrap();
        let other = std::thread::spawn(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).unwrap();
            Netns::current().unwrap()
        })
        .join()
        .unwrap();
        let inside = other.run(|| Netns::current().unwrap()).unwrap();
        assert!(inside.is(&other) && !inside.is(&home));
        assert!(Netns::current().unwrap().is(&home));
        let inside = other.run_from(&home, || Netns::current().unwrap()).unwrap();
        assert!(inside.is(&other));
        assert!(Netns::current().unwrap().is(&home));
        assert_ne!(other.cookie().unwrap(), home.cookie().unwrap());
    }
}
