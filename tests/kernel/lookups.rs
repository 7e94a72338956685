//! Runs the look-ups of `bpf-fixtures/contexts` through `pick_listener`.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd as _,
};

use aya::{
    Ebpf,
    maps::{HashMap, MapData, SockMap},
    programs::SkLookup,
};
use culvert_abi::{Addr, Flow, PodAddr, Slot, maps};
use socket2::{Domain, Socket, Type};

use crate::{
    fixture::{self, Fixture, Outcome},
    netns::{OWN_V4, OWN_V6},
    objects,
    outcomes::Outcomes,
    settings,
    test_run::{self, Answer},
};

#[test]
fn recorded_lookups_get_their_listener_and_are_counted() {
    if !objects::available() {
        return;
    }
    let mut faults = Vec::new();
    for (when_down, pod) in objects::pods() {
        check(when_down, pod, &mut faults);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn check(when_down: &str, mut pod: Ebpf, faults: &mut Vec<String>) {
    let outcomes = Outcomes::of(&mut pod);
    objects::load(pod.program_mut("pick_listener").unwrap()).unwrap();
    own_addresses(&mut pod);
    let mut listeners = Listeners::of(&mut pod);
    for fixture in fixture::read_all("contexts") {
        let lookup = Lookup::parse(&fixture);
        for expectation in fixture.expectations_of(when_down) {
            listeners.arrange(expectation.setting("listeners", "absent"));
            settings::set(&mut pod, expectation.setting("settings", ""));
            set_exemption(&mut pod, &lookup, expectation.setting("exempt", "no"));
            let got = match run(&pod, &outcomes, &listeners, &lookup) {
                Ok(got) => got,
                Err(error) if error.raw_os_error() == Some(test_run::ENOTSUPP) => {
                    println!("skipped: sk_lookup has no test run before Linux 5.14: {error}");
                    return;
                }
                Err(error) => panic!("{}: {error}", fixture.name),
            };
            if got != expectation.result {
                faults.push(format!("{}: {expectation}\n    got {got:?}", fixture.name));
            }
        }
    }
}

/// Gives the pod of `object` its own addresses, which the fixtures name too.
pub(crate) fn own_addresses(object: &mut Ebpf) {
    let map = object.map_mut(maps::ADDRS).unwrap();
    let mut addrs: HashMap<_, PodAddr, u8> = HashMap::try_from(map).unwrap();
    for own in [OWN_V4, OWN_V6] {
        let key = PodAddr { pod: objects::POD_ID, addr: mapped(own.parse().unwrap()) };
        addrs.insert(key, 1, 0).unwrap();
    }
}

/// An address as the maps hold it.
pub(crate) fn mapped(addr: IpAddr) -> Addr {
    Addr(match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    })
}

/// A listening socket for each slot, and the map that they can be put into.
pub(crate) struct Listeners {
    slots: SockMap<MapData>,
    sockets: Vec<(Slot, Socket)>,
}

impl Listeners {
    /// Takes the map out of `object`; no listener is in it yet.
    pub(crate) fn of(object: &mut Ebpf) -> Self {
        let slots = object.take_map(maps::LISTENERS).unwrap().try_into().unwrap();
        let sockets = [
            (Slot::OutboundV4, Domain::IPV4, Type::STREAM),
            (Slot::OutboundV6, Domain::IPV6, Type::STREAM),
            (Slot::InboundV4, Domain::IPV4, Type::STREAM),
            (Slot::InboundV6, Domain::IPV6, Type::STREAM),
            (Slot::HboneV4, Domain::IPV4, Type::STREAM),
            (Slot::HboneV6, Domain::IPV6, Type::STREAM),
            (Slot::DnsTcpV4, Domain::IPV4, Type::STREAM),
            (Slot::DnsTcpV6, Domain::IPV6, Type::STREAM),
            (Slot::DnsUdpV4, Domain::IPV4, Type::DGRAM),
            (Slot::DnsUdpV6, Domain::IPV6, Type::DGRAM),
        ];
        let sockets = sockets.map(|(slot, domain, kind)| (slot, listen(domain, kind)));
        Self { slots, sockets: sockets.into() }
    }

    /// Puts them in their slots (`present`), takes them out (`absent`), or puts those of IPv4 into slots of IPv6
    /// (`wrong`).
    pub(crate) fn arrange(&mut self, how: &str) {
        for (index, (slot, socket)) in self.sockets.iter().enumerate() {
            let slot = *slot as u32;
            match how {
                "present" => self.slots.set(slot, socket, 0).unwrap(),
                // An empty slot cannot be emptied again.
                "absent" => drop(self.slots.clear_index(&slot)),
                "wrong" => self.slots.set(slot, &self.sockets[index & !1].1, 0).unwrap(),
                other => panic!("no such arrangement: {other}"),
            }
        }
    }

    fn role(&self, cookie: u64) -> Option<String> {
        let is = |(_, socket): &&(Slot, Socket)| socket.cookie().unwrap() == cookie;
        self.sockets.iter().find(is).map(|(slot, _)| format!("{slot:?}"))
    }
}

fn listen(domain: Domain, kind: Type) -> Socket {
    let socket = Socket::new(domain, kind, None).unwrap();
    let any: SocketAddr = match domain {
        Domain::IPV4 => "127.0.0.1:0".parse().unwrap(),
        _ => "[::1]:0".parse().unwrap(),
    };
    socket.bind(&any.into()).unwrap();
    if kind == Type::STREAM {
        socket.listen(1).unwrap();
    }
    socket
}

struct Lookup {
    protocol: u8,
    remote: SocketAddr,
    local: SocketAddr,
}

impl Lookup {
    fn parse(fixture: &Fixture) -> Self {
        let fields: BTreeMap<_, _> =
            fixture.input.iter().filter_map(|line| line.split_once(' ')).collect();
        let field =
            |name| *fields.get(name).unwrap_or_else(|| panic!("{}: no line {name}", fixture.name));
        Self {
            protocol: field("protocol").parse().unwrap(),
            remote: field("remote").parse().unwrap(),
            local: field("local").parse().unwrap(),
        }
    }
}

fn run(
    pod: &Ebpf,
    outcomes: &Outcomes,
    listeners: &Listeners,
    lookup: &Lookup,
) -> io::Result<Outcome> {
    let program: &SkLookup = pod.program("pick_listener").unwrap().try_into().unwrap();
    let program = program.fd().unwrap().as_fd();
    let mut answer = Err(io::ErrorKind::Other.into());
    let counted = outcomes.of_work(|| {
        answer = test_run::sk_lookup(program, lookup.protocol, lookup.remote, lookup.local);
    });
    let verdict = match answer? {
        Answer { action: 0, .. } => "drop".to_owned(),
        Answer { cookie: 0, .. } => "pass".to_owned(),
        Answer { cookie, .. } => listeners.role(cookie).expect("only our listeners are there"),
    };
    Ok(Outcome { verdict, counted })
}

fn set_exemption(pod: &mut Ebpf, lookup: &Lookup, exempt: &str) {
    let flow = flow(lookup.remote, lookup.local);
    match exempt {
        "yes" => exemptions(pod).insert(flow, 1, 0).unwrap(),
        // There is none to remove at first.
        "no" => drop(exemptions(pod).remove(&flow)),
        other => panic!("not yes or no: {other}"),
    }
}

/// The map `exempt` of `object`.
pub(crate) fn exemptions(object: &mut Ebpf) -> HashMap<&mut MapData, Flow, u8> {
    object.map_mut(maps::EXEMPT).unwrap().try_into().unwrap()
}

/// A key of that map.
pub(crate) fn flow(remote: SocketAddr, local: SocketAddr) -> Flow {
    Flow {
        remote: mapped(remote.ip()),
        local: mapped(local.ip()),
        remote_port: remote.port(),
        local_port: local.port(),
    }
}
