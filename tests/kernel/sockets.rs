//! Live sockets under the sockops programs, in a network namespace of their own.

use std::{
    fs::{self, File},
    io,
    net::SocketAddr,
    path::PathBuf,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, SkStorage},
    programs::{CgroupAttachMode, CgroupSockAddr, SockOps},
};
use culvert_abi::{Flow, MARK_DELIVERY, Outcome, Pod, PodAddr, maps};
use culvert_sys::netns::Netns;
use culvert_tests::poll::{SOON, until};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::{
    cgroup::Tree,
    lookups::{flow, mapped},
    netns::{self, OWN_V4, OWN_V6},
    objects,
    outcomes::Outcomes,
    settings,
};

/// What a socket is before `connect()`.
struct Dial {
    to: &'static str,
    mark: u32,
    device: Option<&'static str>,
}

const fn dial(to: &'static str, mark: u32) -> Dial {
    Dial { to, mark, device: None }
}

fn check(dial: &Dial, mark: u32, counted: &[&str]) {
    if objects::available() {
        for program in objects::marking_programs() {
            check_under(program, "", dial, mark, counted);
        }
    }
}

fn check_under(program: &str, settings: &str, dial: &Dial, mark: u32, counted: &[&str]) {
    in_pod(program, |steering| {
        steering.enroll();
        settings::set(&mut steering.node, settings);
        steering.tree.enter("app");
        let mut socket = None;
        let got = steering.outcomes.of_work(|| socket = Some(connect(dial)));
        let socket = socket.unwrap();
        let captured = counted == ["mark_connect/marked"];
        let device = dial.device.filter(|_| !captured).map(|name| name.as_bytes().to_vec());
        let case = format!("{program}, to {}", dial.to);
        assert_eq!(got, counted, "{case}");
        assert_eq!(socket.mark().unwrap(), mark, "{case}: SO_MARK");
        assert_eq!(socket.device().unwrap(), device, "{case}: SO_BINDTODEVICE");
    });
}

#[test]
fn ipv4_that_leaves_the_pod_is_marked() {
    check(&dial("198.51.100.10:80", 0), 0x111, &["mark_connect/marked"]);
}

#[test]
fn ipv6_that_leaves_the_pod_is_marked() {
    check(&dial("[2001:db8::10]:80", 0), 0x111, &["mark_connect/marked"]);
}

#[test]
fn ipv4_from_an_ipv6_socket_is_marked() {
    check(&dial("[::ffff:198.51.100.10]:80", 0), 0x111, &["mark_connect/marked"]);
}

#[test]
fn a_mark_of_the_application_is_overwritten_and_the_bits_of_others_are_kept() {
    check(&dial("198.51.100.10:80", 0x8_0539), 0x8_0111, &["mark_connect/marked"]);
    check(&dial("198.51.100.10:80", MARK_DELIVERY), 0x111, &["mark_connect/marked"]);
}

#[test]
fn a_captured_socket_is_unbound_from_its_device() {
    for to in ["198.51.100.10:80", "[2001:db8::10]:80"] {
        let dial = Dial { to, mark: 0, device: Some("eth0") };
        check(&dial, 0x111, &["mark_connect/marked"]);
    }
}

#[test]
fn a_local_socket_stays_bound_to_its_device() {
    let dial = Dial { to: "10.0.0.7:9", mark: 0, device: Some("eth0") };
    check(&dial, 0, &["mark_connect/local"]);
}

#[test]
fn a_pods_own_addresses_are_local_in_every_spelling() {
    for to in ["10.0.0.7:9", "[fd00::7]:9", "[::ffff:10.0.0.7]:9"] {
        check(&dial(to, 0), 0, &["mark_connect/local"]);
    }
}

#[test]
fn loopback_is_local_in_every_spelling() {
    for to in ["127.0.0.1:9", "127.9.9.9:9", "[::1]:9", "[::ffff:127.0.0.1]:9"] {
        check(&dial(to, 0), 0, &["mark_connect/local"]);
    }
}

