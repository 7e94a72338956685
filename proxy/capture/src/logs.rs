//! The programs' log records, passed on to this process's log.

use std::{fmt, time::Duration};

use aya::Ebpf;
use aya_log::EbpfLogger;

/// How often the records are read: often enough that a ring buffer (128 KiB) does not overflow in a debugging session.
const PERIOD: Duration = Duration::from_millis(100);

type Flush = Box<dyn FnMut() + Send + Sync>;

/// What the programs of a node log while this process runs.
pub struct BpfLogs {
    flushes: Vec<Flush>,
}

impl BpfLogs {
    /// Those of `objects`; `None` where none of them was compiled to log.
    pub(crate) fn of(objects: [&mut Ebpf; 2]) -> Option<Self> {
        let flushes: Vec<Flush> = objects.into_iter().filter_map(flush).collect();
        (!flushes.is_empty()).then_some(Self { flushes })
    }

    /// Passes records on until it is dropped.
    pub async fn run(mut self) {
        let mut period = tokio::time::interval(PERIOD);
        loop {
            period.tick().await;
            self.flushes.iter_mut().for_each(|flush| flush());
        }
    }
}

impl fmt::Debug for BpfLogs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BpfLogs").field("objects", &self.flushes.len()).finish()
    }
}

fn flush(object: &mut Ebpf) -> Option<Flush> {
    match EbpfLogger::init(object) {
        Ok(mut logger) => Some(Box::new(move || logger.flush())),
        Err(error) => {
            tracing::warn!(%error, "cannot read the log records of a BPF object");
            None
        }
    }
}
