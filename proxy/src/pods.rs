//! Which pods to enrol. Sources yield events; what enrolment does with them is [`crate::enroll`]'s.

mod file;
mod policy;

use std::{path::PathBuf, sync::Arc};

use culvert_capture::Settings;
use culvert_mesh::PodRef;

pub(crate) use file::PodsFile;
pub use file::PodsFileError;
pub(crate) use policy::Policy;

/// A pod that a source wants enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodSpec {
    /// Tells pods apart for as long as the source knows them.
    pub(crate) uid: Arc<str>,
    /// Whose identity its connections carry.
    pub(crate) pod: PodRef,
    /// Its network namespace.
    pub(crate) netns: PathBuf,
    /// How it is captured, as far as the node lets it choose.
    pub(crate) settings: Settings,
}

/// What a source tells.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PodEvent {
    /// Enrol this pod; if one of the same uid is enrolled, this one takes its place, and if only its settings differ, it
    /// gets those.
    Added(PodSpec),
    /// Un-enrol it.
    Removed(Arc<str>),
    /// Every pod that existed when the source started has been told; whatever else is pinned is stale.
    Synced,
}

/// A place that pods come from.
pub(crate) trait PodSource: Send {
    /// The next event; never ends while the node runs. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = PodEvent> + Send;
}