#[test]
fn a_stale_capture_mark_is_cleared_for_a_local_destination() {
    for to in ["10.0.0.7:9", "[fd00::7]:9", "[::ffff:10.0.0.7]:9"] {
        check(&dial(to, 0x8_0111), 0x8_0000, &["mark_connect/cleared"]);
    }
}

#[test]
fn what_the_pod_excludes_is_neither_marked_nor_unbound() {
    if !objects::available() {
        return;
    }
    let excluded: &[&str] = &["mark_connect/excluded"];
    let marked: &[&str] = &["mark_connect/marked"];
    let (v4, mapped, v6) = ("198.51.100.10:80", "[::ffff:198.51.100.10]:80", "[2001:db8::10]:80");
    for program in objects::marking_programs() {
        for (settings, to, counted) in [
            ("outbound-port:80", v4, excluded),
            ("outbound-port:80", v6, excluded),
            ("outbound-port:81,inbound-port:80,bypass-inbound", v4, marked),
            ("network:198.51.100.0/24", v4, excluded),
            ("network:198.51.100.0/24", mapped, excluded),
            ("network:198.51.101.0/24", v4, marked),
            ("network:0.0.0.0/0", v4, excluded),
            ("network:0.0.0.0/0", v6, marked),
            ("network:2001-db8--/32", v6, excluded),
            ("network:--/0,network:!--ffff-0-0/96", v6, excluded),
            ("network:--/0,network:!--ffff-0-0/96", v4, marked),
            ("own-address", v4, excluded),
            ("own-address", v6, excluded),
            ("interface:2", v4, marked),
        ] {
            let mark = if counted == excluded { 0 } else { 0x111 };
            for (before, device) in [(0, None), (0x111, Some("eth0"))] {
                check_under(program, settings, &Dial { to, mark: before, device }, mark, counted);
            }
        }
    }
}

#[test]
fn a_forged_delivery_mark_exempts_nothing() {
    check(&dial("10.0.0.7:9", MARK_DELIVERY), MARK_DELIVERY, &["mark_connect/local"]);
}

#[test]
fn a_socket_that_was_captured_is_released_when_it_connects_to_the_pod() {
    if !objects::available() {
        return;
    }
    for program in objects::marking_programs() {
        in_enrolled_pod(program, |steering| {
            steering.tree.enter("app");
            let listener = std::net::TcpListener::bind((OWN_V6, 0)).unwrap();
            let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).unwrap();
            // Marked, hence routed to `lo`, where nobody listens.
            let refused = socket.connect(&addr("[2001:db8::10]:9")).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused, "{program}");
            assert_eq!(socket.mark().unwrap(), 0x111, "{program}");
            socket.connect(&listener.local_addr().unwrap().into()).unwrap();
            assert_eq!(socket.mark().unwrap(), 0, "{program}");
        });
    }
}

#[test]
fn pods_that_are_not_enrolled_are_neither_marked_nor_counted() {
    if !objects::available() {
        return;
    }
    for program in objects::marking_programs() {
        in_pod(program, |steering| {
            steering.tree.enter("app");
            let counted = steering.outcomes.of_work(|| {
                assert_eq!(connect(&dial("198.51.100.10:80", 0)).mark().unwrap(), 0, "{program}");
            });
            assert!(counted.is_empty(), "{program}: {counted:?}");
        });
    }
}

