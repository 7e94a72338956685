//! The table of questions and answers, without a control plane.

use futures::FutureExt as _;
use futures::future::{join_all, poll_immediate};

use super::*;

fn key(uid: &str) -> Key {
    Key::Workload(uid.into())
}

fn said(name: &str, outcome: Outcome) -> Answered {
    Answered { name: name.to_owned(), aliases: Vec::new(), outcome }
}

fn texts(names: &[Arc<str>]) -> Vec<&str> {
    names.iter().map(|name| &**name).collect()
}

#[test]
fn keys_are_named_as_resources_are() {
    let mapped = "::ffff:10.0.0.1".parse().unwrap();
    assert_eq!(Key::address(&"net".into(), mapped).to_string(), "net/10.0.0.1");
    let name = ServiceName { namespace: "ns".into(), hostname: "h".into() };
    assert_eq!(Key::Service(name).to_string(), "ns/h");
    assert_eq!(key("c//Pod/ns/a").to_string(), "c//Pod/ns/a");
}

#[tokio::test(start_paused = true)]
async fn a_question_without_an_answer_ends_at_its_deadline() {
    let on_demand = OnDemand::default();
    let asked = tokio::time::Instant::now();
    let error = on_demand.fetch(&key("a")).await.unwrap_err();
    assert_eq!(error, DemandError::Deadline { key: key("a") });
    assert_eq!(asked.elapsed().as_secs(), DEMAND_DEADLINE.as_secs());
}

#[tokio::test]
async fn a_refused_record_is_no_answer() {
    let on_demand = OnDemand::default();
    let a = key("a");
    let mut fetch = Box::pin(on_demand.fetch(&a));
    assert!(poll_immediate(&mut fetch).await.is_none());
    on_demand.answered(&[said("a", Outcome::Refused)]);
    assert_eq!(fetch.await, Err(DemandError::Refused(key("a"))));
    on_demand.answered(&[said("a", Outcome::Known)]);
    assert_eq!(on_demand.fetch(&a).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn questions_are_bounded_and_those_nobody_waits_for_make_room() {
    let on_demand = OnDemand::default();
    let keys: Vec<_> = (0..MAX_PENDING).map(|i| key(&i.to_string())).collect();
    {
        let mut waiting: Vec<_> = keys.iter().map(|key| Box::pin(on_demand.fetch(key))).collect();
        let polled = join_all(waiting.iter_mut().map(poll_immediate)).await;
        assert!(polled.iter().all(Option::is_none));
        assert_eq!(on_demand.fetch(&key("more")).await, Err(DemandError::Busy(key("more"))));
        // The same question again needs no room.
        assert!(on_demand.fetch(&keys[0]).now_or_never().is_none());
    }
    let change = on_demand.changed().await;
    assert_eq!((change.subscribe.len(), change.unsubscribe.len()), (MAX_PENDING, 0));
    assert!(on_demand.fetch(&key("more")).now_or_never().is_none());
    let change = on_demand.changed().await;
    assert_eq!((texts(&change.subscribe), change.unsubscribe.len()), (vec!["more"], MAX_PENDING));
}

#[tokio::test]
async fn answers_that_there_is_none_are_bounded_and_the_oldest_go() {
    let on_demand = OnDemand::default();
    for i in 0..=MAX_ABSENT {
        let key = key(&i.to_string());
        assert!(on_demand.fetch(&key).now_or_never().is_none());
        on_demand.answered(&[said(&key.to_string(), Outcome::Absent)]);
    }
    let change = on_demand.changed().await;
    assert_eq!(
        change.unsubscribe.len() + change.subscribe.len(),
        MAX_ABSENT,
        "the first is forgotten unsaid"
    );
    assert_eq!(on_demand.names().len(), MAX_ABSENT);
    assert!(on_demand.fetch(&key("0")).now_or_never().is_none(), "it is asked for anew");
    assert_eq!(on_demand.fetch(&key("1")).now_or_never(), Some(Ok(())));
}

#[tokio::test]
async fn a_name_that_was_known_is_one_that_is_not_once_its_resource_is_gone() {
    let on_demand = OnDemand::default();
    let by_address = Key::address(&"".into(), [10, 0, 0, 1].into());
    assert!(on_demand.fetch(&by_address).now_or_never().is_none());
    let aliases = vec![by_address.to_string()];
    on_demand.answered(&[Answered { aliases, ..said("a", Outcome::Known) }]);
    assert_eq!(on_demand.table().absent.len(), 0);
    on_demand.answered(&[said("a", Outcome::Absent)]);
    assert_eq!(on_demand.table().absent.len(), 1);
    assert!(on_demand.table().known.is_empty());
    assert_eq!(on_demand.fetch(&by_address).now_or_never(), Some(Ok(())));
}
