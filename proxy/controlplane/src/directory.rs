//! Objects from files: a directory of YAML, read again where it changes.
//!
//! A mistake takes nothing away: what was read last of the object, or of the file where the object cannot be told, stays.

mod scan;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use culvert_mesh::Snapshot;
use notify::{RecursiveMode, Watcher as _};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use self::scan::{Look, Version};
use crate::{
    documents::{self, Content, Place, Problem},
    objects::{Fault, Key, Object},
    world::Change,
};

/// How long the files have to rest before they are read.
const REST: Duration = Duration::from_millis(100);
/// How long a change that is announced by nobody stays unseen: network file systems and bind mounts announce none.
const PERIOD: Duration = Duration::from_secs(5);

/// Why the directory cannot be read at all.
#[derive(Debug, thiserror::Error)]
#[error("read {}", path.display())]
pub struct DirectoryError {
    path: PathBuf,
    source: io::Error,
}

/// The files, and what they said last.
#[derive(Debug)]
pub(crate) struct Directory {
    root: PathBuf,
    files: BTreeMap<PathBuf, File>,
    /// The files that define each object; the first counts.
    definers: BTreeMap<Key, BTreeSet<PathBuf>>,
}

#[derive(Debug, Default)]
struct File {
    /// What was read.
    read: Version,
    /// What was there at the last look.
    last: Version,
    objects: BTreeMap<Key, (Object, Place)>,
    /// By the number of their document.
    meshes: BTreeMap<usize, Arc<Snapshot>>,
    problems: Vec<Problem>,
}

/// What a look at the files found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) changes: Vec<Change>,
    /// A file is being written: look again soon.
    pub(crate) unrest: bool,
}

impl Directory {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root, files: BTreeMap::new(), definers: BTreeMap::new() }
    }

    /// Reads everything for the first time.
    pub(crate) fn open(&mut self) -> Result<Vec<Change>, DirectoryError> {
        self.look(Look::First).map(|found| found.changes)
    }

    /// Reads what is new, different and at rest.
    pub(crate) fn again(&mut self) -> Result<Found, DirectoryError> {
        self.look(Look::Again)
    }

    /// Everything that is wrong with the files as they are, in their order.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut all: Vec<_> =
            self.files.values().flat_map(|file| file.problems.iter().cloned()).collect();
        for (key, paths) in self.definers.iter().filter(|(_, paths)| paths.len() > 1) {
            let mut paths = paths.iter();
            let first = paths.next();
            for path in paths {
                let first = first.map(|first| first.display().to_string()).unwrap_or_default();
                let what = format!("defined in {first}, too, and that one counts; remove one");
                let fault = Fault { key: Some(key.clone()), field: String::new(), what };
                all.push(Problem::new(path, self.place(path, key), fault));
            }
        }
        all
    }

    /// Where the object of a fault stands.
    pub(crate) fn locate(&self, fault: Fault) -> Problem {
        let path = fault.key.as_ref().and_then(|key| self.definers.get(key)?.first());
        match (path, &fault.key) {
            (Some(path), Some(key)) => Problem::new(path, self.place(path, key), fault),
            _ => Problem::new(&self.root, Place { line: 1, document: 1 }, fault),
        }
    }

    fn place(&self, path: &Path, key: &Key) -> Place {
        let object = self.files.get(path).and_then(|file| file.objects.get(key));
        object.map_or(Place { line: 1, document: 1 }, |(_, place)| *place)
    }

    fn look(&mut self, look: Look) -> Result<Found, DirectoryError> {
        let failed = |source| DirectoryError { path: self.root.clone(), source };
        let there = scan::files(&self.root).map_err(failed)?;
        let mut found = Found::default();
        let mut touched = BTreeSet::new();
        let gone: Vec<_> =
            self.files.keys().filter(|path| !there.contains_key(*path)).cloned().collect();
        for path in gone {
            if let Some(file) = self.files.remove(&path) {
                self.undefine(&path, &file, &mut touched, &mut found.changes);
            }
        }
        for (path, version) in there {
            let file = self.files.entry(path.clone()).or_default();
            let before = std::mem::replace(&mut file.last, version);
            if file.read == version {
                continue;
            }
            if !scan::is_at_rest(look, file.read, before, version) {
                found.unrest = true;
                continue;
            }
            match std::fs::read(&path) {
                Ok(bytes) => {
                    let text = String::from_utf8_lossy(&bytes);
                    let contents = documents::read(&path, &text);
                    self.define(&path, version, contents, &mut touched, &mut found.changes);
                }
                // It went away, or is not ours to read: the former shows at the next look.
                Err(error) => {
                    let what = format!("cannot be read: {error}; correct its mode");
                    let fault = Fault { key: None, field: String::new(), what };
                    file.problems =
                        vec![Problem::new(&path, Place { line: 1, document: 1 }, fault)];
                    file.read = version;
                }
            }
        }
        found.changes.extend(touched.into_iter().map(|key| self.winner(key)));
        Ok(found)
    }

    /// The version of an object that counts.
    fn winner(&self, key: Key) -> Change {
        let path = self.definers.get(&key).and_then(BTreeSet::first);
        let object = path.and_then(|path| self.files.get(path)?.objects.get(&key));
        match object {
            Some((object, _)) => Change::Set(key, object.clone()),
            None => Change::Remove(key),
        }
    }

    fn undefine(
        &mut self,
        path: &Path,
        file: &File,
        touched: &mut BTreeSet<Key>,
        changes: &mut Vec<Change>,
    ) {
        for key in file.objects.keys() {
            if let Some(paths) = self.definers.get_mut(key) {
                paths.remove(path);
                if paths.is_empty() {
                    self.definers.remove(key);
                }
            }
            touched.insert(key.clone());
        }
        let origins = file.meshes.keys().map(|&document| origin(path, document));
        changes.extend(origins.map(|origin| Change::Mesh(origin, None)));
    }

    fn define(
        &mut self,
        path: &Path,
        version: Version,
        contents: Vec<Content>,
        touched: &mut BTreeSet<Key>,
        changes: &mut Vec<Change>,
    ) {
        let old = self.files.remove(path).unwrap_or_default();
        let new = merge(path, version, contents, &old);
        for (document, mesh) in &new.meshes {
            if old.meshes.get(document).is_none_or(|old| !Arc::ptr_eq(old, mesh)) {
                changes.push(Change::Mesh(origin(path, *document), Some(Arc::clone(mesh))));
            }
        }
        let gone = old.meshes.keys().filter(|document| !new.meshes.contains_key(document));
        changes.extend(gone.map(|&document| Change::Mesh(origin(path, document), None)));
        for key in old.objects.keys().filter(|key| !new.objects.contains_key(key)) {
            if let Some(paths) = self.definers.get_mut(key) {
                paths.remove(path);
                if paths.is_empty() {
                    self.definers.remove(key);
                }
            }
            touched.insert(key.clone());
        }
        for (key, (object, _)) in &new.objects {
            let is_new = self.definers.entry(key.clone()).or_default().insert(path.to_owned());
            if is_new || old.objects.get(key).is_none_or(|(old, _)| old != object) {
                touched.insert(key.clone());
            }
        }
        self.files.insert(path.to_owned(), new);
    }
}

