//! How much of everything a run takes.

use std::time::Duration;

/// The size of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Pairs of each comparison.
    pub(crate) pairs: usize,
    /// Messages of a sample.
    pub(crate) round_trips: usize,
    /// Connections of a sample.
    pub(crate) connections: usize,
    /// How long bulk streams send in a sample.
    pub(crate) bulk: Duration,
    /// Workloads of a large mesh.
    pub(crate) workloads: usize,
    /// Pairs of starts with a small and a large mesh.
    pub(crate) starts: usize,
    /// Changes of such a mesh, and decisions in it, of a sample.
    pub(crate) changes: usize,
    /// How long a proxy is left alone before its memory is read.
    pub(crate) rest: Duration,
}

impl Sizes {
    /// Enough for the bounds to be shown.
    pub(crate) const FULL: Self = Self {
        pairs: 11,
        round_trips: 4000,
        connections: 2000,
        bulk: Duration::from_secs(1),
        workloads: 100_000,
        starts: 6,
        changes: 30,
        rest: Duration::from_secs(12),
    };

    /// Only enough to see that everything runs.
    pub(crate) const QUICK: Self = Self {
        pairs: 2,
        round_trips: 100,
        connections: 80,
        bulk: Duration::from_millis(50),
        workloads: 500,
        starts: 1,
        changes: 2,
        rest: Duration::ZERO,
    };
}
