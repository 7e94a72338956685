//! What stays in the bpffs, and who may touch it:
//!
//! ```text
//! <bpffs>/culvert/<node>/            locked with flock(2) by each process of this node name: see `seat`
//!     v<ABI>/maps/<map>
//!     v<ABI>/links/<program>         `mark_own-<seat>`, which belongs to a process's own cgroup, once a process
//!     v<ABI>/pods/<netns inode>/     exists from the first step of an enrolment to the last of an un-enrolment
//!         listeners                  the pod's SOCKMAP
//!         pick_listener              its sk_lookup link
//!         tc/<interface index>-<program>
//!         qdiscs/<interface index>/  a clsact qdisc of our making, where the kernel has no tcx links
//!         node-qdiscs/<index>/       the same of the node's end of an interface
//!         node-filters/<index>/      a filter of ours on the node's end of an interface
//! ```
//!
//! Knows paths and locks; what is pinned there is the business of `node`, `enrolment` and `removal`.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use culvert_abi::{ABI_VERSION, maps};
use culvert_sys::bpf::{self, LinkTarget};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use crate::{
    error::{CaptureError, HostError, Remedy},
    hooks::Side,
    object::programs,
    seat,
};

/// Folders of notes about a pod.
const QDISCS: &str = "qdiscs";
const NODE_QDISCS: &str = "node-qdiscs";
const NODE_FILTERS: &str = "node-filters";

/// Mounts a bpffs at `path` where none is.
pub(crate) fn ensure_bpffs(path: &Path) -> Result<(), HostError> {
    let error = |source| HostError::Bpffs { path: path.to_owned(), source };
    if is_bpffs(path) {
        return Ok(());
    }
    if culvert_sys::container::mounts_stay_inside(path) {
        return Err(HostError::OwnBpffs { path: path.to_owned() });
    }
    fs::create_dir_all(path).map_err(error)?;
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("bpf"), path, Some("bpf"), flags, None::<&str>)
        .map_err(|e| error(e.into()))
}

/// Whether a bpffs is mounted at `path`.
pub(crate) fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC)
}

/// The pins of one node name, which nobody takes away while this value lives.
#[derive(Debug)]
pub(crate) struct NodePins {
    name: String,
    root: PathBuf,
    is_new: bool,
    lock: File,
}

impl NodePins {
    /// Makes the node's folder when missing, and shares it with the other processes of the node.
    pub(crate) fn share(bpffs: &Path, node: &str) -> Result<Self, CaptureError> {
        Self::lock(bpffs, node, File::try_lock_shared)
    }

    /// Makes the node's folder when missing, and keeps every other process from it.
    pub(crate) fn take_alone(bpffs: &Path, node: &str) -> Result<Self, CaptureError> {
        Self::lock(bpffs, node, File::try_lock)
    }

