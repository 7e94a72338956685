//! The report: one table a group, in Markdown, also printed row by row while it is measured.

use std::fmt::Write as _;

use crate::{
    pairs::Pair,
    stats::{Bound, Estimate, Verdict},
};

/// How a ratio of 1 would have to move to be better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    More,
    Less,
}

/// What is measured, in what unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantity {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
}

/// The report so far.
#[derive(Debug, Default)]
pub(crate) struct Report {
    text: String,
    verdicts: Vec<Verdict>,
}

impl Report {
    /// The title, and the facts of the machine.
    pub(crate) fn begin(facts: &[(&str, String)], pairs: usize) -> Self {
        let mut report = Self::default();
        report.line("# culvert, measured\n");
        for (name, value) in facts {
            report.line(&format!("- {name}: {value}"));
        }
        report.line(&format!("- pairs: {pairs} of each comparison, after one that is dropped\n"));
        report.line(PREAMBLE);
        report
    }

    /// Begins a table; `what` says what is compared with what, and how it was arranged.
    pub(crate) fn section(&mut self, title: &str, what: &str, reference: &str, ours: &str) {
        self.line(&format!("\n## {title}\n\n{what}\n"));
        self.line(&format!(
            "| measure | unit | {reference} | {ours} | ratio | 95 % interval | better | bound | verdict |"
        ));
        self.line("|---|---|---|---|---|---|---|---|---|");
    }

    /// A row: the ratio of each pair, culvert's to the reference's, which the bound is on.
    pub(crate) fn row(&mut self, quantity: Quantity, pairs: &[Pair<f64>], bound: Option<Bound>) {
        let ratios: Vec<f64> = pairs.iter().map(|(reference, ours)| ours / reference).collect();
        let judged = bound.map(|bound| (bound, shown(bound), ratios.as_slice()));
        self.compared(quantity, pairs, &ratios, judged);
    }

    /// A row whose bound is on culvert's own value.
    pub(crate) fn limited(&mut self, quantity: Quantity, pairs: &[Pair<f64>], bound: Bound) {
        let ratios: Vec<f64> = pairs.iter().map(|(reference, ours)| ours / reference).collect();
        let values: Vec<f64> = pairs.iter().map(|(_, ours)| *ours).collect();
        let limit = format!("{} {}", shown(bound), quantity.unit);
        self.compared(quantity, pairs, &ratios, Some((bound, limit, &values)));
    }

    fn compared(
        &mut self,
        quantity: Quantity,
        pairs: &[Pair<f64>],
        ratios: &[f64],
        judged: Option<(Bound, String, &[f64])>,
    ) {
        let median = |side: fn(&Pair<f64>) -> f64| {
            let values: Vec<f64> = pairs.iter().map(side).collect();
            Estimate::of(&values).map_or_else(String::new, |estimate| digits(estimate.median))
        };
        let Some(estimate) = Estimate::of(ratios) else { return };
        let Quantity { name, unit, better } = quantity;
        let better = match better {
            Better::More => "more",
            Better::Less => "less",
        };
        let (limit, verdict) = judged.map_or_else(Default::default, |(bound, limit, values)| {
            let verdict = bound.judge(Estimate::of(values).and_then(|values| values.interval));
            self.verdicts.push(verdict);
            (limit, word(verdict))
        });
        self.line(&format!(
            "| {name} | {unit} | {} | {} | {:.3} | {} | {better} | {limit} | {verdict} |",
            median(|pair| pair.0),
            median(|pair| pair.1),
            estimate.median,
            interval(&estimate, |value| format!("{value:.3}")),
        ));
    }

    /// A row for what the reference does not have, such as a proxy: the median and the interval of the value itself.
    pub(crate) fn absolute(&mut self, quantity: Quantity, values: &[f64]) {
        let Some(estimate) = Estimate::of(values) else { return };
        let Quantity { name, unit, .. } = quantity;
        let range = interval(&estimate, digits);
        self.line(&format!(
            "| {name} | {unit} | – | {} | – | {range} | less | | |",
            digits(estimate.median)
        ));
    }

