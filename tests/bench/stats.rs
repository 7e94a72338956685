//! What a handful of noisy pairs can tell: the median of their ratios, an interval around it, and a verdict on a bound.
//!
//! The interval is distribution-free: it runs between two order statistics, and the chance that the median lies
//! outside is that of a fair coin falling so unevenly. Leaves taking the samples to `pairs`.

/// The least coverage of an interval.
const CONFIDENCE: f64 = 0.95;

/// The median of some values, and where the true one is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Estimate {
    /// The middle value, or the mean of the two.
    pub(crate) median: f64,
    /// Holds the true median with a probability of at least 95 %; `None` for fewer than six values.
    pub(crate) interval: Option<Interval>,
}

/// `low <= high`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Interval {
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Which values are good enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// What the interval says about a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The whole interval is on the right side.
    Shown,
    /// The bound lies inside the interval, or there is none.
    NotShown,
    /// The whole interval is on the wrong side.
    Missed,
}

impl Estimate {
    /// `None` without values.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let upper = *sorted.get(sorted.len() / 2)?;
        let lower = *sorted.get((sorted.len() - 1) / 2)?;
        let interval = trimmed(sorted.len()).and_then(|cut| {
            Some(Interval { low: *sorted.get(cut)?, high: *sorted.get(sorted.len() - 1 - cut)? })
        });
        Some(Self { median: f64::midpoint(lower, upper), interval })
    }
}

impl Bound {
    pub(crate) fn judge(self, interval: Option<Interval>) -> Verdict {
        let Some(Interval { low, high }) = interval else { return Verdict::NotShown };
        let (shown, missed) = match self {
            Self::AtMost(bound) => (high <= bound, low > bound),
            Self::AtLeast(bound) => (low >= bound, high < bound),
        };
        match (shown, missed) {
            (true, _) => Verdict::Shown,
            (false, true) => Verdict::Missed,
            (false, false) => Verdict::NotShown,
        }
    }
}

/// How many values may be cut off at each end of `count` so that the rest still covers the median; `None` when even
/// the whole range does not.
fn trimmed(count: usize) -> Option<usize> {
    let mut cut = None;
    // The chance that exactly `k` of the values are below the median.
    let mut exactly = 0.5_f64.powi(i32::try_from(count).ok()?);
    let mut fewer = 0.0;
    for k in 0..count.div_ceil(2) {
        fewer += exactly;
        if 1.0 - 2.0 * fewer < CONFIDENCE {
            break;
        }
        cut = Some(k);
        exactly *= (count - k) as f64 / (k + 1) as f64;
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_in_any_order() {
        let median = |values: &[f64]| Estimate::of(values).map(|estimate| estimate.median);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    /// Against the ranks of printed tables of binomial intervals for the median.
    #[test]
    fn ranks_are_those_of_the_sign_test() {
        let table = [
            (5, None),
            (6, Some(0)),
            (8, Some(0)),
            (9, Some(1)),
            (11, Some(1)),
            (12, Some(2)),
            (15, Some(3)),
            (20, Some(5)),
            (25, Some(7)),
        ];
        for (count, want) in table {
            assert_eq!(trimmed(count), want, "{count} values");
        }
    }

    #[test]
    fn one_outlier_at_each_end_of_eleven_does_not_widen_the_interval() {
        let mut values: Vec<f64> = (1..=9).map(f64::from).collect();
        values.extend([-1000.0, 1000.0]);
        let interval = Estimate::of(&values).and_then(|estimate| estimate.interval);
        assert_eq!(interval, Some(Interval { low: 1.0, high: 9.0 }));
    }

    #[test]
    fn a_bound_is_shown_only_by_a_whole_interval() {
        let interval = |low, high| Some(Interval { low, high });
        let table = [
            (Bound::AtMost(1.05), interval(0.9, 1.05), Verdict::Shown),
            (Bound::AtMost(1.05), interval(0.9, 1.06), Verdict::NotShown),
            (Bound::AtMost(1.05), interval(1.06, 1.2), Verdict::Missed),
            (Bound::AtMost(1.05), None, Verdict::NotShown),
            (Bound::AtLeast(1.5), interval(1.5, 2.0), Verdict::Shown),
            (Bound::AtLeast(1.5), interval(1.4, 2.0), Verdict::NotShown),
            (Bound::AtLeast(1.5), interval(1.1, 1.4), Verdict::Missed),
        ];
        for (bound, interval, want) in table {
            assert_eq!(bound.judge(interval), want, "{bound:?} {interval:?}");
        }
    }
}