    fn lock(
        bpffs: &Path,
        node: &str,
        try_lock: fn(&File) -> Result<(), TryLockError>,
    ) -> Result<Self, CaptureError> {
        let root = bpffs.join("culvert").join(escape(node));
        loop {
            let is_new = !root.exists();
            make_dir(&root)?;
            let lock = File::open(&root).map_err(pin_error("open", &root))?;
            match try_lock(&lock) {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let holder = seat::holder(&lock).or_else(|| seat::sharer(&lock));
                    return Err(CaptureError::Busy { node: node.to_owned(), holder });
                }
                Err(TryLockError::Error(source)) => return Err(pin_error("lock", &root)(source)),
            }
            // Who took the node away between our open and our lock has removed the folder we now hold.
            if same_file(&lock, &root) {
                return Ok(Self { name: node.to_owned(), root, is_new, lock });
            }
        }
    }

    /// Keeps every other process from the node, unless one shares it. Then not even this one's share is left, so that of
    /// processes that end at one time the last is alone.
    pub(crate) fn hold_alone(&self) -> bool {
        self.lock.try_lock().is_ok()
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Whether the folder was made just now: no process before has left anything.
    pub(crate) const fn is_new(&self) -> bool {
        self.is_new
    }

    /// Every ABI version that has pins here.
    pub(crate) fn versions(&self) -> Result<Vec<VersionPins>, CaptureError> {
        let names = versions(&self.root)?;
        Ok(names.into_iter().map(|name| VersionPins { root: self.root.join(name) }).collect())
    }

    /// The folder of this build's ABI version, made when missing; refused where another version's pins are.
    pub(crate) fn open_version(&self, remedy: Remedy) -> Result<VersionPins, CaptureError> {
        let own = format!("v{ABI_VERSION}");
        if let Some(found) = versions(&self.root)?.into_iter().find(|name| *name != own) {
            return Err(CaptureError::OtherVersion {
                node: self.name.clone(),
                path: self.root.join(&found),
                found: found.trim_start_matches('v').to_owned(),
                want: ABI_VERSION,
                remedy,
            });
        }
        let pins = VersionPins { root: self.root.join(own) };
        for dir in ["maps", "links", "pods"] {
            make_dir(&pins.root.join(dir))?;
        }
        Ok(pins)
    }

    /// The other node name whose live pins hold the pod `id`.
    pub(crate) fn other_owner(&self, id: u32) -> Result<Option<String>, CaptureError> {
        let Some(all) = self.root.parent() else { return Ok(None) };
        for node in entries(all)? {
            let root = all.join(&node);
            if root == self.root {
                continue;
            }
            for version in versions(&root)? {
                let pod = VersionPins { root: root.join(version) }.pod(id);
                if pod.is_attached() {
                    return Ok(Some(unescape(&node)));
                }
            }
        }
        Ok(None)
    }

    /// Removes the node's folder; does nothing while something is left in it. For who holds it alone.
    pub(crate) fn remove_empty(&self) {
        // Left in place they cost nothing, so a failure is not worth a report.
        let seats = self.root.join("seats");
        for seat in entries(&seats).into_iter().flatten() {
            drop(fs::remove_dir(seats.join(seat)));
        }
        drop(fs::remove_dir(seats));
        drop(fs::remove_dir(&self.root));
    }
}

/// The pins of one ABI version of a node.
#[derive(Clone, Debug)]
pub(crate) struct VersionPins {
    root: PathBuf,
}

impl VersionPins {
    /// Whether this build wrote them.
    pub(crate) fn is_own(&self) -> bool {
        self.root.file_name().is_some_and(|name| *name == *format!("v{ABI_VERSION}"))
    }

    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.root.join("maps").join(name)
    }

    pub(crate) fn link(&self, program: &str) -> PathBuf {
        self.root.join("links").join(program)
    }

    /// Every pinned link of the node.
    pub(crate) fn links(&self) -> Result<Vec<PathBuf>, CaptureError> {
        let dir = self.root.join("links");
        Ok(entries(&dir)?.into_iter().map(|name| dir.join(name)).collect())
    }

    pub(crate) fn pod(&self, id: u32) -> PodPins {
        PodPins { id, root: self.root.join("pods").join(id.to_string()) }
    }

    /// Every pod that has a folder.
    pub(crate) fn pods(&self) -> Result<Vec<PodPins>, CaptureError> {
        let names = entries(&self.root.join("pods"))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).map(|id| self.pod(id)).collect())
    }

    /// Removes the links, the maps and the folders; the pods' folders must be gone.
    pub(crate) fn remove(&self) -> Result<(), CaptureError> {
        for dir in ["links", "maps"] {
            remove_dir_of_files(&self.root.join(dir))?;
        }
        remove_dir(&self.root.join("pods"))?;
        remove_dir(&self.root)
    }
}

/// The pins of one pod.
#[derive(Clone, Debug)]
pub(crate) struct PodPins {
    id: u32,
    root: PathBuf,
}

impl PodPins {
    /// Inode number of the pod's network namespace.
    pub(crate) const fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn exists(&self) -> bool {
        self.root.is_dir()
    }

    pub(crate) fn make(&self) -> Result<(), CaptureError> {
        make_dir(&self.root.join("tc"))?;
        make_dir(&self.root.join(QDISCS))
    }

    pub(crate) fn listeners(&self) -> PathBuf {
        self.root.join(maps::LISTENERS)
    }

    pub(crate) fn link(&self) -> PathBuf {
        self.root.join(programs::PICK_LISTENER)
    }

