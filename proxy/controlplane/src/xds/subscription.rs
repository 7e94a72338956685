//! What a client wants of one type, and what it has been told of it.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    resource::{Resource, Type},
    store::{Changed, View},
};

/// Names that a client may ask for. A client that wants more wants all.
const MAX_NAMES: usize = 1 << 20;
/// How long a name may be: a service's, with room.
const MAX_NAME: usize = 1024;

/// One type.
#[derive(Debug)]
pub(super) struct Subscription {
    kind: Type,
    interest: Interest,
    /// What the client said that it holds from an earlier stream, until it has been told what differs.
    held: HashMap<String, String>,
    /// The number up to which it has been told; `None` before the first response.
    told: Option<u64>,
    /// Names asked for and not answered yet.
    asked: BTreeSet<Arc<str>>,
    /// Removals that are told once other types have caught up.
    withheld: BTreeSet<Arc<str>>,
    on_its_way: Option<(String, Instant)>,
}

/// Which resources a client wants.
#[derive(Debug)]
enum Interest {
    Everything,
    /// Those it names, and those of its own node.
    Named {
        /// As the client names them: maybe by an alias, maybe before they exist.
        keys: HashSet<Arc<str>>,
        /// The names of those that it has been told.
        known: HashSet<Arc<str>>,
    },
}

/// A client asks for more names than it may.
#[derive(Debug)]
pub(super) struct TooMuch;

/// Removals that the client was not told are not known any more.
#[derive(Debug)]
pub(super) struct Forgotten;

/// What a client is to be told.
#[derive(Debug, Default)]
pub(super) struct Delta {
    pub(super) number: u64,
    pub(super) resources: Vec<Arc<Resource>>,
    pub(super) removed: Vec<Arc<str>>,
}

impl Subscription {
    pub(super) fn new(kind: Type) -> Self {
        Self {
            kind,
            interest: Interest::Everything,
            held: HashMap::new(),
            told: None,
            asked: BTreeSet::new(),
            withheld: BTreeSet::new(),
            on_its_way: None,
        }
    }

    pub(super) fn kind(&self) -> Type {
        self.kind
    }

    pub(super) fn is_first(&self) -> bool {
        self.told.is_none()
    }

    /// When the response was sent that is not answered yet.
    pub(super) fn sent(&self) -> Option<Instant> {
        self.on_its_way.as_ref().map(|(_, sent)| *sent)
    }

    pub(super) fn send(&mut self, nonce: String) {
        self.on_its_way = Some((nonce, Instant::now()));
    }

    /// How long the client took, if `nonce` is of the response on its way. Others have been answered before.
    pub(super) fn answer(&mut self, nonce: &str) -> Option<Duration> {
        let (_, sent) = self.on_its_way.take_if(|(sent, _)| sent == nonce)?;
        Some(sent.elapsed())
    }

    /// Takes in what the client asks for from now on.
    pub(super) fn update(
        &mut self,
        subscribe: Vec<String>,
        unsubscribe: Vec<String>,
        held: HashMap<String, String>,
    ) -> Result<(), TooMuch> {
        let too_long = |name: &String| name.len() > MAX_NAME;
        if held.len() > MAX_NAMES
            || held.keys().any(too_long)
            || held.values().any(too_long)
            || subscribe.iter().any(too_long)
        {
            return Err(TooMuch);
        }
        let all = |names: &[String]| names.iter().any(|name| name == "*");
        let first = self.told.is_none() && self.held.is_empty() && self.asked.is_empty();
        // Policies guard everything that may be asked for later, so they are never asked for one by one.
        let by_name = self.kind == Type::Address
            && (all(&unsubscribe) || (first && !subscribe.is_empty() && !all(&subscribe)));
        if by_name && matches!(self.interest, Interest::Everything) {
            self.interest = Interest::Named { keys: HashSet::new(), known: HashSet::new() };
        } else if all(&subscribe) && !all(&unsubscribe) && self.kind == Type::Address {
            if matches!(self.interest, Interest::Named { .. }) {
                // From now on it wants everything, so that it has to be told everything.
                self.told = None;
            }
            self.interest = Interest::Everything;
        }
        if let Interest::Named { keys, known } = &mut self.interest {
            // What it holds it goes on asking for, even if it never got it.
            let names = subscribe.iter().chain(held.keys()).filter(|name| *name != "*");
            for name in names {
                let name: Arc<str> = name.as_str().into();
                keys.insert(Arc::clone(&name));
                self.asked.insert(name);
            }
            for name in &unsubscribe {
                keys.remove(name.as_str());
                known.remove(name.as_str());
                self.asked.remove(name.as_str());
            }
            if keys.len() > MAX_NAMES {
                return Err(TooMuch);
            }
        }
        self.held.extend(held);
        Ok(())
    }

