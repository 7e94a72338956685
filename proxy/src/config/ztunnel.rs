//! What Istio's own manifest of its node proxy says, and flags of ours have no name for: so that culvert's image in it does as
//! that manifest means.

use std::{num::NonZeroUsize, str::FromStr, time::Duration};

use clap::Args;

/// Connections have less time than their pod's end by so much, to leave some for what comes after.
const RESERVE: u64 = 5;
/// More threads than any node's data path can use.
const MOST_THREADS: usize = 1024;

/// Variables without a flag that anyone would write.
#[derive(Args, Clone, Debug, Default)]
pub struct ManifestArgs {
    /// Whether the proxy answers DNS at all.
    #[arg(long, env = "ISTIO_META_DNS_CAPTURE", hide = true)]
    pub dns_capture_of_manifest: Option<String>,
    /// `spec.terminationGracePeriodSeconds` of the pod.
    #[arg(long, env = "TERMINATION_GRACE_PERIOD_SECONDS", hide = true)]
    pub grace_period: Option<Seconds>,
    /// The node's processors, or the container's limit.
    #[arg(long, env = "ZTUNNEL_CPU_LIMIT", hide = true)]
    pub processors: Option<Cpus>,
    /// `resources.limits.cpu` as it is written.
    #[arg(long, env = "ZTUNNEL_RESOURCE_CPU_LIMIT", hide = true)]
    pub cpu_limit: Option<Cpus>,
    /// `resources.requests.cpu` as it is written.
    #[arg(long, env = "ZTUNNEL_RESOURCE_CPU_REQUEST", hide = true)]
    pub cpu_request: Option<Cpus>,
}

impl ManifestArgs {
    /// Whether pods' DNS may be captured by default.
    pub(super) fn answers_dns(&self) -> bool {
        let text = self.dns_capture_of_manifest.as_deref().filter(|text| !text.is_empty());
        text.is_none_or(|text| text.eq_ignore_ascii_case("true"))
    }

    /// How long connections may go on, if the pod's end says so.
    pub(super) fn drain(&self) -> Option<Duration> {
        let seconds = self.grace_period?.0?;
        let less = if seconds > 2 * RESERVE { RESERVE } else { 1 };
        Some(Duration::from_secs(seconds.saturating_sub(less).max(1)))
    }

    /// Threads of the data path on a machine of so many `processors`.
    pub(super) fn threads(&self, wanted: Option<Threads>, processors: usize) -> usize {
        let processors = self.processors.and_then(|cpus| cpus.0).map_or(processors, usize::from);
        let (limit, request) =
            (self.cpu_limit.and_then(|c| c.0), self.cpu_request.and_then(|c| c.0));
        let request = request.map_or(0, usize::from);
        let threads = match wanted {
            Some(Threads::Count(count)) => count.into(),
            Some(Threads::All) => processors,
            Some(Threads::Percent(percent)) => share(processors, percent),
            // A quarter: the rest belongs to the node's applications.
            None => limit.map_or_else(
                || share(processors, 25).max(request).max(2),
                |limit| usize::from(limit).max(request),
            ),
        };
        threads.clamp(1, MOST_THREADS)
    }
}

fn share(processors: usize, percent: usize) -> usize {
    processors.saturating_mul(percent).div_ceil(100)
}

/// How many threads: a number, `P%` of the processors, or `0` for as many as processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// So many.
    Count(NonZeroUsize),
    /// As many as processors.
    All,
    /// So many of a hundred processors.
    Percent(usize),
}

impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong =
            || "must be a number from 0 to 1024, or a percentage from 1% to 100%".to_owned();
        let number = |text: &str| text.parse::<usize>().map_err(|_not_one| wrong());
        match text.strip_suffix('%').map(str::trim_end) {
            Some(percent) => match number(percent)? {
                percent @ 1..=100 => Ok(Self::Percent(percent)),
                _ => Err(wrong()),
            },
            None => match number(text)? {
                count @ 0..=MOST_THREADS => {
                    Ok(NonZeroUsize::new(count).map_or(Self::All, Self::Count))
                }
                _ => Err(wrong()),
            },
        }
    }
}

/// A number of seconds; none where the text is empty, as a manifest leaves what it has no value for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(Option<u64>);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let seconds =
            text.parse::<u32>().map_err(|_not_one| "must be a number of seconds".to_owned());
        seconds.map(|seconds| Self(Some(seconds.into())))
    }
}