    /// The pinned `sk_lookup` link, where there is one.
    pub(crate) fn open_link(&self) -> Option<OwnedFd> {
        bpf::open_pin(&self.link()).ok()
    }

    /// Whether the pod's namespace exists and its `sk_lookup` link is attached to it. Inode numbers are used again: a
    /// folder alone proves nothing.
    pub(crate) fn is_attached(&self) -> bool {
        use std::os::fd::AsFd as _;
        self.open_link().is_some_and(|link| {
            matches!(bpf::link_target(link.as_fd()), Ok(LinkTarget::Netns(id)) if id == self.id)
        })
    }

    /// Whether the link is there, but its namespace is not.
    pub(crate) fn is_dead(&self) -> bool {
        self.link().exists() && !self.is_attached()
    }

    /// Where the tcx link of a program is pinned.
    pub(crate) fn tc_link(&self, interface: u32, program: &str) -> PathBuf {
        self.root.join("tc").join(format!("{interface}-{program}"))
    }

    /// Every pinned tcx link.
    pub(crate) fn tc_links(&self) -> Result<Vec<TcLink>, CaptureError> {
        let dir = self.root.join("tc");
        let links = entries(&dir)?.into_iter().filter_map(|name| {
            let (interface, program) = name.split_once('-')?;
            let program = program.split('-').next()?.to_owned();
            Some(TcLink { interface: interface.parse().ok()?, program, path: dir.join(&name) })
        });
        Ok(links.collect())
    }

    /// Notes that we made the clsact qdisc of an interface.
    pub(crate) fn note_qdisc(&self, side: Side, interface: u32) -> Result<(), CaptureError> {
        make_dir(&self.qdisc(side, interface))
    }

    /// Whether [`Self::note_qdisc`] was called for the interface.
    pub(crate) fn has_qdisc(&self, side: Side, interface: u32) -> bool {
        self.qdisc(side, interface).is_dir()
    }

    /// Takes the note back.
    pub(crate) fn forget_qdisc(&self, side: Side, interface: u32) -> Result<(), CaptureError> {
        remove_dir(&self.qdisc(side, interface))
    }

    /// Notes that we may have attached a filter to the node's end of an interface, by its index there.
    pub(crate) fn note_node_filter(&self, interface: u32) -> Result<(), CaptureError> {
        make_dir(&self.root.join(NODE_FILTERS).join(interface.to_string()))
    }