#[test]
fn sockets_are_noted_in_pods_and_where_user_space_asks() {
    if !objects::available() {
        return;
    }
    in_pod("mark_noted", |steering| {
        let told = [OWN_V4, OWN_V6].map(|own| steering.cookie_told(own));
        assert_eq!(told[0], told[1]);
        if let Some(cookie) = Netns::current().unwrap().cookie().unwrap() {
            assert_eq!(told[0], cookie);
        }
        let noted = |steering: &Steering, socket: &Socket| {
            let map = steering.node.map(maps::NOTED).unwrap();
            let noted: SkStorage<_, u64> = map.try_into().unwrap();
            noted.get(socket, 0).ok()
        };
        let to = ["198.51.100.10:80", "[2001:db8::10]:80", "[::ffff:198.51.100.10]:80"];
        for to in to {
            assert_eq!(noted(steering, &connect(&dial(to, 0))), None, "{to}, not enrolled");
        }
        steering.enroll();
        for to in to {
            assert_eq!(noted(steering, &connect(&dial(to, 0))), Some(told[0]), "{to}");
            let datagrams = Socket::new(addr(to).domain(), Type::DGRAM, None).unwrap();
            datagrams.connect(&addr(to)).unwrap();
            assert_eq!(noted(steering, &datagrams), None, "{to}, UDP");
        }
    });
}

#[test]
fn the_proxys_cgroup_is_asked_before_its_parent() {
    if !objects::available() {
        return;
    }
    for program in objects::marking_programs() {
        in_enrolled_pod(program, |steering| {
            steering.tree.enter("proxy");
            for to in ["198.51.100.10:80", "[2001:db8::10]:80"] {
                let counted = steering.outcomes.of_work(|| {
                    assert_eq!(connect(&dial(to, 0)).mark().unwrap(), 0, "{program}");
                });
                assert_eq!(counted, ["mark_connect/own", "mark_own/tagged"], "{program}");
            }
        });
    }
}

#[test]
fn a_delivery_is_exempt_from_its_first_packet_until_it_closes() {
    if !objects::available() {
        return;
    }
    for own in [OWN_V4, OWN_V6] {
        in_enrolled_pod("mark_noted", |steering| {
            steering.tree.enter("proxy");
            let listener = std::net::TcpListener::bind((own, 0)).unwrap();
            let local = listener.local_addr().unwrap();
            let mut delivery = None;
            let counted = steering.outcomes.of_work(|| {
                let socket = Socket::new(Domain::for_address(local), Type::STREAM, None).unwrap();
                socket.set_mark(MARK_DELIVERY).unwrap();
                socket.connect(&local.into()).unwrap();
                delivery = Some(socket);
            });
            assert_eq!(counted, ["mark_connect/own", "mark_own/tagged", "mark_own/exempted"]);
            let delivery = delivery.unwrap();
            let remote = delivery.local_addr().unwrap().as_socket().unwrap();
            let flow = flow(remote, local);
            assert_eq!(steering.exemptions(), [flow]);
            drop(delivery);
            drop(listener);
            let outcomes = &steering.outcomes;
            until(SOON, "the release", || {
                (outcomes.total(Outcome::OwnReleased) == 1).then_some(())
            });
            assert_eq!(steering.exemptions(), []);
        });
    }
}

#[test]
fn a_probe_of_an_enrolled_pod_is_exempt_until_it_closes() {
    if !objects::available() {
        return;
    }
    for own in [OWN_V4, OWN_V6] {
        in_enrolled_pod("mark_noted", |steering| {
            steering.tree.enter("kubelet");
            let listener = std::net::TcpListener::bind((own, 0)).unwrap();
            let local = listener.local_addr().unwrap();
            let mut probe = None;
            let counted = steering.outcomes.of_work(|| {
                let socket = Socket::new(Domain::for_address(local), Type::STREAM, None).unwrap();
                socket.connect(&local.into()).unwrap();
                probe = Some(socket);
            });
            // It comes from the pod's own address here, so that it is also seen as the pod's.
            assert_eq!(counted, ["mark_connect/local", "mark_probe/exempted"]);
            let probe = probe.unwrap();
            let remote = probe.local_addr().unwrap().as_socket().unwrap();
            assert_eq!(steering.exemptions(), [flow(remote, local)]);
            drop(probe);
            drop(listener);
            let outcomes = &steering.outcomes;
            until(SOON, "the release", || {
                (outcomes.total(Outcome::ProbeReleased) == 1).then_some(())
            });
            assert_eq!(steering.exemptions(), []);
        });
    }
}

