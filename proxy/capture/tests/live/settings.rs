//! Settings of pods in maps that are full.

use std::collections::BTreeSet;

use culvert_abi::{Exclusion, maps};
use culvert_capture::Settings;

use crate::world::World;

fn port(port: u16) -> Settings {
    Settings { exclude_outbound_ports: BTreeSet::from([port]), ..Settings::default() }
}

fn refused(node: &culvert_capture::Node) -> u64 {
    let failures = node.failures();
    failures.iter().find(|(kind, _)| *kind == "settings_refused").unwrap().1
}

#[test]
fn settings_that_do_not_fit_are_refused_and_the_pod_stays_captured() {
    let Some(world) = World::new("full") else { return };
    let node = world.start();
    let pod = world.enroll_with(&node, &port(5432));
    let mut exclusions = world.map::<Exclusion, u8>(maps::EXCLUSIONS);
    let of_others = (0..).map(|value| Exclusion { pod: 1, kind: Exclusion::OUTBOUND_PORT, value });
    let fit = of_others.take_while(|key| exclusions.insert(key, 1, 0).is_ok()).count();
    assert!(fit > 10_000, "only {fit} entries fit");

    let error = pod.capture().configure(&port(6379)).unwrap_err().to_string();
    assert!(error.contains("insert into") && error.contains(maps::EXCLUSIONS), "{error}");
    assert_eq!((&*pod.settings(), refused(&node)), (&port(5432), 1));
    // One that takes no more room is none too many.
    pod.capture().configure(&Settings { bypass_inbound: true, ..Settings::default() }).unwrap();
    pod.capture().configure(&port(6379)).unwrap();
    exclusions.insert(Exclusion { pod: 1, kind: 7, value: 7 }, 1, 0).unwrap_err();

    node.unenroll(pod).unwrap();
    exclusions.insert(Exclusion { pod: 1, kind: 7, value: 7 }, 1, 0).unwrap();
    let pod = world.enroll_with(&node, &Settings { capture_dns: true, ..port(6379) });
    let without = Settings { capture_dns: true, ..Settings::default() };
    assert_eq!((&*pod.settings(), refused(&node)), (&without, 2));
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn nothing_of_a_pods_settings_is_left_when_it_goes() {
    let Some(world) = World::new("gone") else { return };
    let node = world.start();
    let settings = Settings {
        capture_dns: true,
        bypass_inbound: true,
        exclude_inbound_ports: BTreeSet::from([80]),
        exclude_outbound_cidrs: ["10.0.0.0/8", "::/0"].map(|net| net.parse().unwrap()).into(),
        exclude_interfaces: BTreeSet::from(["eth0".to_owned()]),
        ..port(5432)
    };
    let pod = world.enroll_with(&node, &settings);
    // Ports in and out, and an interface; two networks, and IPv4 within the second.
    assert_eq!(world.settings(pod.id()), (Some(pod.id()), 3, 3));
    pod.capture().configure(&port(5432)).unwrap();
    assert_eq!(world.settings(pod.id()), (Some(pod.id()), 1, 0));
    pod.capture().configure(&settings).unwrap();
    let id = pod.id();
    node.unenroll(pod).unwrap();
    assert_eq!(world.settings(id), (None, 0, 0));
    node.dismantle().unwrap();
}
