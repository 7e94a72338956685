//! Many short connections at once, each counted by how it ended.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{client, netns::Netns};

/// What each connection carries there and back.
const TEXT: &[u8] = b"one short connection";
/// Between two connections of one worker, so that a load on a small machine leaves room for who is tested.
const PAUSE: Duration = Duration::from_millis(20);

/// How the connections of a load ended.
#[derive(Debug, Default)]
pub struct Tally {
    /// Complete: connected, and the reply was the whole text.
    pub done: usize,
    /// The connect was refused.
    pub refused: usize,
    /// Reset, at whatever point.
    pub reset: usize,
    /// Anything else, by description: time-outs, short replies.
    pub other: Vec<String>,
    /// Where and when each failure was, since the start of the load.
    pub notes: Vec<String>,
}

impl Tally {
    /// How many connections there were.
    pub fn total(&self) -> usize {
        self.done + self.failed()
    }

    /// How many of them were not complete.
    pub fn failed(&self) -> usize {
        self.refused + self.reset + self.other.len()
    }

    fn count(&mut self, reply: io::Result<Vec<u8>>) {
        match reply {
            Ok(reply) if reply == TEXT => self.done += 1,
            Ok(reply) => self.other.push(format!("a reply of {} bytes", reply.len())),
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => self.refused += 1,
            Err(e) if e.kind() == ErrorKind::ConnectionReset => self.reset += 1,
            Err(e) => self.other.push(e.to_string()),
        }
    }

    fn add(&mut self, more: Self) {
        self.done += more.done;
        self.refused += more.refused;
        self.reset += more.reset;
        self.other.extend(more.other);
        self.notes.extend(more.notes);
    }
}

/// Workers that connect to echoing apps again and again, until they are stopped.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicUsize>,
    workers: Vec<JoinHandle<Tally>>,
}

impl Load {
    /// Starts `workers` in `netns`, each of which takes its turn at every address in `to`.
    pub fn start(netns: &Netns, to: &[SocketAddr], workers: usize) -> Self {
        let (stop, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let workers = (0..workers)
            .map(|worker| {
                let start = Instant::now();
                let (stop, ended, to) = (Arc::clone(&stop), Arc::clone(&ended), to.to_vec());
                netns.start(move || {
                    let mut tally = Tally::default();
                    for address in to.iter().cycle().skip(worker) {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let begun = start.elapsed();
                        let reply = client::exchange(*address, TEXT);
                        if !matches!(&reply, Ok(reply) if reply == TEXT) {
                            let ended = start.elapsed();
                            let note = format!("{address}, {begun:?} to {ended:?}: {reply:?}");
                            tally.notes.push(note);
                        }
                        tally.count(reply);
                        ended.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(PAUSE);
                    }
                    tally
                })
            })
            .collect();
        Self { stop, ended, workers }
    }

    /// How many connections have ended so far.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }

    /// Lets each worker finish its connection, and counts.
    ///
    /// # Panics
    /// With the panic of a worker.
    pub fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        let mut tally = Tally::default();
        for worker in self.workers {
            tally.add(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        tally
    }
}