#[test]
fn what_else_kubelet_dials_takes_no_room() {
    if !objects::available() {
        return;
    }
    in_enrolled_pod("mark_noted", |steering| {
        steering.tree.enter("kubelet");
        let counted = steering.outcomes.of_work(|| {
            drop(connect(&dial("127.0.0.1:9", 0)));
            drop(connect(&dial("[::1]:9", 0)));
        });
        // By the marking program alone, which takes kubelet for one of this pod here.
        assert_eq!(counted, ["mark_connect/local", "mark_connect/local"]);
        assert_eq!(steering.exemptions(), []);
    });
}

/// The proxy's side of a connection to the pod has the application's port, and lives on when the application stops.
#[test]
fn a_port_that_proxied_connections_hold_can_be_bound_again_by_tcp_of_enrolled_pods_alone() {
    if !objects::available() || !objects::is_for_this_kernel("reuse_bind4") {
        return;
    }
    for own in [OWN_V4, OWN_V6] {
        for enrolled in [true, false] {
            in_pod("mark_connect", |steering| {
                if enrolled {
                    steering.enroll();
                }
                steering.attach_reuse();
                steering.tree.enter("proxy");
                let to = SocketAddr::new(own.parse().unwrap(), 8080);
                let plain = |kind| Socket::new(Domain::for_address(to), kind, None).unwrap();
                // As the proxy's listeners are.
                let listener = plain(Type::STREAM);
                listener.set_reuse_address(true).unwrap();
                listener.bind(&to.into()).unwrap();
                listener.listen(1).unwrap();
                let client = plain(Type::STREAM);
                client.connect(&to.into()).unwrap();
                let _held = listener.accept().unwrap();
                drop(listener);
                steering.tree.enter("app");
                let app = plain(Type::STREAM);
                let bound = app.bind(&to.into()).map_err(|error| error.kind());
                let wanted = if enrolled { Ok(()) } else { Err(io::ErrorKind::AddrInUse) };
                assert_eq!(bound, wanted, "{to}, enrolled: {enrolled}");
                assert_eq!(app.reuse_address().unwrap(), enrolled);
                let anywhere = plain(Type::STREAM);
                anywhere.bind(&SocketAddr::new(to.ip(), 0).into()).unwrap();
                assert!(!anywhere.reuse_address().unwrap(), "any port is free as it is");
                let datagrams = plain(Type::DGRAM);
                datagrams.bind(&to.into()).unwrap();
                assert!(!datagrams.reuse_address().unwrap(), "UDP is left alone");
                if enrolled {
                    app.listen(1).unwrap();
                    let second = plain(Type::STREAM).bind(&to.into()).map_err(|error| error.kind());
                    assert_eq!(second, Err(io::ErrorKind::AddrInUse), "{to}: two applications");
                }
            });
        }
    }
}

/// The programs attached to a tree of cgroups, and their maps.
struct Steering {
    outcomes: Outcomes,
    node: Ebpf,
    exempt: Ebpf,
    _pins: Pins,
    /// Last, because the next test's turn comes when it is dropped.
    tree: Tree,
}

impl Steering {
    fn attach(program: &str) -> Self {
        let tree = Tree::new();
        let pins = Pins::new();
        let mut node = objects::open_with(pins.loader("node"), "node");
        let mut exempt = objects::open_with(pins.loader("exempt"), "exempt");
        attach(&mut exempt, "mark_own", &tree.child("proxy"));
        attach(&mut exempt, "mark_probe", &tree.child("kubelet"));
        attach(&mut node, program, tree.top());
        if program == "mark_noted" {
            attach_to_addresses(&mut node, ["note_netns4", "note_netns6"], tree.top());
        }
        let outcomes = Outcomes::of(&mut node);
        Self { outcomes, node, exempt, _pins: pins, tree }
    }

