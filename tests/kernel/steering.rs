//! Live connections under the programs of the `pod` object, in a network namespace of their own.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
};

use aya::{
    Ebpf,
    maps::{HashMap, MapData, SockMap},
    programs::{
        SchedClassifier, SkLookup, TcAttachType,
        tc::{NlOptions, TcAttachOptions, qdisc_add_clsact},
    },
};
use culvert_abi::{MARK_CAPTURED, MARK_DELIVERY, Outcome, Slot, maps};
use culvert_sys::{
    netns::Netns,
    socket::{ListenOptions, listen},
};
use culvert_tests::poll::{SOON, until};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    cgroup,
    lookups::{exemptions, flow, own_addresses},
    netns::{self, OWN_V4, OWN_V6},
    objects,
    outcomes::Outcomes,
    packets,
    tun::{self, Tun},
};

/// A family's slots, the pod's address, and two addresses that are somebody else's.
struct Family {
    outbound: Slot,
    inbound: Slot,
    hbone: Slot,
    own: &'static str,
    server: &'static str,
    client: &'static str,
    loopback: &'static str,
    /// Reached by the tun device.
    tunnelled: &'static str,
}

const V4: Family = Family {
    outbound: Slot::OutboundV4,
    inbound: Slot::InboundV4,
    hbone: Slot::HboneV4,
    own: OWN_V4,
    server: "198.51.100.10",
    client: "192.0.2.7",
    loopback: "127.0.0.1",
    tunnelled: "203.0.113.1",
};
const V6: Family = Family {
    outbound: Slot::OutboundV6,
    inbound: Slot::InboundV6,
    hbone: Slot::HboneV6,
    own: OWN_V6,
    server: "2001:db8::10",
    client: "2001:db8::7",
    loopback: "::1",
    tunnelled: "2001:db8:1::1",
};

#[test]
fn a_captured_connection_tells_the_outbound_listener_where_it_was_going() {
    in_pod(&[V4, V6], |pod, family| {
        let listener = pod.listen(family.outbound);
        let server = at(family.server, 80);
        let app = dial(None, server, MARK_CAPTURED).unwrap();
        let (accepted, peer) = accept(&listener);
        assert_eq!(accepted.local_addr().unwrap(), server);
        assert_eq!(peer, app.local_addr().unwrap().as_socket().unwrap());
        assert_eq!(pod.outcomes.total(Outcome::PickOutbound), 1);
    });
}

#[test]
fn plaintext_from_elsewhere_reaches_the_inbound_listener_in_place_of_the_application() {
    in_pod(&[V4, V6], |pod, family| {
        let app = TcpListener::bind(at(family.own, 0)).unwrap();
        let listener = pod.listen(family.inbound);
        let (client, own) = (at(family.client, 40001), app.local_addr().unwrap());
        let _client = dial(Some(client), own, MARK_DELIVERY).unwrap();
        let (accepted, peer) = accept(&listener);
        assert_eq!((accepted.local_addr().unwrap(), peer), (own, client));
        assert_eq!(pod.outcomes.total(Outcome::PickInbound), 1);
    });
}

#[test]
fn an_exempt_delivery_reaches_the_application_from_the_clients_address() {
    in_pod(&[V4, V6], |pod, family| {
        let app = TcpListener::bind(at(family.own, 0)).unwrap();
        app.set_nonblocking(true).unwrap();
        let _inbound = pod.listen(family.inbound);
        let (client, own) = (at(family.client, 40002), app.local_addr().unwrap());
        exemptions(&mut pod.object).insert(flow(client, own), 1, 0).unwrap();
        let _proxy = dial(Some(client), own, MARK_DELIVERY).unwrap();
        let (accepted, peer) = accept(&app);
        assert_eq!((accepted.local_addr().unwrap(), peer), (own, client));
        assert_eq!(pod.outcomes.total(Outcome::PickExempt), 1);
    });
}

#[test]
fn hbone_reaches_its_listener() {
    in_pod(&[V4, V6], |pod, family| {
        let listener = pod.listen(family.hbone);
        let own = at(family.own, 15008);
        let _peer = dial(Some(at(family.client, 40003)), own, MARK_DELIVERY).unwrap();
        assert_eq!(accept(&listener).0.local_addr().unwrap(), own);
        assert_eq!(pod.outcomes.total(Outcome::PickHbone), 1);
    });
}