/// A Kubernetes quantity of processors, such as `2`, `1.5` or `500m`, rounded up; none where it is empty or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus(Option<NonZeroUsize>);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let thousandths = match text.strip_suffix('m') {
            Some(text) => text.parse::<u32>().ok().map(usize::try_from),
            None => thousandths(text).map(usize::try_from),
        };
        let thousandths = thousandths.and_then(Result::ok);
        let thousandths = thousandths
            .ok_or_else(|| "must be a quantity of processors such as 2, 1.5 or 500m".to_owned())?;
        Ok(Self(NonZeroUsize::new(thousandths.div_ceil(1000))))
    }
}

/// A decimal number's thousandths, rounded up.
fn thousandths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    if !part.bytes().chain(whole.bytes()).all(|byte| byte.is_ascii_digit()) || part.is_empty() {
        return None;
    }
    let digits = part.bytes().chain(std::iter::repeat(b'0')).take(3);
    let part = digits.fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'))
        + u32::from(part.bytes().skip(3).any(|digit| digit != b'0'));
    whole.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_is_answered_unless_the_manifest_says_no() {
        for (text, want) in [
            (None, true),
            (Some(""), true),
            (Some("true"), true),
            (Some("TRUE"), true),
            (Some("false"), false),
            (Some("no"), false),
            (Some("1"), false),
        ] {
            let dns_capture_of_manifest = text.map(str::to_owned);
            let args = ManifestArgs { dns_capture_of_manifest, ..ManifestArgs::default() };
            assert_eq!(args.answers_dns(), want, "{text:?}");
        }
    }

    #[test]
    fn connections_have_most_of_the_time_that_the_pod_has() {
        for (text, want) in [
            ("30", Some(25)),
            ("3600", Some(3595)),
            ("11", Some(6)),
            ("10", Some(9)),
            ("2", Some(1)),
            ("1", Some(1)),
            ("0", Some(1)),
            ("", None),
        ] {
            let grace_period = Some(text.parse().unwrap());
            let args = ManifestArgs { grace_period, ..ManifestArgs::default() };
            assert_eq!(args.drain(), want.map(Duration::from_secs), "{text}");
        }
        assert_eq!(ManifestArgs::default().drain(), None);
        for text in ["-1", "30s", "4294967296", "x"] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }

    #[test]
    fn threads_follow_from_what_is_asked_for_and_what_there_is() {
        // Asked for, processors of the manifest, limit, request; on a machine of 16.
        for (threads, processors, limit, request, want) in [
            ("", "", "", "", 4),
            ("", "4", "", "", 2),
            ("", "64", "", "", 16),
            ("", "", "1", "", 1),
            ("", "", "1", "200m", 1),
            ("", "", "500m", "1.5", 2),
            ("", "", "8", "", 8),
            ("", "", "", "6", 6),
            ("", "", "0", "", 4),
            ("3", "", "8", "", 3),
            ("0", "", "8", "", 16),
            ("0", "6", "", "", 6),
            ("10%", "", "", "", 2),
            ("100%", "", "", "", 16),
            ("1%", "", "", "", 1),
        ] {
            let cpus = |text: &str| Some(text.parse::<Cpus>().unwrap());
            let args = ManifestArgs {
                processors: cpus(processors),
                cpu_limit: cpus(limit),
                cpu_request: cpus(request),
                ..ManifestArgs::default()
            };
            let wanted = (!threads.is_empty()).then(|| threads.parse().unwrap());
            let got = args.threads(wanted, 16);
            assert_eq!(got, want, "{threads:?} {processors:?} {limit:?} {request:?}");
        }
        for text in ["", "x", "-1", "1025", "0%", "101%", "%", "1.5"] {
            assert!(text.parse::<Threads>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn quantities_are_rounded_up() {
        for (text, want) in [
            ("2", 2),
            ("1.5", 2),
            ("500m", 1),
            ("1000m", 1),
            ("1001m", 2),
            ("0.001", 1),
            ("1.0001", 2),
        ] {
            assert_eq!(text.parse(), Ok(Cpus(NonZeroUsize::new(want))), "{text}");
        }
        for text in ["m", "1.", ".5x", "1k", "-1", "4294967295", "1.-5", "+1"] {
            assert!(text.parse::<Cpus>().is_err(), "{text}");
        }
    }
}
