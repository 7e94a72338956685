use std::sync::atomic::AtomicBool;
use std::time::UNIX_EPOCH;

use tokio::time::{Instant, advance};

use super::entry::{BACKOFF_CAP, KEPT};
use super::*;
use crate::Authority;
use crate::issuer::{Issued, Issuing};

const TTL: Duration = Duration::from_hours(24);

fn web() -> Identity {
    "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap()
}

fn db() -> Identity {
    "spiffe://cluster.local/ns/shop/sa/db".parse().unwrap()
}

/// A wall clock that follows tokio's paused one and can be set.
#[derive(Clone)]
struct Wall {
    started: Instant,
    epoch: Arc<Mutex<SystemTime>>,
}

impl Wall {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            epoch: Arc::new(Mutex::new(UNIX_EPOCH + Duration::from_hours(24 * 20_000))),
        }
    }

    fn now(&self) -> SystemTime {
        *self.epoch.lock().unwrap() + self.started.elapsed()
    }

    fn step(&self, change: impl FnOnce(SystemTime) -> SystemTime) {
        let mut epoch = self.epoch.lock().unwrap();
        *epoch = change(*epoch);
    }
}

/// The embedded authority behind a slow line that can be cut, with a count of the requests that came through it.
#[derive(Clone)]
struct Line {
    authority: Arc<Authority>,
    wall: Wall,
    delay: Duration,
    ttl: Duration,
    cut: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
}

#[derive(Debug, thiserror::Error)]
#[error("line {0} is cut")]
struct Cut(u64);

impl Issuer for Line {
    fn issue<'a>(&'a self, identity: &'a Identity) -> Issuing<'a> {
        Box::pin(async move {
            let request = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
            sleep(self.delay).await;
            if self.cut.load(Ordering::Relaxed) {
                let error: IssuerError = Arc::new(Cut(request));
                return Err(error);
            }
            let now = self.wall.now();
            let issued: Issued = self.authority.issue_for(identity, now, now + self.ttl).unwrap();
            Ok(issued)
        })
    }
}

struct Scene {
    store: Arc<Certificates>,
    line: Line,
    wall: Wall,
    running: JoinSet<()>,
    retained: Option<Retained>,
}

impl Scene {
    fn new(delay: Duration, ttl: Duration) -> Self {
        let wall = Wall::new();
        let dir = tempfile::tempdir().unwrap();
        let line = Line {
            authority: Arc::new(Authority::create(dir.path(), "root").unwrap()),
            wall: wall.clone(),
            delay,
            ttl,
            cut: Arc::default(),
            requests: Arc::default(),
        };
        let clock = wall.clone();
        let store = Arc::new(Certificates::with_clock(line.clone(), move || clock.now()));
        Self { store, line, wall, running: JoinSet::new(), retained: None }
    }

    /// With `run`, and a pod whose identity is `web`.
    fn running(mut self) -> Self {
        self.retained = Some(self.store.retain(&web()));
        let store = Arc::clone(&self.store);
        self.running.spawn(store.run());
        self
    }

    fn cut(&self, cut: bool) {
        self.line.cut.store(cut, Ordering::Relaxed);
    }

    fn requests(&self) -> u64 {
        self.line.requests.load(Ordering::Relaxed)
    }

    async fn generation(&self) -> u64 {
        self.store.fetch(&web()).await.unwrap().generation()
    }
}