    /// Whether there are changes that the client has not been told.
    pub(super) fn lags(&self, view: &View<'_>) -> bool {
        self.on_its_way.is_some()
            || self.told.is_none_or(|told| {
                let mut since = view.table(self.kind).since(told);
                since.as_mut().is_none_or(|changes| changes.next().is_some())
            })
    }

    /// What the client is to be told next, and notes that it is. With `later`, removals of policies wait.
    pub(super) fn next(
        &mut self,
        view: &View<'_>,
        node: Option<&str>,
        later: bool,
    ) -> Result<Option<Delta>, Forgotten> {
        if self.on_its_way.is_some() {
            return Ok(None);
        }
        let is_first = self.told.is_none();
        let mut delta = match self.told {
            None => self.first(view, node),
            Some(told) => self.since(told, view, node)?,
        };
        self.answer_asked(view, &mut delta);
        self.held.clear();
        self.told = Some(view.last());
        if self.kind == Type::Authorization && !is_first {
            self.withheld.extend(delta.removed.drain(..));
            // One that is back in the meantime is not gone.
            let table = view.table(self.kind);
            self.withheld.retain(|name| table.get(name).is_none());
            if !later {
                delta.removed = std::mem::take(&mut self.withheld).into_iter().collect();
            }
        }
        let told = is_first || !delta.resources.is_empty() || !delta.removed.is_empty();
        Ok(told.then_some(delta))
    }

    /// The first response: what the client does not hold, and what it holds but should not. Sent even if it is empty,
    /// for that it has everything is what the client waits for.
    fn first(&mut self, view: &View<'_>, node: Option<&str>) -> Delta {
        let table = view.table(self.kind);
        let mut delta = Delta { number: view.last(), ..Delta::default() };
        let differs = |resource: &Resource| {
            self.held.get(&*resource.name).is_none_or(|version| **version != *resource.version)
        };
        match &mut self.interest {
            Interest::Everything => {
                delta.resources = table.iter().filter(|r| differs(r)).cloned().collect();
                let gone = self.held.keys().filter(|name| table.get(name).is_none());
                delta.removed = gone.map(|name| name.as_str().into()).collect();
            }
            Interest::Named { known, .. } => {
                for resource in node.into_iter().flat_map(|node| table.of_node(node)) {
                    if known.insert(Arc::clone(&resource.name)) && differs(resource) {
                        delta.resources.push(Arc::clone(resource));
                    }
                }
            }
        }
        delta
    }

    fn since(
        &mut self,
        told: u64,
        view: &View<'_>,
        node: Option<&str>,
    ) -> Result<Delta, Forgotten> {
        let mut delta = Delta { number: view.last(), ..Delta::default() };
        let table = view.table(self.kind);
        for change in table.since(told).ok_or(Forgotten)? {
            match (change, &mut self.interest) {
                (Changed::Set(resource), Interest::Everything) => {
                    delta.resources.push(Arc::clone(resource));
                }
                (Changed::Removed(name), Interest::Everything) => {
                    delta.removed.push(Arc::clone(name));
                }
                (Changed::Set(resource), Interest::Named { keys, known }) => {
                    let is_named = known.contains(&resource.name)
                        || keys.contains(&resource.name)
                        || resource.aliases.iter().any(|alias| keys.contains(alias))
                        || resource.services.iter().any(|service| known.contains(service))
                        || node.is_some_and(|node| *resource.node == *node);
                    if is_named {
                        known.insert(Arc::clone(&resource.name));
                        delta.resources.push(Arc::clone(resource));
                    }
                }
                (Changed::Removed(name), Interest::Named { keys, known }) => {
                    if known.remove(name) || keys.contains(name) {
                        delta.removed.push(Arc::clone(name));
                    }
                }
            }
        }
        Ok(delta)
    }

    /// What was asked for by name: the resources, and with a service its endpoints, with an endpoint its services. A
    /// name that nothing has is told to be gone, for the client waits for an answer.
    fn answer_asked(&mut self, view: &View<'_>, delta: &mut Delta) {
        let asked = std::mem::take(&mut self.asked);
        let Interest::Named { known, .. } = &mut self.interest else { return };
        if asked.is_empty() {
            return;
        }
        let table = view.table(self.kind);
        let told: HashSet<_> = delta.resources.iter().map(|r| Arc::clone(&r.name)).collect();
        let mut answer = BTreeSet::new();
        for key in &asked {
            let mut found = false;
            for resource in table.resolve(key) {
                found = true;
                answer.insert(Arc::clone(&resource.name));
                answer.extend(resource.services.iter().cloned());
                answer.extend(table.endpoints(&resource.name).map(|r| Arc::clone(&r.name)));
            }
            if !found && !delta.removed.contains(key) {
                delta.removed.push(Arc::clone(key));
            }
        }
        for name in answer {
            let Some(resource) = table.get(&name) else { continue };
            known.insert(Arc::clone(&name));
            let held = self.held.get(&*name).is_some_and(|held| **held == *resource.version);
            if !held && !told.contains(&name) {
                delta.resources.push(Arc::clone(resource));
            }
        }
    }
}
