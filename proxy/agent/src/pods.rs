//! What a source of pods tells, and what it is told in turn.

use std::{collections::BTreeMap, fmt, path::PathBuf, sync::Arc};

use culvert_mesh::PodRef;
use culvert_sys::netns::{Netns, NetnsError};

/// A pod that a source wants enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// Tells pods apart for as long as the source knows them.
    pub uid: Arc<str>,
    /// Whose identity its connections carry.
    pub pod: PodRef,
    /// Its network namespace.
    pub netns: Place,
    /// What the pod says about itself.
    pub annotations: BTreeMap<String, String>,
}

/// Where a network namespace is.
#[derive(Clone, Debug)]
pub enum Place {
    /// At a path that may come to be, or to mean another one.
    Path(PathBuf),
    /// Open.
    Open(Netns),
}

impl Place {
    /// The namespace.
    pub fn open(&self) -> Result<Netns, NetnsError> {
        match self {
            Self::Path(path) => Netns::open(path),
            Self::Open(netns) => Ok(netns.clone()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Open(netns) => write!(f, "net:[{}]", netns.inode()),
        }
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Path(one), Self::Path(other)) => one == other,
            (Self::Open(one), Self::Open(other)) => one.is(other),
            _ => false,
        }
    }
}

impl Eq for Place {}

/// What a source tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// Enrol this pod; if one of the same uid is enrolled, this one takes its place.
    Added(PodSpec),
    /// Un-enrol it.
    Removed(Arc<str>),
    /// Every pod that existed when the source started has been told; whatever else is pinned is stale.
    Synced,
}

/// A place that pods come from.
pub trait PodSource: Send {
    /// The next event; never ends while the node runs. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = PodEvent> + Send;

    /// What came of the last event about this pod: it was done, or why not. What failed is tried again by whoever tells.
    fn settled(&mut self, uid: &str, outcome: Result<(), &str>);
}
