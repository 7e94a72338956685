//! Pods from a file, read strictly and again whenever it changes. A bad new version keeps the pods of the old one.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use culvert_agent::pods::Place;
use culvert_mesh::PodRef;
use serde::Deserialize;
use serde_saphyr::Spanned;

use super::{PodEvent, PodSource, PodSpec, Policy};
use crate::watch::WatchedFile;

/// Why a pods file was refused; nothing of it is used then.
#[derive(Debug, thiserror::Error)]
pub enum PodsFileError {
    /// It could not be read.
    #[error("read pods file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// It is not YAML of the form expected.
    #[error("{}:{line}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line of the offence, from 1; 0 when the parser knows none.
        line: u64,
        /// What is wrong with it, in one line.
        reason: String,
    },
    /// A field has a value that cannot be.
    #[error("{}:{line}: pods[{index}].{field}: {reason}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Line of the field, from 1.
        line: u64,
        /// Which pod, from 0.
        index: usize,
        /// Which of its fields.
        field: &'static str,
        /// What is wrong, and the remedy.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    // Required: a file that is caught while it is written again is empty, and that must not un-enrol every pod.
    pods: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Entry {
    name: Spanned<String>,
    namespace: Spanned<String>,
    service_account: Spanned<String>,
    netns: Spanned<PathBuf>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// A pod as the file has it.
#[derive(Debug)]
struct Listed {
    pod: PodRef,
    netns: PathBuf,
    annotations: BTreeMap<String, String>,
    line: u64,
}

/// The static pod source.
pub(crate) struct PodsFile {
    file: WatchedFile,
    policy: Policy,
    known: BTreeMap<Arc<str>, PodSpec>,
    queue: VecDeque<PodEvent>,
}

impl PodsFile {
    /// Reads the file for the first time, when a mistake in it is still an error.
    pub(crate) fn open(path: PathBuf, policy: Policy) -> Result<Self, PodsFileError> {
        let mut file = WatchedFile::new(path);
        let text = file
            .read()
            .map_err(|source| PodsFileError::Read { path: file.path().to_owned(), source })?;
        let pods = parse(file.path(), &text)?;
        let mut this = Self { file, policy, known: BTreeMap::new(), queue: VecDeque::new() };
        this.replace(pods);
        this.queue.push_back(PodEvent::Synced);
        Ok(this)
    }

    /// Queues what differs: removals first, so that an address can move from one pod to another.
    fn replace(&mut self, listed: BTreeMap<Arc<str>, Listed>) {
        let specs =
            listed.into_iter().map(|(uid, listed)| (Arc::clone(&uid), self.spec(uid, listed)));
        let pods: BTreeMap<_, _> = specs.collect();
        let gone = self.known.keys().filter(|uid| !pods.contains_key(*uid));
        self.queue.extend(gone.map(|uid| PodEvent::Removed(Arc::clone(uid))));
        let new = pods.iter().filter(|(uid, pod)| self.known.get(*uid) != Some(pod));
        self.queue.extend(new.map(|(_, pod)| PodEvent::Added(pod.clone())));
        self.known = pods;
    }

    fn spec(&self, uid: Arc<str>, listed: Listed) -> PodSpec {
        let Listed { pod, netns, annotations, line } = listed;
        let former = self.known.get(&uid).map(|spec| &spec.settings);
        let whose = format!("{}:{line}: pod {uid}", self.file.path().display());
        let settings = self.policy.settings(&annotations, former, whose);
        PodSpec { uid, pod, netns: Place::Path(netns), settings }
    }
}

impl PodSource for PodsFile {
    async fn next(&mut self) -> PodEvent {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return event;
            }
            let read = self.file.changed().await;
            let path = self.file.path();
            let pods = read
                .map_err(|source| PodsFileError::Read { path: path.to_owned(), source })
                .and_then(|text| parse(path, &text));
            match pods {
                Ok(pods) => self.replace(pods),
                Err(error) => {
                    let error = crate::error::chain(&error);
                    tracing::error!(
                        error,
                        "pods file refused; keeping the pods of its last good version"
                    );
                }
            }
        }
    }

    fn is_static(&self) -> bool {
        true
    }

    /// A file has nowhere to note it.
    fn settled(&mut self, _uid: &str, _outcome: Result<(), &str>) {}
}

fn parse(path: &Path, text: &str) -> Result<BTreeMap<Arc<str>, Listed>, PodsFileError> {
    let document: Document = serde_saphyr::from_str(text).map_err(|error| {
        let error = error.without_snippet();
        PodsFileError::Malformed {
            path: path.to_owned(),
            line: error.location().map_or(0, |location| location.line()),
            reason: error.to_string().replace('\n', " "),
        }
    })?;
    let mut pods = BTreeMap::new();
    for (index, entry) in document.pods.into_iter().enumerate() {
        let refuse = |field, line, reason: String| PodsFileError::Field {
            path: path.to_owned(),
            line,
            index,
            field,
            reason,
        };
        for (field, value) in [
            ("name", &entry.name),
            ("namespace", &entry.namespace),
            ("serviceAccount", &entry.service_account),
        ] {
            check_name(&value.value)
                .map_err(|reason| refuse(field, value.referenced.line(), reason.to_owned()))?;
        }
        if !entry.netns.value.is_absolute() {
            let reason = "must be an absolute path such as /run/netns/NAME".to_owned();
            return Err(refuse("netns", entry.netns.referenced.line(), reason));
        }
        let line = entry.name.referenced.line();
        let uid: Arc<str> = format!("{}/{}", entry.namespace.value, entry.name.value).into();
        let pod = PodRef {
            name: entry.name.value.into(),
            namespace: entry.namespace.value.into(),
            service_account: entry.service_account.value.into(),
        };
        let listed = Listed { pod, netns: entry.netns.value, annotations: entry.annotations, line };
        if pods.insert(Arc::clone(&uid), listed).is_some() {
            return Err(refuse("name", line, format!("pod {uid} is listed twice; remove one")));
        }
    }
    Ok(pods)
}