    /// The whole text, with a line that sums the verdicts up.
    pub(crate) fn end(mut self) -> String {
        let count = |verdict| self.verdicts.iter().filter(|one| **one == verdict).count();
        let line = format!(
            "\nBounds: {} shown, {} not shown, {} missed.",
            count(Verdict::Shown),
            count(Verdict::NotShown),
            count(Verdict::Missed)
        );
        self.line(&line);
        self.text
    }

    fn line(&mut self, line: &str) {
        println!("{line}");
        // Writing to a string cannot fail.
        writeln!(self.text, "{line}").unwrap_or_default();
    }
}

fn interval(estimate: &Estimate, shown: impl Fn(f64) -> String) -> String {
    estimate.interval.map_or_else(
        || "too few pairs".to_owned(),
        |interval| format!("{} to {}", shown(interval.low), shown(interval.high)),
    )
}

fn shown(bound: Bound) -> String {
    match bound {
        Bound::AtMost(value) => format!("<= {value}"),
        Bound::AtLeast(value) => format!(">= {value}"),
    }
}

const fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Shown => "shown",
        Verdict::NotShown => "not shown",
        Verdict::Missed => "missed",
    }
}

/// Three significant digits.
fn digits(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 100.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

const PREAMBLE: &str = "\
Client, server, kernel and all proxies share the cores of this one machine, so absolute values say little about a
real network, and a ratio to no proxy at all is worse here than there. Samples are taken in interleaved pairs, the
sides taking turns at going first. A ratio is the median of the pairs' ratios, culvert's value over the other's;
without a reference there is none, and the interval is that of the value itself. The interval holds the true median
with a probability of at least 95 % (order statistics, no assumption on the distribution). A bound is *shown* if the
whole interval keeps it, *missed* if the whole interval breaks it, else *not shown*. CPU time of the proxies is user
and kernel time of both nodes' culvert processes; that of the machine is all time not idle. Proxies log each
connection at level info to a file. A bound with a unit is on culvert's value, not on the ratio.";

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Quantity = Quantity { name: "rate", unit: "Gbit/s", better: Better::More };

    fn last_line(report: &Report) -> &str {
        report.text.lines().last().unwrap()
    }

    #[test]
    fn a_row_shows_both_medians_the_ratio_and_the_verdict() {
        let mut report = Report::default();
        let pairs: Vec<Pair<f64>> = (0..11).map(|i| (10.0, 19.0 + f64::from(i) / 10.0)).collect();
        report.row(RATE, &pairs, Some(Bound::AtLeast(1.5)));
        assert_eq!(
            last_line(&report),
            "| rate | Gbit/s | 10.0 | 19.5 | 1.950 | 1.910 to 1.990 | more | >= 1.5 | shown |"
        );
        assert!(report.end().ends_with("Bounds: 1 shown, 0 not shown, 0 missed.\n"));
    }

    #[test]
    fn a_bound_may_be_on_the_value_instead() {
        let mut report = Report::default();
        let pairs: Vec<Pair<f64>> = (0..11).map(|i| (1.0, 19.0 + f64::from(i) / 10.0)).collect();
        report.limited(RATE, &pairs, Bound::AtLeast(19.1));
        let end = "| 1.00 | 19.5 | 19.500 | 19.100 to 19.900 | more | >= 19.1 Gbit/s | shown |";
        assert!(last_line(&report).ends_with(end), "{}", last_line(&report));
    }

    #[test]
    fn few_pairs_show_nothing() {
        let mut report = Report::default();
        report.row(RATE, &[(1.0, 2.0); 3], Some(Bound::AtLeast(1.5)));
        assert!(last_line(&report).ends_with("| too few pairs | more | >= 1.5 | not shown |"));
    }
}
