//! Outcomes of the BPF programs, read from their counters at each scrape; reading the map is the loader's.

use std::fmt;

use culvert_abi::Outcome;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

/// Reads the counters, summed over CPUs and programs. Outcomes that cannot be read are left out.
pub trait ReadOutcomes: Send + Sync + 'static {
    /// How often each outcome happened since the programs' maps were made.
    fn read_outcomes(&self) -> Vec<(Outcome, u64)>;
}

impl<F: Fn() -> Vec<(Outcome, u64)> + Send + Sync + 'static> ReadOutcomes for F {
    fn read_outcomes(&self) -> Vec<(Outcome, u64)> {
        self()
    }
}

/// `culvert_bpf_outcomes_total{program,outcome}`: at most one sample an [`Outcome`]. Counts survive restarts of the
/// proxy, like the maps that hold them.
pub struct BpfOutcomes<R>(R);

impl<R: ReadOutcomes> BpfOutcomes<R> {
    /// A collector over `read`, to be given to `Registry::register_collector`.
    pub fn new(read: R) -> Self {
        Self(read)
    }
}

impl<R> fmt::Debug for BpfOutcomes<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BpfOutcomes").finish_non_exhaustive()
    }
}

impl<R: ReadOutcomes> Collector for BpfOutcomes<R> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let outcomes = self.0.read_outcomes();
        if outcomes.is_empty() {
            return Ok(());
        }
        let help = "What the BPF programs did with sockets and packets.";
        let mut family =
            encoder.encode_descriptor("culvert_bpf_outcomes", help, None, MetricType::Counter)?;
        for (outcome, count) in outcomes {
            let (program, outcome) = outcome.labels();
            let labels = [("program", program), ("outcome", outcome)];
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    fn exposition(outcomes: Vec<(Outcome, u64)>) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(BpfOutcomes::new(move || outcomes.clone())));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn outcomes_are_labelled_by_program() {
        let text = exposition(vec![
            (Outcome::Marked, 3),
            (Outcome::HoldIn, 0),
            (Outcome::GuardUncaptured, 7),
        ]);
        let want = "\
            # HELP culvert_bpf_outcomes What the BPF programs did with sockets and packets.\n\
            # TYPE culvert_bpf_outcomes counter\n\
            culvert_bpf_outcomes_total{program=\"mark_connect\",outcome=\"marked\"} 3\n\
            culvert_bpf_outcomes_total{program=\"hold_in\",outcome=\"held\"} 0\n\
            culvert_bpf_outcomes_total{program=\"guard\",outcome=\"uncaptured\"} 7\n\
            # EOF\n";
        assert_eq!(text, want);
    }

    #[test]
    fn unreadable_counters_leave_no_empty_family() {
        assert_eq!(exposition(vec![]), "# EOF\n");
    }
}