fn origin(path: &Path, document: usize) -> String {
    format!("{}: document {document}", path.display())
}

/// What a file says now, with what it said before wherever it now says nothing that can be understood.
fn merge(path: &Path, version: Version, contents: Vec<Content>, old: &File) -> File {
    let mut new = File { read: version, last: version, ..File::default() };
    let mut lost = false;
    for content in contents {
        match content {
            Content::Object(key, object, place) => {
                if new.objects.insert(key.clone(), (object, place)).is_some() {
                    let what = "defined twice in the file, and the last one counts; remove one";
                    let fault =
                        Fault { key: Some(key), field: String::new(), what: what.to_owned() };
                    new.problems.push(Problem::new(path, place, fault));
                }
            }
            Content::Mesh(mesh, place) => drop(new.meshes.insert(place.document, mesh)),
            Content::Bad(problem) => {
                let kept = problem.key.as_ref().and_then(|key| Some((key, old.objects.get(key)?)));
                match (&problem.key, kept) {
                    (_, Some((key, kept))) => drop(new.objects.insert(key.clone(), kept.clone())),
                    (Some(_), None) => {}
                    (None, None) => lost = true,
                }
                new.problems.push(problem);
            }
        }
    }
    if lost {
        for (key, object) in &old.objects {
            new.objects.entry(key.clone()).or_insert_with(|| object.clone());
        }
        for (document, mesh) in &old.meshes {
            new.meshes.entry(*document).or_insert_with(|| Arc::clone(mesh));
        }
    }
    new
}

/// Tells when the files may have changed.
#[derive(Debug)]
pub(crate) struct Watch {
    events: watch::Receiver<()>,
    /// Announces until it is dropped.
    _watcher: Option<notify::RecommendedWatcher>,
}

impl Watch {
    /// Watches `root`. Where the kernel cannot, changes are seen by looking.
    pub(crate) fn new(root: &Path) -> Self {
        let (told, events) = watch::channel(());
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading the files is an event, too.
            if !event.is_ok_and(|event| event.kind.is_access()) {
                told.send_replace(());
            }
        });
        // A file that another takes the place of is announced by its folder alone.
        let (watched, mode) = match root.parent() {
            Some(folder) if root.is_file() => (folder, RecursiveMode::NonRecursive),
            _ => (root, RecursiveMode::Recursive),
        };
        let watched = if watched.as_os_str().is_empty() { Path::new(".") } else { watched };
        let watcher = watcher.and_then(|mut watcher| {
            watcher.watch(watched, mode)?;
            Ok(watcher)
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, path = %root.display(), "changes are not announced; looking every 5 s");
        });
        Self { events, _watcher: watcher.ok() }
    }

    /// Waits until there may be something new and the files have rested for a moment. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        match timeout(PERIOD, self.events.changed()).await {
            Ok(Ok(())) => self.rest().await,
            // Nobody announces any more.
            Ok(Err(_closed)) => sleep(PERIOD).await,
            Err(_elapsed) => {}
        }
    }

    /// Waits for a pause, but not for ever: files may be written without one.
    pub(crate) async fn rest(&mut self) {
        for _ in 0..10 {
            if timeout(REST, self.events.changed()).await.is_err() {
                return;
            }
        }
    }
}
