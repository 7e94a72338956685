//! What peers say of themselves, for records of those that the mesh does not know.
//!
//! Nobody vouches for it, so it is shown and nothing more; and since a peer may say something else with every
//! connection, what was said first by so many is shown, and what others say is not.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

/// So many different claims become label sets; each is there for as long as the process.
pub(crate) const MOST: usize = 1024;

/// What a peer says of its workload. Empty texts are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Claims {
    /// The name of the workload, such as a Deployment's.
    pub workload: Arc<str>,
    /// Its canonical name.
    pub canonical_name: Arc<str>,
    /// Its canonical revision.
    pub canonical_revision: Arc<str>,
    /// The namespace, which is its identity's.
    pub namespace: Arc<str>,
    /// The cluster.
    pub cluster: Arc<str>,
    /// The region and zone.
    pub locality: Option<(Arc<str>, Arc<str>)>,
}

/// The claims that are shown.
#[derive(Debug, Default)]
pub(crate) struct Shown(Mutex<HashSet<Arc<Claims>>>);

impl Shown {
    /// Whether `claims` are shown, as they are from their first time on while there is room.
    pub(crate) fn admits(&self, claims: &Arc<Claims>) -> bool {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.contains(claims) {
            return true;
        }
        shown.len() < MOST && shown.insert(Arc::clone(claims))
    }
}
