//! What is wanted, what each proxy has acknowledged, and therefore what it is to be told next.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

use crate::zds::Pod;

/// How long until a pod is offered again that a proxy would not enrol.
const RETRY: Duration = Duration::from_secs(5);

/// Why a pod was not enrolled at once. It stays wanted, and is offered until a proxy takes it.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// The proxy says why.
    #[error("the proxy did not enrol the pod: {reason}")]
    Refused {
        /// In the proxy's words.
        reason: String,
    },
    /// It was removed meanwhile.
    #[error("the pod was removed before a proxy had enrolled it")]
    Removed,
}

/// By which pods are added and removed. Clones share them.
#[derive(Clone, Debug)]
pub struct Pods {
    registry: Arc<Registry>,
}

impl Pods {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }

    /// Wants `pod` enrolled, in place of what has its UID, and waits until the newest proxy has answered. Dropping the
    /// future stops only the waiting.
    ///
    /// Without a proxy this waits for one: whoever calls decides for how long.
    pub async fn add(&self, pod: Pod) -> Result<(), AddError> {
        let uid = Arc::clone(&pod.uid);
        let mut changed = self.registry.changed.subscribe();
        let generation = self.registry.want(pod);
        loop {
            changed.mark_unchanged();
            match self.answer(&uid).filter(|(of, _)| *of == generation) {
                None => return Err(AddError::Removed),
                Some((_, Some(Ok(())))) => return Ok(()),
                Some((_, Some(Err(reason)))) => return Err(AddError::Refused { reason }),
                Some((_, None)) => {}
            }
            if changed.changed().await.is_err() {
                return Err(AddError::Removed);
            }
        }
    }

    /// Waits until a proxy has enrolled it after all.
    pub async fn enrolled(&self, uid: &str) -> Result<(), AddError> {
        let mut changed = self.registry.changed.subscribe();
        loop {
            changed.mark_unchanged();
            match self.answer(uid) {
                None => return Err(AddError::Removed),
                Some((_, Some(Ok(())))) => return Ok(()),
                Some(_) => {}
            }
            if changed.changed().await.is_err() {
                return Err(AddError::Removed);
            }
        }
    }

    /// The generation of a pod that is wanted, and the last answer to it.
    fn answer(&self, uid: &str) -> Option<(u64, Option<Result<(), String>>)> {
        let state = self.registry.lock();
        state.wanted.get(uid).map(|wanted| (wanted.generation, wanted.answer.clone()))
    }

    /// Wants it enrolled no longer, and waits until every proxy that was told of it has let it go or is gone.
    pub async fn remove(&self, uid: &str) {
        let mut changed = self.registry.changed.subscribe();
        self.registry.lock().wanted.remove(uid);
        self.registry.announce();
        loop {
            changed.mark_unchanged();
            if !self.registry.is_told(uid) || changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// How many proxies are connected.
    pub fn proxies(&self) -> usize {
        self.registry.lock().sessions.len()
    }
}

/// Shared by the connections and whoever adds pods.
#[derive(Debug)]
pub(super) struct Registry {
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    wanted: BTreeMap<Arc<str>, Wanted>,
    /// By when they connected.
    sessions: BTreeMap<SessionId, Told>,
    generations: u64,
}

#[derive(Debug)]
struct Wanted {
    pod: Pod,
    /// Told apart from one of the same UID before it.
    generation: u64,
    /// The last one of a proxy.
    answer: Option<Result<(), String>>,
}

/// What a proxy was told.
#[derive(Debug, Default)]
struct Told {
    /// By UID: the generation, and whether it took it, or when to offer it again.
    pods: BTreeMap<Arc<str>, (u64, Option<Instant>)>,
    /// Up to which generation its snapshot goes; `None` once that was sent.
    snapshot: Option<u64>,
}

/// Which connection, ordered by when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SessionId(u64);

/// What to tell a proxy next.
#[derive(Clone, Debug)]
pub(super) enum Next {
    /// This pod.
    Add(Pod, u64),
    /// That it may keep this pod, whose network namespace is not known here.
    Keep(Arc<str>, u64),
    /// That this pod is wanted no longer.
    Remove(Arc<str>),
    /// That this was all.
    Snapshot,
    /// Nothing, until something changes or this instant comes.
    Wait(Option<Instant>),
}

impl Default for Registry {
    fn default() -> Self {
        Self { state: Mutex::default(), changed: watch::Sender::new(()) }
    }
}

impl Registry {
    /// Wants `pod`; gives its generation.
    fn want(&self, pod: Pod) -> u64 {
        let mut state = self.lock();
        state.generations += 1;
        let generation = state.generations;
        let wanted = Wanted { pod, generation, answer: None };
        state.wanted.insert(Arc::clone(&wanted.pod.uid), wanted);
        drop(state);
        self.announce();
        generation
    }

    /// A proxy that has said hello: the newest from now on.
    pub(super) fn join(&self) -> SessionId {
        let mut state = self.lock();
        state.generations += 1;
        let id = SessionId(state.generations);
        let told = Told { snapshot: Some(state.generations), ..Told::default() };
        state.sessions.insert(id, told);
        drop(state);
        self.announce();
        id
    }

    /// It is gone; what only it was told falls to the newest of the others.
    pub(super) fn leave(&self, id: SessionId) {
        self.lock().sessions.remove(&id);
        self.announce();
    }

    /// What `id` is to be told next, as of `now`.
    pub(super) fn next(&self, id: SessionId, now: Instant) -> Next {
        let state = self.lock();
        let Some(told) = state.sessions.get(&id) else { return Next::Wait(None) };
        let stale = told.pods.keys().find(|uid| !state.wanted.contains_key(*uid));
        if let Some(uid) = stale {
            return Next::Remove(Arc::clone(uid));
        }
        // An older proxy is about to go: it is told what every proxy is told at first, and then no more pods.
        let newest = state.sessions.last_key_value().is_some_and(|(newest, _)| *newest == id);
        let limit = told.snapshot.or_else(|| newest.then_some(u64::MAX)).unwrap_or_default();
        let mut again: Option<Instant> = None;
        for (uid, wanted) in state.wanted.iter().filter(|(_, wanted)| wanted.generation <= limit) {
            match told.pods.get(uid) {
                Some((generation, None)) if *generation == wanted.generation => continue,
                Some((generation, Some(due))) if *generation == wanted.generation && now < *due => {
                    again = Some(again.map_or(*due, |again| again.min(*due)));
                    continue;
                }
                _ => {}
            }
            if wanted.pod.netns.is_some() {
                return Next::Add(wanted.pod.clone(), wanted.generation);
            } else if told.snapshot.is_some() {
                return Next::Keep(Arc::clone(uid), wanted.generation);
            }
        }
        if told.snapshot.is_some() { Next::Snapshot } else { Next::Wait(again) }
    }

    /// The answer of `id` to `next`.
    pub(super) fn answered(
        &self,
        id: SessionId,
        next: &Next,
        answer: Result<(), String>,
        now: Instant,
    ) {
        let mut state = self.lock();
        let State { wanted, sessions, .. } = &mut *state;
        let Some(told) = sessions.get_mut(&id) else { return };
        match next {
            Next::Add(Pod { uid, .. }, generation) | Next::Keep(uid, generation) => {
                let due = answer.is_err().then(|| now + RETRY);
                told.pods.insert(Arc::clone(uid), (*generation, due));
                if let Some(wanted) = wanted.get_mut(uid)
                    && wanted.generation == *generation
                {
                    wanted.answer = Some(answer);
                }
            }
            // Whatever it says: it was told, and nothing more can be done about it.
            Next::Remove(uid) => {
                told.pods.remove(uid);
            }
            Next::Snapshot => told.snapshot = None,
            Next::Wait(_) => {}
        }
        drop(state);
        self.announce();
    }

    /// Fires at every change from now on.
    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    fn is_told(&self, uid: &str) -> bool {
        self.lock().sessions.values().any(|told| told.pods.contains_key(uid))
    }

    fn announce(&self) {
        self.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that holds it panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