    /// The interfaces that [`Self::note_node_filter`] was called for.
    pub(crate) fn node_filters(&self) -> Result<Vec<u32>, CaptureError> {
        let names = entries(&self.root.join(NODE_FILTERS))?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Takes the note back.
    pub(crate) fn forget_node_filter(&self, interface: u32) -> Result<(), CaptureError> {
        remove_dir(&self.root.join(NODE_FILTERS).join(interface.to_string()))
    }

    /// Removes the `sk_lookup` link, which detaches it.
    pub(crate) fn remove_link(&self) -> Result<(), CaptureError> {
        remove_file(&self.link())
    }

    /// Removes all that is left.
    pub(crate) fn remove(&self) -> Result<(), CaptureError> {
        self.remove_link()?;
        remove_dir_of_files(&self.root.join("tc"))?;
        remove_file(&self.listeners())?;
        for notes in [QDISCS, NODE_QDISCS, NODE_FILTERS].map(|dir| self.root.join(dir)) {
            for interface in entries(&notes)? {
                remove_dir(&notes.join(interface))?;
            }
            remove_dir(&notes)?;
        }
        remove_dir(&self.root)
    }

    fn qdisc(&self, side: Side, interface: u32) -> PathBuf {
        let dir = match side {
            Side::Pod => QDISCS,
            Side::Node => NODE_QDISCS,
        };
        self.root.join(dir).join(interface.to_string())
    }
}

/// A pinned tcx link.
#[derive(Clone, Debug)]
pub(crate) struct TcLink {
    /// Index of the interface that it was made for, in the namespace where that is.
    pub(crate) interface: u32,
    /// Its program's name.
    pub(crate) program: String,
    pub(crate) path: PathBuf,
}

/// Names `attempt` on `path`.
pub(crate) fn pin_error(
    attempt: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> CaptureError {
    let path = path.to_owned();
    move |source| CaptureError::Pin { attempt, path, source }
}

/// A node name as a file name: bpffs refuses dots, so all but letters, digits, `-` and `_` become `%` and two hex digits.
fn escape(node: &str) -> String {
    node.bytes()
        .map(|byte| match byte {
            b'-' | b'_' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// The inverse of [`escape`]; what it cannot have written stays as it is.
fn unescape(name: &str) -> String {
    let mut parts = name.split('%');
    let mut node = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let byte = part.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match byte.filter(u8::is_ascii).zip(part.get(2..)) {
            Some((byte, rest)) => node.extend([char::from(byte).to_string().as_str(), rest]),
            None => node.extend(["%", part]),
        }
    }
    node
}

fn same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// The names of the folders of ABI versions.
fn versions(root: &Path) -> Result<Vec<String>, CaptureError> {
    let mut names = entries(root)?;
    names.retain(|name| name.starts_with('v'));
    Ok(names)
}

fn entries(dir: &Path) -> Result<Vec<String>, CaptureError> {
    let read = match fs::read_dir(dir) {
        Ok(read) => read,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(pin_error("read", dir)(e)),
    };
    read.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<_>>()
        .map_err(pin_error("read", dir))
}

pub(crate) fn make_dir(path: &Path) -> Result<(), CaptureError> {
    fs::create_dir_all(path).map_err(pin_error("create", path))
}

fn remove_dir(path: &Path) -> Result<(), CaptureError> {
    gone(fs::remove_dir(path)).map_err(pin_error("remove", path))
}

fn remove_file(path: &Path) -> Result<(), CaptureError> {
    gone(fs::remove_file(path)).map_err(pin_error("remove", path))
}

fn remove_dir_of_files(dir: &Path) -> Result<(), CaptureError> {
    for name in entries(dir)? {
        remove_file(&dir.join(name))?;
    }
    remove_dir(dir)
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_become_file_names_that_bpffs_takes() {
        assert_eq!(escape("worker-1_a"), "worker-1_a");
        assert_eq!(escape("ip-10-0-0-1.ec2.internal"), "ip-10-0-0-1%2Eec2%2Einternal");
        assert_eq!(escape("../x%"), "%2E%2E%2Fx%25");
    }

    #[test]
    fn file_names_tell_the_node_name() {
        for node in ["worker-1_a", "ip-10-0-0-1.ec2.internal", "../x%"] {
            assert_eq!(unescape(&escape(node)), node);
        }
        assert_eq!(unescape("a%zz%"), "a%zz%");
    }

    #[test]
    fn a_node_is_new_until_something_is_left_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        assert!(NodePins::share(dir.path(), "a.b").unwrap().is_new());
        assert!(!NodePins::share(dir.path(), "a.b").unwrap().is_new());
    }

    #[test]
    fn who_would_be_alone_is_told_who_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let me = Some(std::process::id());
        let refused = |result: Result<NodePins, CaptureError>| {
            let error = result.unwrap_err();
            assert!(
                matches!(&error, CaptureError::Busy { holder, .. } if *holder == me),
                "{error}"
            );
        };
        let first = NodePins::share(dir.path(), "a").unwrap();
        let second = NodePins::share(dir.path(), "a").unwrap();
        refused(NodePins::take_alone(dir.path(), "a"));
        assert!(!first.hold_alone());
        assert!(second.hold_alone());
        refused(NodePins::share(dir.path(), "a"));
        NodePins::take_alone(dir.path(), "b").unwrap();
    }

    #[test]
    fn pins_of_another_version_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("culvert/a/v0/maps")).unwrap();
        let pins = NodePins::share(dir.path(), "a").unwrap();
        let error = pins.open_version(Remedy::Cleanup).unwrap_err().to_string();
        assert!(error.contains("ABI version 0"), "{error}");
        assert!(error.ends_with("run: culvert cleanup --node a"), "{error}");
        let error = pins.open_version(Remedy::Stop { pid: Some(7) }).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "stop the culvert that runs (pid 7), then run: culvert cleanup --node a"
            ),
            "{error}"
        );
    }
}