    fn enroll(&mut self) {
        let cookie = Netns::current().unwrap().cookie().unwrap();
        let pod = Pod { id: objects::POD_ID };
        for own in [OWN_V4, OWN_V6] {
            let addr = mapped(own.parse().unwrap());
            insert(&mut self.node, maps::ADDRS, PodAddr { pod: pod.id, addr }, 1_u8);
            insert(&mut self.exempt, maps::PODS_BY_ADDR, addr, pod);
        }
        let cookie = cookie.unwrap_or_else(|| self.cookie_told(OWN_V4));
        insert(&mut self.node, maps::PODS, cookie, pod);
    }

    /// The cookie of this namespace, by the programs that note it.
    fn cookie_told(&mut self, to: &str) -> u64 {
        self.tree.enter("app");
        let to: SocketAddr = SocketAddr::new(to.parse().unwrap(), 9);
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None).unwrap();
        let map = self.node.map_mut(maps::NOTED).unwrap();
        let mut noted: SkStorage<_, u64> = map.try_into().unwrap();
        noted.insert(&socket, 0, 0).unwrap();
        socket.connect(&to.into()).unwrap();
        noted.get(&socket, 0).unwrap()
    }

    fn attach_reuse(&mut self) {
        attach_to_addresses(&mut self.node, ["reuse_bind4", "reuse_bind6"], self.tree.top());
    }

    fn exemptions(&self) -> Vec<Flow> {
        let map: HashMap<_, Flow, u8> = self.exempt.map(maps::EXEMPT).unwrap().try_into().unwrap();
        map.keys().map(Result::unwrap).collect()
    }
}

fn attach(object: &mut Ebpf, program: &str, cgroup: &std::path::Path) {
    let program: &mut SockOps = object.program_mut(program).unwrap().try_into().unwrap();
    program.load().unwrap();
    program.attach(File::open(cgroup).unwrap(), CgroupAttachMode::Single).unwrap();
}

fn attach_to_addresses(object: &mut Ebpf, programs: [&str; 2], cgroup: &std::path::Path) {
    for name in programs {
        let program: &mut CgroupSockAddr = object.program_mut(name).unwrap().try_into().unwrap();
        program.load().unwrap();
        program.attach(File::open(cgroup).unwrap(), CgroupAttachMode::Single).unwrap();
    }
}

fn insert<K: aya::Pod, V: aya::Pod>(object: &mut Ebpf, map: &str, key: K, value: V) {
    let mut map: HashMap<_, K, V> = object.map_mut(map).unwrap().try_into().unwrap();
    map.insert(key, value, 0).unwrap();
}

/// Where the maps that objects share are pinned; removed when dropped.
struct Pins(PathBuf);

impl Pins {
    fn new() -> Self {
        // Tests that steer take turns, so one folder a process is enough.
        let folder =
            PathBuf::from(format!("/sys/fs/bpf/culvert-kernel-test-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn loader(&self, object: &str) -> EbpfLoader<'static> {
        let mut loader = objects::loader(object);
        for map in [maps::OWN, maps::OUTCOMES, maps::EXEMPT, maps::PODS_BY_ADDR] {
            loader.map_pin_path(map, self.0.join(map));
        }
        loader
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            println!("{} stays behind: {error}", self.0.display());
        }
    }
}

fn in_enrolled_pod(program: &str, work: impl FnOnce(&Steering) + Send) {
    in_pod(program, |steering| {
        steering.enroll();
        work(steering);
    });
}

fn in_pod(program: &str, work: impl FnOnce(&mut Steering) + Send) {
    netns::in_new(|| work(&mut Steering::attach(program)));
}

/// Starts to connect; whether anybody answers is no matter.
fn connect(dial: &Dial) -> Socket {
    let to = addr(dial.to);
    let socket = Socket::new(to.domain(), Type::STREAM.nonblocking(), Some(Protocol::TCP)).unwrap();
    socket.set_mark(dial.mark).unwrap();
    socket.bind_device(dial.device.map(str::as_bytes)).unwrap();
    match socket.connect(&to) {
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::ECONNREFUSED)) =>
        {
            socket
        }
        other => panic!("connect to {}: {other:?}", dial.to),
    }
}

fn addr(text: &str) -> SockAddr {
    text.parse::<SocketAddr>().unwrap().into()
}
