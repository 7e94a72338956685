//! Which pods to enrol. Sources yield events; what enrolment does with them is [`crate::enroll`]'s.

mod file;
mod governed;
mod policy;
mod sources;

use std::sync::Arc;

use culvert_agent::pods::Place;
use culvert_capture::Settings;
use culvert_mesh::PodRef;

use file::PodsFile;
pub use file::PodsFileError;
use governed::Governed;
pub(crate) use policy::Policy;
pub use sources::SourceError;
pub(crate) use sources::{Sources, cluster};

/// A pod that a source wants enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodSpec {
    /// Tells pods apart for as long as the source knows them.
    pub(crate) uid: Arc<str>,
    /// Whose identity its connections carry.
    pub(crate) pod: PodRef,
    /// Its network namespace.
    pub(crate) netns: Place,
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

    /// Whether the operator has written down what it tells: a pod that cannot be enrolled at the first start is a mistake
    /// then.
    fn is_static(&self) -> bool;

    /// What came of the last event about this pod: it was done, or why not.
    fn settled(&mut self, uid: &str, outcome: Result<(), &str>);
}
