//! Where workloads are that are known by a host name alone: their addresses, by the resolver of this machine.
//!
//! Which of the mesh's terms hold at an address that was found is `route`'s to say. Answers are kept for a fixed time, as the
//! resolver does not tell how long they are good for.

use std::{
    io,
    net::{IpAddr, ToSocketAddrs as _},
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lru::LruCache;
use rand::{Rng, seq::IteratorRandom as _};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

/// As many names are kept.
const KEPT: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// How long addresses are used.
const FRESH: Duration = Duration::from_secs(30);
/// How long a name that leads nowhere is not looked up again.
const FRESH_FAILURE: Duration = Duration::from_secs(1);
/// How long a connection waits for the resolver.
const PATIENCE: Duration = Duration::from_secs(5);
/// As many look-ups run at once; each has a thread.
const AT_ONCE: usize = 16;
/// As many addresses of a name are looked at.
const MOST_ADDRESSES: usize = 64;

/// Why a name leads nowhere.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NameError {
    #[error("look up {name}, the destination's host name; see the resolver's configuration")]
    Resolver {
        name: Arc<str>,
        #[source]
        source: Arc<io::Error>,
    },
    #[error("look up {name}, the destination's host name: no answer within 5 s")]
    Timeout { name: Arc<str> },
    #[error("host name {name} of the destination has no address that could be dialled")]
    Nowhere { name: Arc<str> },
}

/// What finds the addresses of a name; may block.
type Resolver = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

/// What the resolver said of a name, and until when that holds; locked while it is asked.
type Slot = Arc<tokio::sync::Mutex<Option<Answer>>>;

#[derive(Clone)]
struct Answer {
    until: Instant,
    addresses: Result<Arc<[IpAddr]>, NameError>,
}

/// The names that were looked up last.
pub(crate) struct Names {
    resolver: Arc<Resolver>,
    slots: Mutex<LruCache<Arc<str>, Slot>>,
    running: Arc<Semaphore>,
}

impl Names {
    /// Asks the resolver of this machine, in the network of this process.
    pub(crate) fn of_machine() -> Self {
        Self::new(Arc::new(|name| {
            let found = (name, 0).to_socket_addrs()?;
            Ok(found.map(|address| address.ip()).collect())
        }))
    }

    fn new(resolver: Arc<Resolver>) -> Self {
        let slots = Mutex::new(LruCache::new(KEPT));
        Self { resolver, slots, running: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// An address of `name`, any of `like`'s family if there is one.
    pub(crate) async fn resolve(
        &self,
        name: &Arc<str>,
        like: IpAddr,
        rng: &mut (impl Rng + Send),
    ) -> Result<IpAddr, NameError> {
        let waited = timeout(PATIENCE, self.addresses(name)).await;
        let addresses =
            waited.unwrap_or_else(|_elapsed| Err(NameError::Timeout { name: Arc::clone(name) }))?;
        let alike = |ip: &&IpAddr| ip.is_ipv4() == like.is_ipv4();
        let chosen = addresses.iter().filter(alike).choose(rng);
        let chosen = chosen.or_else(|| addresses.iter().choose(rng)).copied();
        chosen.ok_or_else(|| NameError::Nowhere { name: Arc::clone(name) })
    }

    async fn addresses(&self, name: &Arc<str>) -> Result<Arc<[IpAddr]>, NameError> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.get_or_insert(Arc::clone(name), Slot::default))
        };
        // Connections that want the same name wait for one look-up.
        let mut answer = slot.lock().await;
        if let Some(answer) = answer.as_ref().filter(|answer| Instant::now() < answer.until) {
            return answer.addresses.clone();
        }
        let addresses = self.ask(name).await;
        let fresh = if addresses.is_ok() { FRESH } else { FRESH_FAILURE };
        *answer = Some(Answer { until: Instant::now() + fresh, addresses: addresses.clone() });
        addresses
    }

    async fn ask(&self, name: &Arc<str>) -> Result<Arc<[IpAddr]>, NameError> {
        let failed =
            |source| NameError::Resolver { name: Arc::clone(name), source: Arc::new(source) };
        let running = Arc::clone(&self.running).acquire_owned().await;
        let running = running.map_err(|closed| failed(io::Error::other(closed)))?;
        let (resolver, asked) = (Arc::clone(&self.resolver), Arc::clone(name));
        let found = tokio::task::spawn_blocking(move || {
            let found = resolver(&asked);
            // Only now: nobody may be waiting any more, and the thread is still taken.
            drop(running);
            found
        });
        let found =
            found.await.map_err(|error| failed(io::Error::other(error)))?.map_err(failed)?;
        let mut usable: Vec<_> = found.iter().map(IpAddr::to_canonical).filter(is_usable).collect();
        usable.sort_unstable();
        usable.dedup();
        usable.truncate(MOST_ADDRESSES);
        if usable.is_empty() {
            return Err(NameError::Nowhere { name: Arc::clone(name) });
        }
        Ok(usable.into())
    }
}

