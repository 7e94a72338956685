//! Notices that a file changed. What the file means is its reader's business.

use std::{fs::Metadata, io, os::unix::fs::MetadataExt as _, path::PathBuf, time::Duration};

use tokio::time::{Interval, MissedTickBehavior, interval};

/// How often the file's metadata is looked at. Polling sees what inotify misses: the symlink swaps of Kubernetes volumes,
/// bind mounts and network file systems.
const PERIOD: Duration = Duration::from_millis(500);

/// What identifies a version of a file without reading it.
type Version = Option<(u64, u64, u64, i64, i64)>;

/// A file that is read again whenever it changes.
pub(crate) struct WatchedFile {
    path: PathBuf,
    /// What was last read.
    seen: Version,
    /// What was there at the last tick.
    last: Version,
    ticks: Interval,
}

impl WatchedFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { path, seen: None, last: None, ticks }
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Reads the file now, and remembers which version that was.
    pub(crate) fn read(&mut self) -> io::Result<String> {
        self.seen = self.version();
        std::fs::read_to_string(&self.path)
    }

    /// The same for a file that need not be text.
    pub(crate) fn read_bytes(&mut self) -> io::Result<Vec<u8>> {
        self.seen = self.version();
        std::fs::read(&self.path)
    }

    /// Waits until the file differs from what was last read, then reads it. Cancel-safe.
    ///
    /// A file that is written in place is read once it has not changed for a while: its first half may be a whole
    /// document that lacks, for instance, every policy. One that takes another's place by a rename is read at once.
    pub(crate) async fn changed(&mut self) -> io::Result<String> {
        self.news().await;
        self.read()
    }

    /// The same for a file that need not be text.
    pub(crate) async fn bytes_changed(&mut self) -> io::Result<Vec<u8>> {
        self.news().await;
        self.read_bytes()
    }

    async fn news(&mut self) {
        loop {
            self.ticks.tick().await;
            let now = self.version();
            let rests = now == std::mem::replace(&mut self.last, now);
            if now != self.seen && (rests || replaced(self.seen, now)) {
                return;
            }
        }
    }

    fn version(&self) -> Version {
        let of = |m: Metadata| (m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec());
        std::fs::metadata(&self.path).ok().map(of)
    }
}

/// Whether `new` is another file than `old`.
fn replaced(old: Version, new: Version) -> bool {
    let file = |version: Version| version.map(|(device, inode, ..)| (device, inode));
    old.is_some() && file(old) != file(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_replaced_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let mut file = WatchedFile::new(path.clone());
        assert_eq!(file.read().unwrap(), "old");
        let next = dir.path().join("next");
        std::fs::write(&next, "new").unwrap();
        std::fs::rename(&next, &path).unwrap();
        assert_eq!(file.changed().await.unwrap(), "new");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_being_written_is_read_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let mut file = WatchedFile::new(path.clone());
        file.read().unwrap();
        let slowly = async {
            for text in ["", "n", "ne", "new"] {
                std::fs::write(&path, text).unwrap();
                tokio::time::sleep(PERIOD * 3 / 4).await;
            }
        };
        let (read, ()) = tokio::join!(file.changed(), slowly);
        assert_eq!(read.unwrap(), "new");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_vanished_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let mut file = WatchedFile::new(path.clone());
        file.read().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.changed().await.unwrap_err().kind(), io::ErrorKind::NotFound);
        let again = tokio::time::timeout(Duration::from_secs(5), file.changed()).await;
        assert!(again.is_err(), "the same absence was reported twice");
    }
}
