//! What capture had to mend, and what it could not, since the process started. Showing it is the binary's.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// What somebody else had removed or changed in a pod's namespace, and the watch put back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Repair {
    Rule,
    Route,
    Qdisc,
    Filter,
    /// A program of somebody else was attached before ours.
    FilterOrder,
    Sysctl,
    Lookup,
}

/// What the watch could not do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failure {
    /// A step was refused; it is tried again.
    Refused,
    /// A defect of ours.
    Panicked,
    /// The pod has more addresses than it may.
    AddressIgnored,
    /// The node's end of an interface is not to be had.
    Unguarded,
    /// The maps have no room for a pod's settings.
    SettingsRefused,
    /// A program of somebody else runs when pods connect.
    Rewriter,
}

/// Shared by a node and its pods.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    repairs: [AtomicU64; 7],
    failures: [AtomicU64; 6],
}

impl Counts {
    /// Logs and counts a repair.
    pub(crate) fn repaired(&self, pod: u32, kind: Repair, what: impl fmt::Display) {
        tracing::warn!(pod, %what, "put back what somebody had removed or changed in a pod");
        if let Some(count) = self.repairs.get(kind as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn failed(&self, kind: Failure, times: u64) {
        if let Some(count) = self.failures.get(kind as usize) {
            count.fetch_add(times, Ordering::Relaxed);
        }
    }

    pub(crate) fn repairs(&self) -> Vec<(&'static str, u64)> {
        let names = ["rule", "route", "qdisc", "filter", "filter_order", "sysctl", "sk_lookup"];
        read(names, &self.repairs)
    }

    pub(crate) fn failures(&self) -> Vec<(&'static str, u64)> {
        let names = [
            "refused",
            "panicked",
            "address_ignored",
            "unguarded",
            "settings_refused",
            "foreign_connect_program",
        ];
        read(names, &self.failures)
    }
}

fn read<const N: usize>(
    names: [&'static str; N],
    counts: &[AtomicU64; N],
) -> Vec<(&'static str, u64)> {
    names.into_iter().zip(counts).map(|(name, n)| (name, n.load(Ordering::Relaxed))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_count_of_its_own() {
        let counts = Counts::default();
        counts.repaired(1, Repair::Lookup, "its sk_lookup link");
        counts.failed(Failure::Rewriter, 7);
        assert_eq!(counts.repairs().last(), Some(&("sk_lookup", 1)));
        assert_eq!(counts.repairs().iter().map(|(_, count)| count).sum::<u64>(), 1);
        assert_eq!(counts.failures().last(), Some(&("foreign_connect_program", 7)));
    }
}