#[test]
fn a_pod_reaches_itself() {
    in_pod(&[V4, V6], |pod, family| {
        let app = TcpListener::bind(at(family.own, 0)).unwrap();
        let _inbound = pod.listen(family.inbound);
        app.set_nonblocking(true).unwrap();
        let _client = dial(None, app.local_addr().unwrap(), 0).unwrap();
        accept(&app);
        assert_eq!(pod.outcomes.total(Outcome::PickSelf), 1);
    });
}

#[test]
fn a_pod_reaches_itself_from_loopback() {
    in_pod(&[V4, V6], |pod, family| {
        let app = TcpListener::bind(at(family.own, 0)).unwrap();
        let _inbound = pod.listen(family.inbound);
        app.set_nonblocking(true).unwrap();
        let client =
            Socket::new(Domain::for_address(at(family.own, 0)), Type::STREAM, None).unwrap();
        client.bind(&at(family.loopback, 0).into()).unwrap();
        client.connect(&app.local_addr().unwrap().into()).unwrap();
        assert_eq!(accept(&app).1.ip(), at(family.loopback, 0).ip());
        assert_eq!(pod.outcomes.total(Outcome::PickSelf), 1);
    });
}

#[test]
fn an_empty_slot_refuses_what_is_not_held() {
    in_pod(&[V6], |pod, family| {
        let refused = dial(None, at(family.server, 80), MARK_CAPTURED).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(pod.outcomes.total(Outcome::PickNoListener), 1);
    });
}

#[test]
fn a_held_connection_completes_once_the_listener_is_there() {
    in_pod(&[V6], |pod, family| {
        pod.attach("hold_out", "lo", TcAttachType::Ingress);
        let app = start(None, at(family.server, 80), MARK_CAPTURED).unwrap();
        let held = || pod.outcomes.total(Outcome::HoldOut) > 0;
        until(SOON, "the SYN to be held", || held().then_some(()));
        let listener = pod.listen(family.outbound);
        accept(&listener);
        assert!(app.peer_addr().is_ok());
        assert_eq!(pod.outcomes.total(Outcome::PickNoListener), 0);
    });
}

#[test]
fn a_syn_that_escaped_capture_does_not_leave_the_pod_unless_it_is_the_proxys() {
    // Sockets belong to the cgroup of this process.
    let _here = cgroup::stay();
    in_pod(&[V4, V6], |pod, family| {
        pod.attach("guard", "eth0", TcAttachType::Egress);
        let _app = start(None, at(family.server, 80), 0).unwrap();
        let dropped = || pod.outcomes.total(Outcome::GuardUncaptured) > 0;
        until(SOON, "the SYN to be dropped", || dropped().then_some(()));
        let map = pod.object.map_mut(maps::OWN_CGROUPS).unwrap();
        let mut cgroups: HashMap<_, u64, u8> = map.try_into().unwrap();
        cgroups.insert(cgroup::own_id(), 1, 0).unwrap();
        let _proxy = start(None, at(family.server, 80), 0).unwrap();
        let passed = || pod.outcomes.total(Outcome::GuardOwn) > 0;
        until(SOON, "the SYN to pass", || passed().then_some(()));
    });
}

#[test]
fn a_device_without_ethernet_is_guarded_too() {
    if !Tun::available() {
        return;
    }
    let _here = cgroup::stay();
    in_pod(&[V4, V6], |pod, family| {
        let tun = Tun::new();
        pod.attach("guard", tun::NAME, TcAttachType::Egress);
        let _app = start(None, at(family.tunnelled, 80), 0).unwrap();
        let dropped = || pod.outcomes.total(Outcome::GuardUncaptured) > 0;
        until(SOON, "the SYN to be dropped", || dropped().then_some(()));
        assert_eq!(tun.sent(), 0);
    });
}

#[test]
fn what_comes_by_a_device_without_ethernet_is_held_too() {
    if !Tun::available() {
        return;
    }
    for (name, family) in [("in-v4-syn.hex", V4), ("in-v6-syn.hex", V6)] {
        in_pod(&[family], |pod, _| {
            let tun = Tun::new();
            pod.attach("hold_in", tun::NAME, TcAttachType::Ingress);
            let ethernet = 14;
            tun.receive(&packets::frame_of(name)[ethernet..]);
            let held = || pod.outcomes.total(Outcome::HoldIn) > 0;
            until(SOON, "the SYN to be held", || held().then_some(()));
        });
    }
}

