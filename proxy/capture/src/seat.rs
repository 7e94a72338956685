//! Who holds a node: at most two processes at a time, the newer one taking over from the elder.
//!
//! ```text
//! <bpffs>/culvert/<node>/    locked shared by each of them, and exclusively by whoever takes the node away
//!     seats/door             locked while somebody takes a seat, or clears one
//!     seats/<number>         locked by the process that has the seat
//! ```
//!
//! All locks are flock(2)'s, which end with the process. What the two say to each other is the binary's.

use std::{
    fs::{self, File, TryLockError},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::sys::stat::{major, minor};

use crate::{
    error::CaptureError,
    pins::{self, NodePins, make_dir, pin_error},
};

/// The numbers of a node's seats: one that serves, and one that takes over from it or drains.
pub const SEATS: [u8; 2] = [0, 1];

/// A place among the processes of a node, for the life of this value.
#[derive(Debug)]
pub struct Seat {
    pub(crate) pins: NodePins,
    number: u8,
    elder: Option<Elder>,
    _lock: File,
}

/// The process that held the node before, and held it still when the seat was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elder {
    /// The number of its seat.
    pub seat: u8,
    /// Its process id, where `/proc/locks` tells.
    pub pid: Option<u32>,
}

impl Seat {
    /// Takes a seat of node `name`. From here on no other process can take the node away.
    ///
    /// Fails with [`CaptureError::Busy`] where the node is being taken away, with [`CaptureError::Full`] where two hold it.
    pub fn take(bpffs: &Path, name: &str) -> Result<Self, CaptureError> {
        pins::ensure_bpffs(bpffs)?;
        let pins = NodePins::share(bpffs, name)?;
        let _door = close_door(&pins)?;
        let (mut free, mut elders) = (None, Vec::new());
        for number in SEATS {
            let lock = open(&folder(&pins).join(number.to_string()))?;
            match lock.try_lock() {
                Ok(()) if free.is_none() => free = Some((number, lock)),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    elders.push(Elder { seat: number, pid: holder(&lock) });
                }
                Err(TryLockError::Error(source)) => {
                    return Err(pin_error("lock", &folder(&pins))(source));
                }
            }
        }
        let Some((number, lock)) = free else {
            let holders = elders.into_iter().filter_map(|elder| elder.pid).collect();
            return Err(CaptureError::Full { node: name.to_owned(), holders });
        };
        Ok(Self { pins, number, elder: elders.pop(), _lock: lock })
    }

    /// Its number, which no other living process of the node has.
    pub const fn number(&self) -> u8 {
        self.number
    }

    /// Who came before.
    pub const fn elder(&self) -> Option<Elder> {
        self.elder
    }

    /// Whether another process has a seat.
    pub fn has_neighbour(&self) -> Result<bool, CaptureError> {
        let _door = close_door(&self.pins)?;
        self.neighbour_is_there()
    }

    /// For who keeps others from taking a seat.
    fn neighbour_is_there(&self) -> Result<bool, CaptureError> {
        for number in SEATS.into_iter().filter(|number| *number != self.number) {
            if matches!(
                open(&folder(&self.pins).join(number.to_string()))?.try_lock(),
                Err(TryLockError::WouldBlock)
            ) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Calls `clear` unless somebody has the other seat; nobody takes it meanwhile. Gives whether it was called.
    pub(crate) fn if_alone(
        &self,
        clear: impl FnOnce() -> Result<(), CaptureError>,
    ) -> Result<bool, CaptureError> {
        let _door = close_door(&self.pins)?;
        if self.neighbour_is_there()? {
            return Ok(false);
        }
        clear()?;
        Ok(true)
    }

    /// Gives the seat up, and takes the node's folder away where this process has made it and nothing is in it.
    pub fn leave(self) {
        if self.pins.is_new() && self.pins.hold_alone() {
            self.pins.remove_empty();
        }
    }
}

/// Lets nobody take a seat until the value is dropped.
fn close_door(pins: &NodePins) -> Result<File, CaptureError> {
    let path = folder(pins).join("door");
    let door = open(&path)?;
    door.lock().map_err(pin_error("lock", &path))?;
    Ok(door)
}

fn open(path: &Path) -> Result<File, CaptureError> {
    make_dir(path)?;
    File::open(path).map_err(pin_error("open", path))
}

fn folder(pins: &NodePins) -> PathBuf {
    pins.root().join("seats")
}

/// The process that holds an exclusive lock on the file, as `/proc/locks` tells (`proc_locks(5)`).
pub(crate) fn holder(file: &File) -> Option<u32> {
    find_holder(file, "WRITE")
}

/// One of the processes that share a lock on the file.
pub(crate) fn sharer(file: &File) -> Option<u32> {
    find_holder(file, "READ")
}

fn find_holder(file: &File, kind: &str) -> Option<u32> {
    let meta = file.metadata().ok()?;
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let device = (major(meta.dev()), minor(meta.dev()));
    parse_holder(&locks, device, meta.ino(), kind)
}

fn parse_holder(locks: &str, (major, minor): (u64, u64), inode: u64, wanted: &str) -> Option<u32> {
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match *fields {
            [_, "FLOCK", _, kind, pid, found, ..] if found == file && kind == wanted => {
                pid.parse().ok()
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_by_device_and_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 00:2a:7 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 12 00:2a:8 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 14 00:2a:7 0 EOF\n\
                     3: FLOCK  ADVISORY  READ 15 00:2a:7 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 13 00:2a:7 0 EOF\n";
        assert_eq!(parse_holder(locks, (0, 0x2a), 7, "WRITE"), Some(13));
        assert_eq!(parse_holder(locks, (0, 0x2a), 7, "READ"), Some(15));
        assert_eq!(parse_holder(locks, (0, 0x2b), 7, "WRITE"), None);
    }
}