#[tokio::test(start_paused = true)]
async fn a_held_certificate_is_served_without_asking() {
    let scene = Scene::new(Duration::ZERO, TTL);
    assert_eq!((scene.generation().await, scene.generation().await, scene.requests()), (1, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_identity_share_one_request() {
    let scene = Scene::new(Duration::from_secs(3), TTL);
    let (web, db) = (web(), db());
    let (a, b, c, d) = tokio::join!(
        scene.store.fetch(&web),
        scene.store.fetch(&web),
        scene.store.fetch(&web),
        scene.store.fetch(&db)
    );
    let (a, b, c, d) = (a.unwrap(), b.unwrap(), c.unwrap(), d.unwrap());
    assert!(Arc::ptr_eq(&a, &b) && Arc::ptr_eq(&b, &c));
    assert_ne!(a.identity(), d.identity());
    assert_eq!(scene.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn callers_share_a_failure_too() {
    let scene = Scene::new(Duration::from_secs(3), TTL);
    scene.cut(true);
    let web = web();
    let (a, b) = tokio::join!(scene.store.fetch(&web), scene.store.fetch(&web));
    for error in [a.unwrap_err(), b.unwrap_err()] {
        assert_eq!(
            chain(&error),
            "issue a certificate for spiffe://cluster.local/ns/shop/sa/web: line 1 is cut"
        );
    }
    assert_eq!(scene.requests(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_does_not_strand_the_others() {
    let scene = Scene::new(Duration::from_secs(3), TTL);
    let web = web();
    let impatient = timeout(Duration::from_secs(1), scene.store.fetch(&web));
    let (left, stayed) = tokio::join!(impatient, scene.store.fetch(&web));
    assert!(left.is_err() && stayed.is_ok());
}

#[tokio::test(start_paused = true)]
async fn after_a_failure_the_next_caller_asks_again_but_not_at_once() {
    let scene = Scene::new(Duration::ZERO, TTL);
    scene.cut(true);
    scene.store.fetch(&web()).await.unwrap_err();
    scene.cut(false);
    scene.store.fetch(&web()).await.unwrap_err();
    assert_eq!(scene.requests(), 1);
    advance(FAILURE_MEMORY).await;
    scene.store.fetch(&web()).await.unwrap();
    assert_eq!(scene.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_silent_issuer_is_given_up() {
    let scene = Scene::new(Duration::from_hours(1), TTL);
    let before = Instant::now();
    let error = scene.store.fetch(&web()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "issue a certificate for spiffe://cluster.local/ns/shop/sa/web: no answer within 10 s"
    );
    assert_eq!(before.elapsed(), ISSUE_DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn requests_at_one_time_are_bounded() {
    let scene = Scene::new(Duration::from_secs(1), TTL);
    let before = Instant::now();
    let mut fetches = JoinSet::new();
    for n in 0..=ISSUING {
        let store = Arc::clone(&scene.store);
        fetches.spawn(async move {
            store.fetch(&format!("spiffe://td/ns/a/sa/s{n}").parse().unwrap()).await.unwrap()
        });
    }
    fetches.join_all().await;
    assert_eq!(before.elapsed(), Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_renewed_half_way() {
    let scene = Scene::new(Duration::from_secs(1), TTL).running();
    scene.generation().await;
    sleep(TTL.mul_f64(0.44)).await;
    assert_eq!(scene.generation().await, 1);
    sleep(TTL.mul_f64(0.07)).await;
    assert_eq!((scene.generation().await, scene.requests()), (2, 2));
    sleep(2 * TTL).await;
    let renewals = scene.requests() - 2;
    assert!((3..=5).contains(&renewals), "{renewals} renewals in two lifetimes");
}

#[tokio::test(start_paused = true)]
async fn a_short_lived_certificate_does_not_spin() {
    let scene = Scene::new(Duration::ZERO, Duration::from_secs(2)).running();
    scene.generation().await;
    sleep(Duration::from_secs(20)).await;
    assert!((15..=21).contains(&scene.requests()), "{} requests in 20 s", scene.requests());
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_leaves_the_certificate_in_service() {
    let scene = Scene::new(Duration::ZERO, TTL).running();
    scene.generation().await;
    scene.cut(true);
    sleep(TTL.mul_f64(0.9)).await;
    assert!(scene.requests() > 10);
    assert_eq!(scene.generation().await, 1);
    assert_eq!(scene.store.dump()[0].state.to_string(), "Available");

    scene.cut(false);
    sleep(BACKOFF_CAP).await;
    assert!(scene.generation().await > 1);
}

#[tokio::test(start_paused = true)]
async fn attempts_to_renew_thin_out() {
    let scene = Scene::new(Duration::ZERO, TTL).running();
    scene.cut(true);
    scene.store.fetch(&web()).await.unwrap_err();
    sleep(Duration::from_mins(10)).await;
    // 1 + 2 + 4 + … + 128 s, then 150 s each, all up to a fifth shorter.
    assert!((9..=12).contains(&scene.requests()), "{} requests in 10 min", scene.requests());
}

#[tokio::test(start_paused = true)]
async fn a_first_attempt_that_failed_is_made_good_in_the_background() {
    let scene = Scene::new(Duration::ZERO, TTL).running();
    scene.cut(true);
    scene.store.fetch(&web()).await.unwrap_err();
    scene.cut(false);
    sleep(Duration::from_secs(2)).await;
    assert!(scene.store.find(&web()).is_some());
}

#[tokio::test(start_paused = true)]
async fn an_expired_certificate_is_not_served() {
    let scene = Scene::new(Duration::ZERO, TTL);
    scene.generation().await;
    scene.cut(true);
    advance(TTL).await;
    assert!(scene.store.find(&web()).is_none());
    scene.store.fetch(&web()).await.unwrap_err();
    assert_eq!(
        scene.store.dump()[0].state.to_string(),
        "Unavailable: issue a certificate for spiffe://cluster.local/ns/shop/sa/web: line 2 is cut"
    );
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_has_expired_on_arrival_is_refused() {
    let scene = Scene::new(Duration::ZERO, Duration::ZERO);
    let error = scene.store.fetch(&web()).await.unwrap_err();
    assert!(matches!(error, IdentityError::NotValid { .. }), "{error}");
}

/// A clock set forward past the renewal, and one set back to before the certificate.
#[tokio::test(start_paused = true)]
async fn a_step_of_the_wall_clock_is_noticed_within_the_recheck() {
    for step in [|now: SystemTime| now + TTL.mul_f64(0.6), |now: SystemTime| now - TTL] {
        let scene = Scene::new(Duration::ZERO, TTL).running();
        scene.generation().await;
        sleep(Duration::from_secs(1)).await;
        scene.wall.step(step);
        sleep(RECHECK).await;
        assert_eq!(scene.store.find(&web()).map(|credential| credential.generation()), Some(2));
    }
}

#[tokio::test(start_paused = true)]
async fn an_identity_is_forgotten_a_minute_after_its_last_pod_has_left() {
    let mut scene = Scene::new(Duration::ZERO, TTL).running();
    let second = scene.store.retain(&web());
    scene.generation().await;
    scene.retained = None;
    sleep(TTL).await;
    assert!(scene.store.find(&web()).is_some());
    drop(second);
    sleep(KEPT / 2).await;
    // A pod that is replaced finds the certificate, and keeps it.
    let replaced = scene.store.retain(&web());
    sleep(2 * KEPT).await;
    assert!(scene.store.find(&web()).is_some());
    drop(replaced);
    sleep(KEPT + Duration::from_millis(1)).await;
    let requests = scene.requests();
    sleep(2 * TTL).await;
    assert_eq!((scene.requests(), scene.store.dump().len()), (requests, 0));
    assert!(scene.store.find(&web()).is_none());
}

#[tokio::test(start_paused = true)]
async fn what_nobody_retains_is_served_but_not_kept() {
    let scene = Scene::new(Duration::ZERO, TTL).running();
    scene.store.fetch(&db()).await.unwrap();
    sleep(KEPT + Duration::from_millis(1)).await;
    let held: Vec<_> = scene.store.dump().into_iter().map(|entry| entry.identity).collect();
    assert_eq!(held, [web()]);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_waits_goes_ahead_of_prefetches() {
    let scene = Scene::new(Duration::from_secs(1), TTL);
    let mut prefetches = JoinSet::new();
    let pod = |n: usize| -> Identity { format!("spiffe://td/ns/a/sa/s{n}").parse().unwrap() };
    for n in 0..100 {
        let store = Arc::clone(&scene.store);
        prefetches.spawn(async move { store.prefetch(&pod(n)).await });
    }
    sleep(Duration::from_millis(1)).await;
    assert_eq!(scene.requests(), u64::try_from(BACKGROUND).unwrap());
    let before = Instant::now();
    // The first is among those that wait for their turn.
    let (last, web) = (pod(99), web());
    let (a, b) = tokio::join!(scene.store.fetch(&last), scene.store.fetch(&web));
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(before.elapsed(), Duration::from_secs(1));
    assert!(prefetches.join_all().await.iter().all(Result::is_ok));
    assert_eq!(scene.requests(), 101);
}

#[tokio::test(start_paused = true)]
async fn prefetches_do_not_keep_a_renewal_from_its_turn() {
    let scene = Scene::new(Duration::from_secs(1), TTL).running();
    scene.generation().await;
    sleep(TTL.mul_f64(0.44)).await;
    let mut prefetches = JoinSet::new();
    for n in 0..100 {
        let store = Arc::clone(&scene.store);
        let pod = format!("spiffe://td/ns/a/sa/s{n}").parse().unwrap();
        prefetches.spawn(async move { store.prefetch(&pod).await });
    }
    sleep(TTL.mul_f64(0.07)).await;
    assert_eq!(
        scene.store.find(&web()).map(|c| c.not_after() > scene.wall.now() + TTL / 2),
        Some(true)
    );
}

/// Asks every second, as connections do, and says how often there was no certificate.
async fn failures(scene: &Scene, seconds: u64) -> usize {
    let mut failures = 0;
    for _ in 0..seconds {
        failures += usize::from(scene.store.fetch(&web()).await.is_err());
        sleep(Duration::from_secs(1)).await;
    }
    failures
}

#[tokio::test(start_paused = true)]
async fn an_issuer_that_is_down_for_an_hour_is_not_noticed() {
    let scene = Scene::new(Duration::from_millis(100), TTL).running();
    scene.generation().await;
    for down_at in [0.0, 0.4, 0.5] {
        sleep(TTL.mul_f64(down_at)).await;
        scene.cut(true);
        assert_eq!(failures(&scene, 3600).await, 0);
        scene.cut(false);
        assert_eq!(failures(&scene, 300).await, 0);
    }
    assert!(scene.generation().await > 1);
}

#[tokio::test(start_paused = true)]
async fn certificates_of_a_minute_outlast_an_issuer_that_is_down_for_25_s() {
    for down_at in (0..60).step_by(4) {
        let ttl = Duration::from_mins(1);
        let scene = Scene::new(Duration::from_millis(100), ttl).running();
        scene.generation().await;
        assert_eq!(failures(&scene, down_at).await, 0);
        scene.cut(true);
        assert_eq!(failures(&scene, 25).await, 0, "down at {down_at} s");
        scene.cut(false);
        assert_eq!(failures(&scene, 60).await, 0, "up again after {down_at} s + 25 s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_is_tried_again_before_the_certificate_ends() {
    let scene = Scene::new(Duration::ZERO, Duration::from_mins(1)).running();
    scene.generation().await;
    scene.cut(true);
    // With a wait that only doubles, the last attempt would be at half of the validity and 31 s.
    assert_eq!(failures(&scene, 57).await, 0);
    scene.cut(false);
    assert_eq!(failures(&scene, 20).await, 0);
}

#[tokio::test(start_paused = true)]
async fn connections_learn_that_their_certificate_is_superseded() {
    let scene = Scene::new(Duration::ZERO, TTL).running();
    let first = scene.store.fetch(&web()).await.unwrap();
    let mut superseded = JoinSet::new();
    superseded.spawn(scene.store.superseded(&first));
    sleep(TTL.mul_f64(0.44)).await;
    assert!(superseded.try_join_next().is_none());
    sleep(TTL.mul_f64(0.07)).await;
    assert!(superseded.try_join_next().is_some());
    // One that has come late learns it as well; the newest one is not superseded.
    let newest = scene.store.fetch(&web()).await.unwrap();
    timeout(SUPERSEDED_GRACE, scene.store.superseded(&first)).await.unwrap();
    timeout(SUPERSEDED_GRACE, scene.store.superseded(&newest)).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn the_dump_shows_certificates_and_no_key() {
    let scene = Scene::new(Duration::from_secs(1), TTL);
    let web = web();
    let (_, early) = tokio::join!(scene.store.fetch(&web), async { scene.store.dump() });
    assert_eq!((early[0].state.to_string().as_str(), early[0].chain.len()), ("Initializing", 0));

    let dump = scene.store.dump();
    let [only] = dump.as_slice() else { panic!("{} identities", dump.len()) };
    assert_eq!((&only.identity, only.state.to_string().as_str()), (&web, "Available"));
    assert_eq!((only.chain.len(), only.roots.len()), (1, 1));
    let leaf = &only.chain[0];
    assert_eq!(leaf.not_after.duration_since(leaf.not_before).unwrap(), TTL);
    assert!(leaf.serial.bytes().all(|digit| digit.is_ascii_digit()));
    assert!(leaf.pem.starts_with("-----BEGIN CERTIFICATE-----\n"));
    assert!(!format!("{dump:?} {:?}", scene.store).contains("PRIVATE"));
}
