//! Waiting: every wait in the scenarios is a poll with a deadline.

use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// How long something may take that is expected to happen at once.
pub const SOON: Duration = Duration::from_secs(10);

/// `wait` as it is on this machine: `CULVERT_PATIENCE`, by default 1, multiplies it where the CPU is emulated.
pub fn patient(wait: Duration) -> Duration {
    static PATIENCE: OnceLock<u32> = OnceLock::new();
    wait * *PATIENCE.get_or_init(|| match std::env::var("CULVERT_PATIENCE") {
        Ok(times) => times.parse().expect("CULVERT_PATIENCE is not a number"),
        Err(_) => 1,
    })
}

/// Asks `probe` until it has an answer.
///
/// # Panics
/// At the caller's line, naming `what`, when [`patient`] `limit` has passed.
#[track_caller]
pub fn until<T>(limit: Duration, what: &str, probe: impl FnMut() -> Option<T>) -> T {
    match within(limit, probe) {
        Some(answer) => answer,
        None => panic!("after {:?}: still waiting for {what}", patient(limit)),
    }
}

/// What `work` returned, and how long it took.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (work(), start.elapsed())
}

/// Asks `probe` until it has an answer; `None` when [`patient`] `limit` has passed.
pub fn within<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + patient(limit);
    loop {
        if let Some(answer) = probe() {
            return Some(answer);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(Duration::from_millis(10));
    }
}