#[test]
fn a_marked_packet_that_lost_its_route_does_not_leave_the_pod() {
    in_pod(&[V4, V6], |pod, family| {
        pod.attach("guard", "eth0", TcAttachType::Egress);
        // An interface takes precedence over the rule for the mark.
        let socket =
            Socket::new(Domain::for_address(at(family.own, 0)), Type::STREAM.nonblocking(), None)
                .unwrap();
        socket.bind_device(Some(b"eth0")).unwrap();
        socket.set_mark(MARK_CAPTURED).unwrap();
        let started = socket.connect(&at(family.server, 80).into()).unwrap_err();
        assert_eq!(started.raw_os_error(), Some(libc::EINPROGRESS));
        let dropped = || pod.outcomes.total(Outcome::GuardRouteLost) > 0;
        until(SOON, "the packet to be dropped", || dropped().then_some(()));
    });
}

/// The object of one pod, with `pick_listener` attached.
struct Pod {
    object: Ebpf,
    outcomes: Outcomes,
    slots: SockMap<MapData>,
}

impl Pod {
    fn attach_here() -> Self {
        let mut object = objects::open("pod");
        let outcomes = Outcomes::of(&mut object);
        own_addresses(&mut object);
        let slots = object.take_map(maps::LISTENERS).unwrap().try_into().unwrap();
        let pick: &mut SkLookup = object.program_mut("pick_listener").unwrap().try_into().unwrap();
        pick.load().unwrap();
        pick.attach(Netns::current().unwrap()).unwrap();
        Self { object, outcomes, slots }
    }

    fn attach(&mut self, program: &str, interface: &str, direction: TcAttachType) {
        qdisc_add_clsact(interface).unwrap();
        let program: &mut SchedClassifier =
            self.object.program_mut(program).unwrap().try_into().unwrap();
        program.load().unwrap();
        let options = TcAttachOptions::Netlink(NlOptions::default());
        program.attach_with_options(interface, direction, options).unwrap();
    }

    fn listen(&mut self, slot: Slot) -> TcpListener {
        let any = match slot {
            Slot::OutboundV4 | Slot::InboundV4 | Slot::HboneV4 | Slot::DnsTcpV4 => at("0.0.0.0", 0),
            Slot::OutboundV6 | Slot::InboundV6 | Slot::HboneV6 | Slot::DnsTcpV6 => at("::", 0),
            Slot::DnsUdpV4 | Slot::DnsUdpV6 => panic!("{slot:?} holds no listener"),
        };
        let options = ListenOptions { transparent: true, reuse_port: false, backlog: 16 };
        let listener = listen(any, options).unwrap();
        self.slots.set(slot as u32, &listener, 0).unwrap();
        listener
    }
}

fn in_pod(families: &[Family], work: impl Fn(&mut Pod, &Family) + Send + Sync) {
    if !objects::available() {
        return;
    }
    for family in families {
        netns::in_new(|| work(&mut Pod::attach_here(), family));
    }
}

/// Connects, from a foreign address if there is one.
fn dial(from: Option<SocketAddr>, to: SocketAddr, mark: u32) -> io::Result<Socket> {
    let socket = start(from, to, mark)?;
    until(SOON, "the connection", || match socket.take_error() {
        Ok(None) => socket.peer_addr().ok().map(|_| Ok(())),
        Ok(Some(error)) | Err(error) => Some(Err(error)),
    })?;
    Ok(socket)
}

fn start(from: Option<SocketAddr>, to: SocketAddr, mark: u32) -> io::Result<Socket> {
    let socket =
        Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_mark(mark)?;
    if let Some(from) = from {
        match from {
            SocketAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
            SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
        }
        socket.bind(&from.into())?;
    }
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    until(SOON, "a connection to accept", || listener.accept().ok())
}

fn at(addr: &str, port: u16) -> SocketAddr {
    SocketAddr::new(addr.parse::<IpAddr>().unwrap(), port)
}