/// Whether it is one that another machine can have. Who answers for the name must not lead a pod to itself.
fn is_usable(ip: &IpAddr) -> bool {
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || is_broadcast(*ip))
}

fn is_broadcast(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V4(ip) if ip.is_broadcast())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use rand::{SeedableRng as _, rngs::StdRng};

    use super::*;

    /// A resolver that counts what it is asked, and knows a few names.
    fn counted() -> (Names, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&asked);
        let names = Names::new(Arc::new(move |name| {
            counter.fetch_add(1, Ordering::Relaxed);
            let ips: &[&str] = match name {
                "both.test" => &["192.0.2.1", "2001:db8::1", "192.0.2.1"],
                "mapped.test" => &["::ffff:192.0.2.2"],
                "own.test" => &["127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "255.255.255.255"],
                "mixed.test" => &["127.0.0.1", "192.0.2.3"],
                _ => return Err(io::Error::other("unknown")),
            };
            Ok(ips.iter().map(|ip| ip.parse().unwrap()).collect())
        }));
        (names, asked)
    }

    async fn ask(names: &Names, name: &str, like: &str) -> String {
        let mut rng = StdRng::seed_from_u64(1);
        let found = names.resolve(&name.into(), like.parse().unwrap(), &mut rng).await;
        found.map_or_else(|error| error.to_string(), |ip| ip.to_string())
    }

    #[tokio::test]
    async fn the_family_that_was_asked_for_comes_first() {
        let (names, _) = counted();
        for (name, like, want) in [
            ("both.test", "10.0.0.1", "192.0.2.1"),
            ("both.test", "fd00::1", "2001:db8::1"),
            ("mapped.test", "fd00::1", "192.0.2.2"),
            ("mixed.test", "10.0.0.1", "192.0.2.3"),
            (
                "own.test",
                "10.0.0.1",
                "host name own.test of the destination has no address that could be dialled",
            ),
            (
                "none.test",
                "10.0.0.1",
                "look up none.test, the destination's host name; see the resolver's configuration",
            ),
        ] {
            assert_eq!(ask(&names, name, like).await, want, "{name} {like}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_is_looked_up_once_for_as_long_as_the_answer_holds() {
        let (names, asked) = counted();
        let many = (0..20).map(|_| ask(&names, "both.test", "10.0.0.1"));
        assert!(join_all(many).await.iter().all(|ip| ip == "192.0.2.1"));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        tokio::time::advance(FRESH).await;
        ask(&names, "both.test", "10.0.0.1").await;
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        for _ in 0..3 {
            ask(&names, "none.test", "10.0.0.1").await;
        }
        assert_eq!(asked.load(Ordering::Relaxed), 3);
        tokio::time::advance(FRESH_FAILURE).await;
        ask(&names, "none.test", "10.0.0.1").await;
        assert_eq!(asked.load(Ordering::Relaxed), 4);
    }

    #[tokio::test]
    async fn no_more_names_are_kept_than_there_is_room_for() {
        let (names, _) = counted();
        for n in 0..KEPT.get() + 10 {
            let slot = || Slot::default();
            names.slots.lock().unwrap().get_or_insert(format!("n{n}.test").into(), slot);
        }
        ask(&names, "both.test", "10.0.0.1").await;
        assert_eq!(names.slots.lock().unwrap().len(), KEPT.get());
    }

    #[tokio::test(start_paused = true)]
    async fn a_resolver_that_does_not_answer_holds_no_connection_for_ever_and_few_threads() {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Mutex::new(held);
        let running = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&running);
        let names = Names::new(Arc::new(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            held.lock().unwrap().recv().unwrap_or_default();
            Ok(Vec::new())
        }));
        let waiting = (0..AT_ONCE + 4).map(|n| {
            let names = &names;
            async move { ask(names, &format!("n{n}.test"), "10.0.0.1").await }
        });
        let clock = async {
            while running.load(Ordering::Relaxed) < AT_ONCE {
                tokio::task::yield_now().await;
            }
            tokio::time::advance(PATIENCE).await;
        };
        let (answers, ()) = futures::join!(join_all(waiting), clock);
        assert!(
            answers.iter().all(|answer| answer.ends_with("no answer within 5 s")),
            "{answers:?}"
        );
        assert_eq!(running.load(Ordering::Relaxed), AT_ONCE);
        drop(release);
    }
}
