//! The log: what is since, what is forgotten, and for whom.

use super::*;
use crate::resource::Resource;

fn resource(name: &str, version: &str) -> Arc<Resource> {
    Arc::new(Resource {
        kind: Type::Address,
        name: name.into(),
        version: version.into(),
        body: bytes::Bytes::new(),
        aliases: vec![format!("/{name}").into()],
        node: "n1".into(),
        services: vec!["shop/web".into()],
    })
}

fn set(store: &Store, names: &[&str]) {
    let changed = names.iter().map(|name| resource(name, "1")).collect();
    store.apply(Update { changed, removed: Vec::new() });
}

fn remove(store: &Store, names: &[&str]) {
    let removed = names.iter().map(|name| (Type::Address, (*name).into())).collect();
    store.apply(Update { changed: Vec::new(), removed });
}

/// What changed since, as names, those that are gone with a `-`; `None` if that is not known any more.
fn since(store: &Store, number: u64) -> Option<Vec<String>> {
    let view = store.read();
    let changes = view.table(Type::Address).since(number)?;
    let name = |change: Changed<'_>| match change {
        Changed::Set(resource) => resource.name.to_string(),
        Changed::Removed(name) => format!("-{name}"),
    };
    Some(changes.map(name).collect())
}

#[test]
fn what_changed_is_told_in_its_order_and_once() {
    let store = Arc::new(Store::new());
    let reader = store.reader();
    reader.told(Type::Address, 0);
    set(&store, &["a", "b"]);
    set(&store, &["a"]);
    assert_eq!(since(&store, 0).unwrap(), ["b", "a"]);
    assert_eq!(since(&store, 2).unwrap(), ["a"]);
    remove(&store, &["b"]);
    assert_eq!(since(&store, 2).unwrap(), ["a", "-b"]);
    assert!(since(&store, store.read().last()).unwrap().is_empty());
    set(&store, &["b"]);
    assert_eq!(since(&store, 0).unwrap(), ["a", "b"], "it is back");
}

#[test]
fn removals_are_kept_until_everybody_was_told() {
    let store = Arc::new(Store::new());
    let slow = store.reader();
    let fast = store.reader();
    set(&store, &["a", "b"]);
    slow.told(Type::Address, 2);
    fast.told(Type::Address, 2);
    remove(&store, &["a"]);
    fast.told(Type::Address, 3);
    set(&store, &["c"]);
    assert_eq!(since(&store, 2).unwrap(), ["-a", "c"], "one was not told");
    drop(slow);
    set(&store, &["c"]);
    assert_eq!(since(&store, 2), None, "nobody is left that was not told");
    assert_eq!(since(&store, 3).unwrap(), ["c"]);
}

#[test]
fn a_client_that_lags_too_far_holds_nothing_up() {
    let mut table = Table::default();
    for number in 1..=10 {
        table.set(number * 2 - 1, resource("a", "1"));
        table.remove(number * 2, "a".into());
        table.set(100 + number, resource(&number.to_string(), "1"));
        table.remove(200 + number, number.to_string().into());
        table.forget(0, 3);
    }
    assert!(table.since(0).is_none());
    assert_eq!(table.iter().count(), 0);
    let kept = table.since(208).unwrap().count();
    assert!(kept <= 3, "{kept}");
}

#[test]
fn indexes_follow_the_resources() {
    let store = Store::new();
    set(&store, &["a", "b"]);
    remove(&store, &["a"]);
    let view = store.read();
    let table = view.table(Type::Address);
    let names = |found: Vec<&Arc<Resource>>| {
        found.iter().map(|resource| resource.name.to_string()).collect::<Vec<_>>()
    };
    assert!(names(table.resolve("/a").collect()).is_empty());
    assert_eq!(names(table.resolve("/b").collect()), ["b"]);
    assert_eq!(names(table.resolve("b").collect()), ["b"]);
    assert_eq!(names(table.endpoints("shop/web").collect()), ["b"]);
    assert_eq!(names(table.of_node("n1").collect()), ["b"]);
}
