//! Processors: which thread runs where, and who has used how much of them.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// `USER_HZ`, the unit of the times in procfs on every architecture that culvert runs on.
const TICK: Duration = Duration::from_millis(10);

/// Which processors the two ends of a connection are pinned to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pins {
    pub(crate) client: usize,
    pub(crate) server: usize,
}

impl Pins {
    /// Two different processors, if this process may use two.
    pub(crate) fn apart() -> Result<Self> {
        let (first, last) = ends()?;
        Ok(Self { client: first, server: last })
    }

    /// One processor for both, which leaves waking another one out of a round trip.
    pub(crate) fn together() -> Result<Self> {
        let (_, last) = ends()?;
        Ok(Self { client: last, server: last })
    }
}

fn ends() -> Result<(usize, usize)> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("read the CPU affinity")?;
    let mut usable = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let first = usable.next().context("this process may run on no CPU")?;
    Ok((first, usable.next_back().unwrap_or(first)))
}

/// Pins the calling thread, and the threads that it starts.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("pin a thread to CPU {cpu}"))
}

/// Processor time of a process in user and kernel mode, all threads, to 10 ms.
pub(crate) fn of_process(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    process_ticks(&stat).with_context(|| format!("no times in {path}"))
}

/// Processor time of the threads that a process has now.
pub(crate) fn of_threads(pid: u32) -> Result<Duration> {
    let folder = format!("/proc/{pid}/task");
    let mut sum = Duration::ZERO;
    for thread in fs::read_dir(&folder).with_context(|| format!("read {folder}"))? {
        let path = thread?.path().join("schedstat");
        // A thread may end meanwhile.
        let Ok(text) = fs::read_to_string(path) else { continue };
        let nanoseconds = text.split_whitespace().next().and_then(|first| first.parse().ok());
        sum += Duration::from_nanos(nanoseconds.with_context(|| format!("no times in {folder}"))?);
    }
    Ok(sum)
}

/// Time that all processors together were not idle, to 10 ms.
pub(crate) fn of_machine() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    busy_ticks(&stat).context("no times in /proc/stat")
}

/// Fields 14 and 15, counted after the command in parentheses, which may hold spaces.
fn process_ticks(stat: &str) -> Option<Duration> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    Some(TICK * user + TICK * system)
}

/// user, nice, system, irq and softirq; neither idle and iowait, nor what a hypervisor took, nor guests twice.
fn busy_ticks(stat: &str) -> Option<Duration> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u32> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let mut busy = Duration::ZERO;
    for index in [0, 1, 2, 5, 6] {
        busy += TICK * *fields.get(index)?;
    }
    Some(busy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_charged_for_user_and_kernel_time() {
        let stat = "42 (a b) c) S 1 42 42 0 -1 4194304 100 0 0 0 150 50 7 7 20 0 4 0 1234 1 2 3";
        assert_eq!(process_ticks(stat), Some(Duration::from_secs(2)));
    }

    #[test]
    fn idle_and_stolen_time_is_not_busy() {
        let stat = "cpu  100 10 200 5000 60 30 40 700 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(busy_ticks(stat), Some(Duration::from_millis(3800)));
    }

    #[test]
    fn this_process_has_used_some_time() {
        assert!(of_machine().unwrap() > Duration::ZERO);
        of_process(std::process::id()).unwrap();
    }
}
