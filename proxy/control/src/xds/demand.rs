//! Records that are asked for one by one, in meshes too large to be known whole.
//!
//! Holds who waits for what and what the control plane has said; sending it is left to the client. An answer stays
//! subscribed, so that what it said is kept up to date; answers that say "there is none" are many, because pods connect
//! to whatever they like, and the oldest are given up for new ones.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::mem;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use culvert_mesh::workload::{NetworkAddress, ServiceName};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

/// How long somebody waits for an answer.
pub const DEMAND_DEADLINE: Duration = Duration::from_secs(5);
/// Questions without an answer.
const MAX_PENDING: usize = 1024;
/// Answers that there is no such record.
const MAX_ABSENT: usize = 4096;

/// What is asked for. `Display` gives the resource's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// The service or workload at an address: `network/ip`.
    Address(NetworkAddress),
    /// A service: `namespace/hostname`.
    Service(ServiceName),
    /// A workload, by its uid.
    Workload(Arc<str>),
}

impl Key {
    /// The service or workload at `ip` in `network`.
    pub fn address(network: &Arc<str>, ip: IpAddr) -> Self {
        Self::Address(NetworkAddress { network: Arc::clone(network), ip: ip.to_canonical() })
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Service(name) => name.fmt(f),
            Self::Workload(uid) => f.write_str(uid),
        }
    }
}

/// Why nothing is known of what was asked for. It may exist nevertheless.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DemandError {
    /// Too many questions wait for an answer.
    #[error("ask the control plane for {0}: {MAX_PENDING} questions wait already")]
    Busy(Key),
    /// The answer could not be used.
    #[error("ask the control plane for {0}: its record was refused; see the log")]
    Refused(Key),
    /// There was no answer.
    #[error("ask the control plane for {key}: no answer within {} s", DEMAND_DEADLINE.as_secs())]
    Deadline {
        /// What was asked for.
        key: Key,
    },
}

/// Asks the control plane. Clones ask the same one.
#[derive(Clone, Debug, Default)]
pub struct OnDemand {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    /// Told of a change of the subscription.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Table {
    asked: HashMap<Arc<str>, Answer>,
    pending: usize,
    /// Those with the answer `Absent`, the oldest first; some have another answer by now.
    absent: VecDeque<Arc<str>>,
    /// By resource: the names under which it was asked for.
    known: HashMap<Arc<str>, Vec<Arc<str>>>,
    change: Change,
}

#[derive(Debug)]
enum Answer {
    Pending(Vec<oneshot::Sender<Outcome>>),
    Settled(Outcome),
}

/// What the control plane said of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// What it is; that is in the state.
    Known,
    /// That there is none.
    Absent,
    /// Something that is not fit for the state.
    Refused,
}

/// What the control plane said of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answered {
    pub(super) name: String,
    /// Other names by which it may have been asked for.
    pub(super) aliases: Vec<String>,
    pub(super) outcome: Outcome,
}

/// What the control plane is still to be told on the present stream.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) subscribe: Vec<Arc<str>>,
    pub(super) unsubscribe: Vec<Arc<str>>,
}

impl OnDemand {
    /// Waits until everything that the control plane knows of `key` is in the mesh's state; maybe that is nothing.
    ///
    /// At once for what was asked for before, also while there is no connection: then what is known is as of its end.
    ///
    /// # Errors
    /// It is not known whether there is such a record: what depends on it has to be refused.
    pub async fn fetch(&self, key: &Key) -> Result<(), DemandError> {
        let name: Arc<str> = key.to_string().into();
        let asked = self.table().ask(name);
        let outcome = match asked {
            Asked::Settled(outcome) => Some(outcome),
            Asked::Full => return Err(DemandError::Busy(key.clone())),
            Asked::Pending(answer) => {
                self.shared.changed.notify_one();
                timeout(DEMAND_DEADLINE, answer).await.ok().and_then(Result::ok)
            }
        };
        match outcome {
            Some(Outcome::Known | Outcome::Absent) => Ok(()),
            Some(Outcome::Refused) => Err(DemandError::Refused(key.clone())),
            None => Err(DemandError::Deadline { key: key.clone() }),
        }
    }

    /// Every name to subscribe to on a new stream.
    pub(super) fn names(&self) -> Vec<String> {
        let mut table = self.table();
        table.change = Change::default();
        table.asked.keys().map(ToString::to_string).collect()
    }

