use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};

use super::*;
use crate::{
    Snapshot, Workload,
    policy::{Condition, Denial, ServiceAccount, Verdict, evaluate},
    snapshot::{Origin, Update},
};

const NAMESPACES: [&str; 3] = ["a", "b", "c"];
const ACCOUNTS: [&str; 3] = ["x", "y", "z"];
const PORTS: [u16; 3] = [80, 81, 82];

fn pick<'a>(rng: &mut StdRng, of: &[&'a str]) -> &'a str {
    of.choose(rng).unwrap()
}

fn text(rng: &mut StdRng, of: &[&str]) -> TextMatch {
    let text = pick(rng, of).into();
    match rng.random_range(0..8) {
        0 => TextMatch::Presence,
        1 => TextMatch::Prefix(text),
        2 => TextMatch::Suffix(text),
        _ => TextMatch::Exact(text),
    }
}

fn principal(rng: &mut StdRng) -> TextMatch {
    let (namespace, account) = (pick(rng, &NAMESPACES), pick(rng, &ACCOUNTS));
    match rng.random_range(0..8) {
        0 => TextMatch::Presence,
        1 => TextMatch::Prefix(format!("td/ns/{namespace}/").into()),
        2 => TextMatch::Prefix(format!("td/ns/{namespace}").into()),
        3 => TextMatch::Prefix(format!("td/ns/{namespace}/sa/{account}").into()),
        4 => TextMatch::Suffix(format!("/sa/{account}").into()),
        5 => TextMatch::Suffix(account.into()),
        _ => TextMatch::Exact(format!("td/ns/{namespace}/sa/{account}").into()),
    }
}

fn condition<T>(rng: &mut StdRng, mut one: impl FnMut(&mut StdRng) -> T) -> Condition<T> {
    let mut some = |rng: &mut StdRng| {
        let count = if rng.random_ratio(1, 2) { 0 } else { rng.random_range(1..3) };
        (0..count).map(|_| one(rng)).collect()
    };
    let any = some(rng);
    let none = if rng.random_ratio(1, 5) { some(rng) } else { Vec::new() };
    Condition { any, none }
}

fn one_match(rng: &mut StdRng) -> Match {
    Match {
        namespaces: condition(rng, |rng| text(rng, &NAMESPACES)),
        principals: condition(rng, principal),
        service_accounts: condition(rng, |rng| ServiceAccount {
            namespace: pick(rng, &NAMESPACES).into(),
            name: pick(rng, &ACCOUNTS).into(),
        }),
        source_ips: Condition::default(),
        destination_ips: Condition::default(),
        destination_ports: condition(rng, |rng| *PORTS.choose(rng).unwrap()),
    }
}

fn some<T>(rng: &mut StdRng, mut one: impl FnMut(&mut StdRng) -> T) -> Vec<T> {
    let count = rng.random_range(0..3);
    (0..count).map(|_| one(rng)).collect()
}

fn policy(rng: &mut StdRng, index: usize) -> Policy {
    let namespace: Arc<str> = pick(rng, &["a", "b"]).into();
    let name: Arc<str> = format!("p{index}").into();
    Policy {
        key: format!("{namespace}/{name}").into(),
        name,
        namespace,
        scope: *[Scope::Global, Scope::Namespace, Scope::WorkloadSelector].choose(rng).unwrap(),
        action: *[Action::Allow, Action::Deny].choose(rng).unwrap(),
        rules: some(rng, |rng| Rule {
            clauses: some(rng, |rng| Clause { matches: some(rng, one_match) }),
        }),
        enforcement: Enforcement::default(),
    }
}

fn connections() -> Vec<Connection> {
    let identities = NAMESPACES.iter().flat_map(|namespace| {
        ACCOUNTS.iter().map(|account| Identity::new("td", namespace, account).ok())
    });
    let identities = identities.chain([None]);
    let to = |identity: Option<Identity>| {
        PORTS.map(|port| Connection {
            source: [10, 0, 0, 2].into(),
            identity: identity.clone(),
            destination: ([10, 0, 0, 1], port).into(),
        })
    };
    identities.flat_map(to).collect()
}

/// What the rules of verdicts say, policy by policy.
fn by_the_book(policies: &[Policy], workload: &Workload, connection: &Connection) -> &'static str {
    let applies = |p: &&Policy| match p.scope {
        Scope::Global => true,
        Scope::Namespace if *p.namespace == *workload.namespace() => true,
        _ => workload.policies.contains(&p.key),
    };
    let of = |action| policies.iter().filter(applies).filter(move |p| p.action == action);
    let matches = |p: &Policy| p.matches(connection);
    if of(Action::Deny).any(matches) {
        "denied"
    } else if of(Action::Allow).any(matches) {
        "allowed"
    } else if of(Action::Allow).next().is_some() {
        "none allowed"
    } else {
        "allowed"
    }
}