/// Kubernetes object names are DNS subdomains (RFC 1123): they become part of a SPIFFE ID, so nothing else may pass.
fn check_name(name: &str) -> Result<(), &'static str> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if !name.is_empty() && name.len() <= 253 && name.chars().all(plain) {
        Ok(())
    } else {
        Err("must be a name of at most 253 lower-case letters, digits, '-' and '.'")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "pods:\n\
        - {name: a, namespace: shop, serviceAccount: web, netns: /run/netns/a}\n\
        - {name: b, namespace: shop, serviceAccount: db, netns: /run/netns/b}\n";

    #[track_caller]
    fn refused(text: &str, want: &str) {
        let error = parse(Path::new("pods.yaml"), text).unwrap_err().to_string();
        assert!(error.starts_with("pods.yaml:") && error.contains(want), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }

    #[test]
    fn mistakes_name_the_line_the_field_and_the_remedy() {
        refused("pods:\n- {name: a, namespace: n, serviceAccount: s, netns: /n, x: 1}\n", "x");
        refused("pods:\n- {name: a, namespace: n, netns: /n}\n", "serviceAccount");
        refused(
            "pods:\n- {name: a/b, namespace: n, serviceAccount: s, netns: /n}\n",
            ":2: pods[0].name",
        );
        refused(
            "pods:\n- {name: '', namespace: n, serviceAccount: s, netns: /n}\n",
            "pods[0].name",
        );
        refused("pods:\n- {name: a, namespace: n, serviceAccount: s, netns: n}\n", "absolute path");
        refused(
            &format!("{TWO}- {{name: a, namespace: shop, serviceAccount: x, netns: /z}}\n"),
            "listed twice",
        );
        refused("pods: [", "pods.yaml:");
        refused("", "pods");
        refused("# nothing yet\n", "pods");
        refused("{}", "pods");
        refused("pods:", "pods");
        refused("pods: ~", "pods");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_told_as_removals_then_additions() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pods.yaml");
        std::fs::write(&path, TWO).unwrap();
        let mut source = PodsFile::open(path.clone(), Policy::new(false, true)).unwrap();
        assert!(matches!(source.next().await, PodEvent::Added(pod) if &*pod.uid == "shop/a"));
        assert!(matches!(source.next().await, PodEvent::Added(pod) if &*pod.uid == "shop/b"));
        assert_eq!(source.next().await, PodEvent::Synced);
        std::fs::write(&path, TWO.replace("name: a", "name: longer")).unwrap();
        assert_eq!(source.next().await, PodEvent::Removed("shop/a".into()));
        assert!(matches!(source.next().await, PodEvent::Added(pod) if &*pod.uid == "shop/longer"));
    }

    #[tokio::test(start_paused = true)]
    async fn annotations_are_settings_and_a_mistake_in_them_is_one_pods_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pods.yaml");
        let with = |a: &str, b: &str| {
            format!(
                "pods:\n\
                 - {{name: a, namespace: n, serviceAccount: s, netns: /a, annotations: {{{a}}}}}\n\
                 - {{name: b, namespace: n, serviceAccount: s, netns: /b, annotations: {{{b}}}}}\n"
            )
        };
        const BYPASS: &str = "ambient.istio.io/bypass-inbound-capture";
        std::fs::write(&path, with(&format!("{BYPASS}: 'true'"), "other: x")).unwrap();
        let mut source = PodsFile::open(path.clone(), Policy::new(false, true)).unwrap();
        let mut told = Vec::new();
        for _ in 0..2 {
            let PodEvent::Added(pod) = source.next().await else { panic!("a pod is missing") };
            told.push((pod.uid.to_string(), pod.settings.bypass_inbound));
        }
        assert_eq!(told, [("n/a".to_owned(), true), ("n/b".to_owned(), false)]);
        assert_eq!(source.next().await, PodEvent::Synced);
        // a keeps what it has, and nothing else is told of it.
        let changed = with(&format!("{BYPASS}: 'perhaps'"), &format!("{BYPASS}: 'true'"));
        std::fs::write(&path, changed).unwrap();
        let PodEvent::Added(pod) = source.next().await else { panic!("b has changed") };
        assert_eq!((&*pod.uid, pod.settings.bypass_inbound), ("n/b", true));
        assert!(source.known["n/a"].settings.bypass_inbound);
    }

    #[tokio::test(start_paused = true)]
    async fn a_bad_version_keeps_the_old_pods() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pods.yaml");
        std::fs::write(&path, TWO).unwrap();
        let mut source = PodsFile::open(path.clone(), Policy::new(false, true)).unwrap();
        for _ in 0..3 {
            source.next().await;
        }
        std::fs::write(&path, "pods: {").unwrap();
        let told = tokio::time::timeout(std::time::Duration::from_secs(5), source.next()).await;
        assert!(told.is_err(), "{told:?}");
        assert_eq!(source.known.len(), 2);
    }
}