    /// Waits for a change of the subscription and takes it. Cancel-safe.
    pub(super) async fn changed(&self) -> Change {
        loop {
            let change = mem::take(&mut self.table().change);
            if change != Change::default() {
                return change;
            }
            self.shared.changed.notified().await;
        }
    }

    /// A response of the control plane, which said this, is in the state.
    pub(super) fn answered(&self, answered: &[Answered]) {
        let mut table = self.table();
        for Answered { name, aliases, outcome } in answered {
            match outcome {
                Outcome::Known | Outcome::Refused => table.present(name, aliases, *outcome),
                Outcome::Absent => table.removed(name),
            }
        }
        if table.change != Change::default() {
            self.shared.changed.notify_one();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change of the table leaves it whole.
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What becomes of a question.
enum Asked {
    Settled(Outcome),
    Pending(oneshot::Receiver<Outcome>),
    /// There is no room for it.
    Full,
}

impl Table {
    fn ask(&mut self, name: Arc<str>) -> Asked {
        let (sender, receiver) = oneshot::channel();
        match self.asked.get_mut(&name) {
            Some(Answer::Pending(waiting)) => {
                waiting.retain(|sender| !sender.is_closed());
                waiting.push(sender);
            }
            Some(Answer::Settled(outcome)) => return Asked::Settled(*outcome),
            None => {
                if self.pending >= MAX_PENDING {
                    self.abandon();
                }
                if self.pending >= MAX_PENDING {
                    return Asked::Full;
                }
                self.pending += 1;
                self.asked.insert(Arc::clone(&name), Answer::Pending(vec![sender]));
                self.change.subscribe.push(name);
            }
        }
        Asked::Pending(receiver)
    }

    /// Gives up questions for which nobody waits any more.
    fn abandon(&mut self) {
        let (change, mut abandoned) = (&mut self.change, 0);
        self.asked.retain(|name, answer| {
            let Answer::Pending(waiting) = answer else { return true };
            let awaited = waiting.iter().any(|sender| !sender.is_closed());
            if !awaited {
                abandoned += 1;
                change.forget(name);
            }
            awaited
        });
        self.pending -= abandoned;
    }

    fn present(&mut self, resource: &str, aliases: &[String], outcome: Outcome) {
        for name in std::iter::once(resource).chain(aliases.iter().map(String::as_str)) {
            let Some((name, _)) = self.asked.get_key_value(name) else { continue };
            let name = Arc::clone(name);
            self.settle(&name, outcome);
            let names = self.known.entry(resource.into()).or_default();
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }

    fn removed(&mut self, resource: &str) {
        let names = self.known.remove(resource).unwrap_or_default();
        let own = self.asked.get_key_value(resource).map(|(name, _)| Arc::clone(name));
        for name in names.into_iter().chain(own) {
            if self.settle(&name, Outcome::Absent) {
                self.absent.push_back(name);
            }
        }
        self.forget_absent();
    }

    /// Sets the answer to `name` and wakes who waits for it. Whether it was another one.
    fn settle(&mut self, name: &str, outcome: Outcome) -> bool {
        let Some(asked) = self.asked.get_mut(name) else { return false };
        match mem::replace(asked, Answer::Settled(outcome)) {
            Answer::Settled(before) => before != outcome,
            Answer::Pending(waiting) => {
                self.pending -= 1;
                for sender in waiting {
                    // Whoever waited may have gone.
                    let _gone = sender.send(outcome);
                }
                true
            }
        }
    }

    fn forget_absent(&mut self) {
        while self.absent.len() > MAX_ABSENT {
            let Some(name) = self.absent.pop_front() else { return };
            if matches!(self.asked.get(&name), Some(Answer::Settled(Outcome::Absent))) {
                self.asked.remove(&name);
                self.change.forget(&name);
            }
        }
    }
}

impl Change {
    fn forget(&mut self, name: &Arc<str>) {
        // What the control plane was never told of needs no word now.
        let before = self.subscribe.len();
        self.subscribe.retain(|subscribed| subscribed != name);
        if self.subscribe.len() == before {
            self.unsubscribe.push(Arc::clone(name));
        }
    }
}

#[cfg(test)]
mod tests;