fn workload(named: &[Policy]) -> Workload {
    let text = "workloads: [{uid: w, name: w, namespace: a, trustDomain: td}]";
    let mesh = crate::file::parse(std::path::Path::new("mesh.yaml"), text).unwrap();
    let policies = named.iter().map(|p| Arc::clone(&p.key)).collect();
    Workload { policies, ..Workload::clone(mesh.find_workload("w").unwrap()) }
}

#[test]
fn the_index_changes_no_verdict() {
    let connections = connections();
    for seed in 0..300 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut policies: Vec<_> = (0..6).map(|index| policy(&mut rng, index)).collect();
        let workload = workload(&policies[..3]);
        let updates = policies.iter().cloned().map(Update::Policy);
        let mut mesh = Snapshot::default().apply(Origin::ControlPlane, updates);
        while !policies.is_empty() {
            for connection in &connections {
                let got = match evaluate(&mesh, &workload, connection) {
                    Verdict::Denied { reason: Denial::Policy(_) } => "denied",
                    Verdict::Denied { reason: Denial::NoneAllowed } => "none allowed",
                    // A missing policy is only ever a reason when nothing else is.
                    Verdict::Allowed | Verdict::Denied { reason: Denial::Missing(_) } => "allowed",
                };
                let want = by_the_book(&policies, &workload, connection);
                assert_eq!(got, want, "seed {seed}: {connection:?} by {policies:#?}");
            }
            let gone = policies.swap_remove(rng.random_range(0..policies.len()));
            mesh = mesh.apply(Origin::ControlPlane, [Update::RemovePolicy(gone.key)]);
        }
        assert!(mesh.policy_index().groups("a").all(|group| {
            let empty =
                |of: &Arranged| of.count == 0 && of.about_all.is_empty() && of.keyed.is_empty();
            empty(&group.denying) && empty(&group.allowing)
        }));
    }
}

/// How many of 10,000 policies of one namespace, about one thing each, a connection meets.
#[track_caller]
fn check_met(one_match: impl Fn(usize) -> Match, want: usize) {
    let updates = (0..10_000).map(|index| {
        let matches = vec![one_match(index)];
        Update::Policy(Policy {
            key: format!("a/p{index}").into(),
            name: "p".into(),
            namespace: "a".into(),
            scope: Scope::Namespace,
            action: Action::Deny,
            rules: vec![Rule { clauses: vec![Clause { matches }] }],
            enforcement: Enforcement::Enforced,
        })
    });
    let mesh = Snapshot::default().apply(Origin::ControlPlane, updates);
    let connection = Connection {
        source: [10, 0, 0, 2].into(),
        identity: Identity::new("td", "n7", "s7").ok(),
        destination: ([10, 0, 0, 1], 7).into(),
    };
    let groups = mesh.policy_index().groups("a");
    let met = groups.flat_map(|group| group.candidates(Action::Deny, &connection)).count();
    assert_eq!(met, want);
}

fn any<T>(one: T) -> Condition<T> {
    Condition { any: vec![one], none: vec![] }
}

#[test]
fn a_connection_meets_the_policies_that_are_about_it() {
    let principal = |text| Match { principals: any(text), ..Match::default() };
    check_met(|i| principal(TextMatch::Exact(format!("td/ns/n{i}/sa/s{i}").into())), 1);
    check_met(|i| principal(TextMatch::Prefix(format!("td/ns/n{i}/").into())), 1);
    check_met(|i| principal(TextMatch::Suffix(format!("/sa/s{i}").into())), 1);
    let namespace = |i| any(TextMatch::Exact(format!("n{i}").into()));
    check_met(|i| Match { namespaces: namespace(i), ..Match::default() }, 1);
    let account =
        |i| ServiceAccount { namespace: format!("n{i}").into(), name: format!("s{i}").into() };
    check_met(|i| Match { service_accounts: any(account(i)), ..Match::default() }, 1);
    let port = |i: usize| any(u16::try_from(i).unwrap());
    check_met(|i| Match { destination_ports: port(i), ..Match::default() }, 1);
    // Whom a policy is about tells more than which port.
    let both =
        |i| Match { namespaces: namespace(i), destination_ports: any(7), ..Match::default() };
    check_met(both, 1);
    check_met(|_| principal(TextMatch::Presence), 10_000);
}
