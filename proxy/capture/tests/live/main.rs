//! Capture on this machine's kernel: a pod in a network namespace of its own, another host behind a veth pair, and an
//! application in a process of its own, since what the proxy's cgroup connects is never captured.

#![forbid(unsafe_code)]
#![expect(
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "what fails here fails a test, and a skip is printed"
)]

mod app;
mod dns;
mod settings;
mod world;

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use culvert_capture::{BpfLog, CaptureError, Node, NodeOptions, Pod, Role, Seat, cleanup};
use culvert_sys::{
    chain::Hook,
    netns::Netns,
    socket::{StreamOptions, stream},
};

use crate::world::{
    BPFFS, LATER, Namespace, OUTSIDE_V4, OwnCgroup, POD_V4, POD_V6, SOON, World, eventually,
    eventually_ok, have_tcx, links, output, run, state, without_ids,
};

/// Beyond the outside, reached by the pod's default route.
const FAR_V4: &str = "192.0.2.7:80";
const FAR_V6: &str = "[2001:db8::7]:80";

#[test]
fn outbound_connections_arrive_with_their_destination() {
    let Some(mut world) = World::new("out") else { return };
    let node = world.start();
    let mut pod = world.enroll(&node);
    let listeners = pod.take_listeners();
    for (dst, own) in [(FAR_V4, POD_V4), (FAR_V6, POD_V6)] {
        let app = world.app.connect(&world.pod, dst);
        let captured = world.accept(&listeners, Role::Outbound, dst);
        assert_eq!(captured.orig_dst, dst.parse().unwrap());
        assert_eq!(captured.peer.ip(), own.parse::<IpAddr>().unwrap());
        assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
        assert!(pod.addresses().owns(captured.peer.ip()));
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn inbound_connections_arrive_by_port() {
    let Some(mut world) = World::new("in") else { return };
    let node = world.start();
    let mut pod = world.enroll(&node);
    let listeners = pod.take_listeners();
    let table = [
        (format!("{POD_V4}:8080"), Role::Inbound),
        (format!("[{POD_V6}]:8080"), Role::Inbound),
        (format!("{POD_V4}:15008"), Role::Hbone),
        (format!("[{POD_V6}]:15008"), Role::Hbone),
    ];
    for (dst, role) in table {
        let app = world.app.connect(&world.outside, &dst);
        let captured = world.accept(&listeners, role, &dst);
        assert_eq!(captured.orig_dst, dst.parse().unwrap());
        assert!(!pod.addresses().owns(captured.peer.ip()), "{dst}");
        assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn a_delivery_from_the_clients_address_reaches_the_application() {
    let Some(mut world) = World::new("deliver") else { return };
    let node = world.start();
    let mut pod = world.enroll(&node);
    let listeners = pod.take_listeners();
    for dst in [format!("{POD_V4}:8080"), format!("[{POD_V6}]:8080")] {
        world.app.serve(&world.pod, &dst);
        let app = world.app.connect(&world.outside, &dst);
        let captured = world.accept(&listeners, Role::Inbound, &dst);
        assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
        let options = StreamOptions {
            mark: Some(culvert_abi::MARK_DELIVERY),
            source: Some(SocketAddr::new(captured.peer.ip(), 0)),
        };
        let socket = pod.netns().run(|| stream(captured.orig_dst, options)).unwrap().unwrap();
        socket.set_nonblocking(false).unwrap();
        socket.connect_timeout(&captured.orig_dst.into(), SOON).unwrap();
    }
    // A closed port refuses, and its reset finds the proxy rather than the client.
    let options = StreamOptions {
        mark: Some(culvert_abi::MARK_DELIVERY),
        source: Some(SocketAddr::new(OUTSIDE_V4.parse().unwrap(), 0)),
    };
    let closed: SocketAddr = format!("{POD_V4}:9").parse().unwrap();
    let socket = pod.netns().run(|| stream(closed, options)).unwrap().unwrap();
    let error = socket.connect_timeout(&closed.into(), SOON).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn a_failure_at_the_last_step_undoes_all_before_it() {
    if have_tcx() {
        println!("skipped: by a tcx link `guard` finds a place in spite of any filter");
        return;
    }
    let Some(world) = World::new("undo") else { return };
    let netns = &world.pod;
    run(&format!("tc -n {netns} qdisc add dev eth0 clsact"));
    // At our priority, so that `guard` finds no place.
    run(&format!(
        "tc -n {netns} filter add dev eth0 egress pref 11 protocol all u32 match u32 0 0"
    ));
    let before = world.state();
    let node = world.start();
    let started = world.pins();
    let error = world.try_enroll(&node, &netns.netns()).unwrap_err();
    assert!(error.to_string().starts_with("attach guard to eth0"), "{error}");
    assert_eq!(world.state(), before);
    assert_eq!(world.pins(), started);
    node.dismantle().unwrap();
}

#[test]
fn a_restart_in_another_cgroup_is_known_as_ours() {
    let Some(world) = World::new("moved") else { return };
    drop(world.start());
    let moved = OwnCgroup::enter(&format!("{}-2", world.name));
    // Start checks it, by a connection of its own.
    let node = world.start_as(&NodeOptions { own_cgroup: moved.path.clone(), ..world.options() });
    node.dismantle().unwrap();
}

#[test]
fn a_pod_reaches_itself_without_the_proxy() {
    let Some(mut world) = World::new("self") else { return };
    let node = world.start();
    let pod = world.enroll(&node);
    for dst in [format!("{POD_V4}:7070"), format!("[{POD_V6}]:7070"), "127.0.0.1:7070".into()] {
        world.app.serve(&world.pod, &dst);
        let app = world.app.connect(&world.pod, &dst);
        assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn un_enrolment_leaves_no_trace() {
    let Some(world) = World::new("trace") else { return };
    let before = world.state();
    let node = world.start();
    let started = world.pins();
    for _ in 0..2 {
        let pod = world.enroll(&node);
        assert_ne!(world.state(), before);
        node.unenroll(pod).unwrap();
        assert_eq!(world.state(), before);
        assert_eq!(world.pins(), started);
    }
    node.dismantle().unwrap();
    assert_eq!(world.pins(), Vec::<PathBuf>::new());
}

#[test]
fn captured_connections_outlive_the_withdrawal() {
    let Some(mut world) = World::new("drain") else { return };
    let node = world.start();
    let mut pod = world.enroll(&node);
    let listeners = pod.take_listeners();
    let app = world.app.connect(&world.pod, FAR_V4);
    let captured = world.accept(&listeners, Role::Outbound, FAR_V4);
    assert_eq!(world.app.wait(app, SOON), format!("connected {FAR_V4}"));
    node.withdraw(&pod).unwrap();
    world.write(captured, b"x");
    assert_eq!(world.app.wait(app, SOON), "read x");
    // A new one goes where it would go without us.
    let dst = format!("{OUTSIDE_V4}:8080");
    world.app.serve(&world.outside, &dst);
    let app = world.app.connect(&world.pod, &dst);
    assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn foreign_filters_and_qdiscs_stay() {
    let Some(world) = World::new("foreign") else { return };
    let pod_netns = &world.pod;
    run(&format!("tc -n {pod_netns} qdisc add dev eth0 clsact"));
    run(&format!(
        "tc -n {pod_netns} filter add dev eth0 egress pref 7 protocol all u32 match u32 0 0"
    ));
    let before = world.state();
    let node = world.start();
    let pod = world.enroll(&node);
    node.unenroll(pod).unwrap();
    assert_eq!(world.state(), before);
    node.dismantle().unwrap();
}

#[test]
fn an_ingress_qdisc_is_no_place_for_a_guard_that_is_a_filter() {
    let Some(world) = World::new("ingress") else { return };
    run(&format!("tc -n {} qdisc add dev eth0 ingress", world.pod));
    let before = world.state();
    let node = world.start();
    let started = world.pins();
    match world.try_enroll(&node, &world.pod.netns()) {
        Ok(pod) if have_tcx() => node.unenroll(pod).unwrap(),
        refused => {
            let error = refused.unwrap_err().to_string();
            assert_eq!(error.split(" in ").next(), Some("add a clsact qdisc to eth0"));
        }
    }
    assert_eq!(world.state(), before);
    assert_eq!(world.pins(), started);
    node.dismantle().unwrap();
}

#[test]
fn connections_are_held_while_the_proxy_is_gone() {
    let Some(mut world) = World::new("held") else { return };
    let node = world.start();
    let pod = world.enroll(&node);
    drop(pod);
    drop(node);
    let inbound_v4 = format!("{POD_V4}:8080");
    let inbound_v6 = format!("[{POD_V6}]:15008");
    let calls = [
        (FAR_V4, Role::Outbound, world.app.connect(&world.pod, FAR_V4)),
        (FAR_V6, Role::Outbound, world.app.connect(&world.pod, FAR_V6)),
        (&inbound_v4, Role::Inbound, world.app.connect(&world.outside, &inbound_v4)),
        (&inbound_v6, Role::Hbone, world.app.connect(&world.outside, &inbound_v6)),
    ];
    // Refusal or success would be known by now.
    world.app.expect_silence(Duration::from_millis(500));

    let node = world.start();
    let mut pod = world.enroll(&node);
    let listeners = pod.take_listeners();
    for (dst, role, app) in calls {
        assert_eq!(world.app.wait(app, LATER), format!("connected {dst}"));
        assert_eq!(world.accept(&listeners, role, dst).orig_dst, dst.parse().unwrap());
    }
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn a_restart_adopts_the_pod_and_leaves_one_filter_a_hook() {
    let Some(mut world) = World::new("adopt") else { return };
    let before = world.state();
    let node = world.start();
    let first = world.enroll(&node);
    let enrolled = world.state();
    drop(first);
    drop(node);
    let node = world.start();
    let mut pod = world.enroll(&node);
    assert_eq!(without_ids(world.state()), without_ids(enrolled));
    let listeners = pod.take_listeners();
    let app = world.app.connect(&world.pod, FAR_V4);
    world.accept(&listeners, Role::Outbound, FAR_V4);
    assert_eq!(world.app.wait(app, SOON), format!("connected {FAR_V4}"));
    node.unenroll(pod).unwrap();
    assert_eq!(world.state(), before);
    node.dismantle().unwrap();
}

#[test]
fn cleanup_finds_what_a_dead_process_left() {
    let Some(world) = World::new("clean") else { return };
    let before = world.state();
    let node = world.start();
    let pod = world.enroll(&node);
    let error = cleanup(Path::new(BPFFS), &world.name).unwrap_err();
    let me = Some(std::process::id());
    assert!(matches!(&error, CaptureError::Busy { holder, .. } if *holder == me), "{error}");
    drop(pod);
    drop(node);
    assert_eq!(cleanup(Path::new(BPFFS), &world.name).unwrap(), 1);
    assert_eq!(world.state(), before);
    assert_eq!(world.pins(), Vec::<PathBuf>::new());
}

#[test]
fn two_processes_hold_a_node_and_a_third_is_refused() {
    let Some(world) = World::new("seats") else { return };
    let (elder, me) = (world.seat(), Some(std::process::id()));
    assert_eq!(elder.elder(), None);
    let newer = world.seat();
    assert_eq!(newer.elder().map(|of| (of.seat, of.pid)), Some((elder.number(), me)));
    let error = Seat::take(Path::new(BPFFS), &world.name).unwrap_err();
    assert!(matches!(&error, CaptureError::Full { holders, .. } if holders.len() == 2), "{error}");
    drop(elder);
    assert_eq!(world.seat().elder().map(|of| of.seat), Some(newer.number()));
    newer.leave();
    world.seat().leave();
    assert_eq!(cleanup(Path::new(BPFFS), &world.name).unwrap(), 0);
    assert_eq!(world.pins(), Vec::<PathBuf>::new());
}

#[test]
fn a_pod_passes_to_a_newer_process_and_back_when_that_is_gone() {
    let Some(mut world) = World::new("hand") else { return };
    let elder = world.start();
    let mut pod = world.enroll(&elder);
    let (capture, listeners, dns) = (pod.capture(), pod.take_listeners(), pod.take_dns());
    let enrolled = world.state();
    capture.release();
    let newer = world.start();
    let mut taken = world.enroll(&newer);
    let newer_listeners = taken.take_listeners();
    assert_eq!(without_ids(world.state()), without_ids(enrolled.clone()));
    assert_eq!(elder.refill(&capture).unwrap(), 0, "slots that are another's are not empty");
    for dst in [FAR_V4, FAR_V6] {
        let app = world.app.connect(&world.pod, dst);
        world.accept(&newer_listeners, Role::Outbound, dst);
        assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
    }
    assert!(!newer.hold_alone());
    drop((newer_listeners, taken, newer));
    let sockets = listeners.len() + dns.listeners.len() + dns.queries.len();
    assert_eq!(elder.refill(&capture).unwrap(), sockets);
    elder.reclaim().unwrap();
    assert!(elder.reclaim_pod(&capture).unwrap());
    assert!(elder.sweep_seats().unwrap());
    assert_eq!(world.state(), enrolled);
    for dst in [FAR_V4, FAR_V6] {
        let app = world.app.connect(&world.pod, dst);
        world.accept(&listeners, Role::Outbound, dst);
        assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
    }
    let own: Vec<_> =
        world.pins().into_iter().filter(|pin| pin.to_string_lossy().contains("mark_own")).collect();
    assert_eq!(own.len(), 1, "{own:?}");
    assert!(elder.hold_alone());
    elder.unenroll(pod).unwrap();
    assert!(!elder.reclaim_pod(&capture).unwrap());
    elder.dismantle().unwrap();
    assert_eq!(world.pins(), Vec::<PathBuf>::new());
}

#[test]
fn pods_that_are_kept_no_more_are_swept() {
    let Some(world) = World::new("sweep") else { return };
    let before = world.state();
    let node = world.start();
    let id = world.enroll(&node).id();
    node.sweep(&[id]).unwrap();
    assert_ne!(world.state(), before);
    node.sweep(&[]).unwrap();
    assert_eq!(world.state(), before);
    node.dismantle().unwrap();
}

#[test]
fn a_pod_that_died_while_nobody_looked_is_swept() {
    let Some(world) = World::new("dead") else { return };
    let node = world.start();
    let started = world.pins();
    let mortal = Namespace::new(&format!("{}-mortal", world.name));
    run(&format!("ip -n {mortal} link add eth0 type veth peer name eth1"));
    run(&format!("ip -n {mortal} addr add {POD_V4}/24 dev eth0"));
    drop(world.try_enroll(&node, &mortal.netns()).unwrap());
    drop(node);
    drop(mortal);
    let node = world.start();
    // Its address is free again, too.
    let heir = eventually_ok("the address is free", || world.try_enroll(&node, &world.pod.netns()));
    node.sweep(&[heir.id()]).unwrap();
    node.unenroll(heir).unwrap();
    assert_eq!(world.pins(), started);
    node.dismantle().unwrap();
}

#[test]
fn addresses_that_come_later_are_followed() {
    let Some(mut world) = World::new("later") else { return };
    let node = world.start();
    let mut pod = world.enroll(&node);
    let watch = pod.take_watch().unwrap();
    let watching = world.runtime.handle().clone();
    let task = watching.spawn(watch.run());
    let addresses = pod.addresses();
    let pod_netns = world.pod.clone();
    let outside = world.outside.clone();
    run(&format!("ip -n {pod_netns} link add eth1 type veth peer name eth2"));
    run(&format!("ip -n {pod_netns} link set eth1 up"));
    run(&format!("ip -n {pod_netns} addr add 10.92.0.5/24 dev eth1"));
    run(&format!("ip -n {outside} route add 10.92.0.5 via {POD_V4}"));
    let new: IpAddr = "10.92.0.5".parse().unwrap();
    eventually("the new address is the pod's", || addresses.owns(new));
    eventually("the new interface is guarded", || {
        pod_netns.netns().run(|| links("eth1", Hook::Egress).len()).unwrap() == 1
            || output(&format!("tc -n {pod_netns} filter show dev eth1 egress")).contains("guard")
    });
    let listeners = pod.take_listeners();
    let app = world.app.connect(&world.outside, "10.92.0.5:8080");
    world.accept(&listeners, Role::Inbound, "10.92.0.5:8080");
    assert_eq!(world.app.wait(app, SOON), "connected 10.92.0.5:8080");
    run(&format!("ip -n {pod_netns} addr del 10.92.0.5/24 dev eth1"));
    eventually("the address is the pod's no more", || !addresses.owns(new));
    task.abort();
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn what_others_remove_is_put_back() {
    let Some(world) = World::new("heal") else { return };
    let node = world.start();
    let mut pod = world.enroll(&node);
    let task = world.runtime.handle().clone().spawn(pod.take_watch().unwrap().run());
    let enrolled = world.state();
    let netns = &world.pod;
    for table in ["", "-6 "] {
        run(&format!("ip -n {netns} {table}rule del fwmark 0x111/0xfff"));
        run(&format!("ip -n {netns} {table}route flush table 1111"));
    }
    if have_tcx() {
        world.detach_link(pod.id(), "eth0", "guard");
        world.detach_link(pod.id(), "lo", "hold_out");
    } else {
        run(&format!("tc -n {netns} filter del dev eth0 egress pref 11"));
        run(&format!("tc -n {netns} qdisc del dev lo clsact"));
    }
    eventually("all is as it was", || world.state() == enrolled);
    // What the kernel announces to nobody.
    for (sysctl, value) in [("tcp_fwmark_accept", "0"), ("conf/lo/accept_local", "0")] {
        let path = Path::new("/proc/sys/net/ipv4").join(sysctl);
        netns.netns().run(|| fs::write(path, value)).unwrap().unwrap();
    }
    world.detach_lookup(pod.id());
    run(&format!("ip -n {netns} route replace default dev eth0 table 1111"));
    eventually("all is as it was again", || {
        world.state() == enrolled && world.has_lookup(pod.id())
    });
    let repairs = node.repairs();
    for (kind, at_least) in [
        ("rule", 2),
        ("route", 3),
        ("qdisc", u64::from(!have_tcx())),
        ("filter", 2),
        ("sysctl", 2),
        ("sk_lookup", 1),
    ] {
        let count = repairs.iter().find(|(name, _)| *name == kind).map(|(_, count)| *count);
        assert!(count >= Some(at_least), "{kind}: {repairs:?}");
    }
    task.abort();
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn two_pods_cannot_have_one_address() {
    let Some(world) = World::new("twice") else { return };
    let node = world.start();
    let pod = world.enroll(&node);
    let twin = Namespace::new(&format!("{}-twin", world.name));
    run(&format!("ip -n {twin} link add eth0 type veth peer name eth1"));
    run(&format!("ip -n {twin} addr add 10.91.0.6/24 dev eth0"));
    run(&format!("ip -n {twin} addr add {POD_V4}/32 dev eth0"));
    let refused = || {
        let before = state(&twin.netns());
        let error = world.try_enroll(&node, &twin.netns()).unwrap_err();
        assert!(matches!(error, CaptureError::AddressTaken { .. }), "{error}");
        assert_eq!(state(&twin.netns()), before);
    };
    // As one address of several, and as its only one.
    refused();
    run(&format!("ip -n {twin} addr del 10.91.0.6/24 dev eth0"));
    refused();
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn bridges_inside_pods_may_repeat_an_address() {
    let Some(world) = World::new("bridge") else { return };
    let twin = Namespace::new(&format!("{}-twin", world.name));
    run(&format!("ip -n {twin} link add eth0 type veth peer name eth1"));
    run(&format!("ip -n {twin} addr add 10.91.0.6/24 dev eth0"));
    for netns in [&world.pod, &twin] {
        run(&format!("ip -n {netns} link add docker0 type bridge"));
        run(&format!("ip -n {netns} addr add 172.17.0.1/16 dev docker0"));
    }
    let node = world.start();
    let pods = [world.enroll(&node), world.try_enroll(&node, &twin.netns()).unwrap()];
    // Probes are known by address alone: it stays the first pod's for as long as that has it.
    let holder = || world.holder("172.17.0.1");
    assert_eq!(holder(), Some(pods[0].id()));
    let [mut first, mut second] = pods;
    let watches = [&mut first, &mut second]
        .map(|pod| world.runtime.handle().clone().spawn(pod.take_watch().unwrap().run()));
    run(&format!("ip -n {} link del docker0", world.pod));
    eventually("the address is the other's", || holder() == Some(second.id()));
    for watch in watches {
        watch.abort();
    }
    for pod in [first, second] {
        node.unenroll(pod).unwrap();
    }
    assert_eq!(holder(), None);
    node.dismantle().unwrap();
}

#[test]
fn a_pod_that_cannot_be_removed_does_not_keep_the_others() {
    let Some(world) = World::new("others") else { return };
    let before = world.state();
    let node = world.start();
    drop(world.enroll(&node));
    // Pods of lower and of higher numbers, whose folders hold what no removal expects.
    let pods = world.version().join("pods");
    let odd = ["1", "4294967294"].map(|id| pods.join(id).join("unknown"));
    for path in &odd {
        fs::create_dir_all(path).unwrap();
    }
    node.sweep(&[]).unwrap_err();
    assert_eq!(world.state(), before);
    for path in &odd {
        fs::remove_dir(path).unwrap();
    }
    node.dismantle().unwrap();
}

#[test]
fn a_start_that_fails_leaves_a_new_node_untouched() {
    let Some(world) = World::new("fresh") else { return };
    // Its sockets are not of the cgroup that it is told, so that the self-check fails.
    let other = format!("{}/{}-other", world.options().cgroup_root.display(), world.name);
    fs::create_dir(&other).unwrap();
    let options = NodeOptions { own_cgroup: other.clone().into(), ..world.options() };
    let error = Node::start(&options, Some(world.seat()));
    fs::remove_dir(&other).unwrap();
    assert!(matches!(error, Err(CaptureError::SelfCheck { .. })), "{error:?}");
    assert_eq!(world.pins(), Vec::<PathBuf>::new());
    let node = world.start();
    assert!(node.is_new());
    drop(node);
    let node = world.start();
    assert!(!node.is_new());
    node.dismantle().unwrap();
}

#[test]
fn programs_log_when_asked() {
    let Some(world) = World::new("log") else { return };
    let node = world.start_as(&NodeOptions { log: BpfLog::On, ..world.options() });
    assert!(node.take_logs().is_some());
    assert!(node.take_logs().is_none());
    drop(node);
    assert!(world.start().take_logs().is_none());
}

#[test]
fn a_node_can_be_shared_among_threads() {
    fn check<T: Send + Sync + 'static>() {}
    check::<Node>();
    check::<Pod>();
}

#[test]
fn the_host_is_not_a_pod() {
    let Some(world) = World::new("host") else { return };
    let node = world.start();
    let error = world.try_enroll(&node, &Netns::current().unwrap()).unwrap_err();
    assert!(matches!(error, CaptureError::HostNetns { .. }), "{error}");
    node.dismantle().unwrap();
}

#[test]
fn a_redirected_pod_gets_listeners_and_nothing_else() {
    let Some(mut world) = World::new("redir") else { return };
    let before = world.state();
    let node = world.runtime.block_on(async { Node::start(&world.options(), None).unwrap() });
    let mut pod = world.enroll(&node);
    assert_eq!(world.state(), before);
    assert_eq!(world.pins(), Vec::<PathBuf>::new());
    let listeners = pod.take_listeners();
    let dst = format!("{POD_V4}:15008");
    let app = world.app.connect(&world.outside, &dst);
    assert_eq!(world.accept(&listeners, Role::Hbone, &dst).orig_dst, dst.parse().unwrap());
    assert_eq!(world.app.wait(app, SOON), format!("connected {dst}"));
    node.unenroll(pod).unwrap();
}

#[test]
fn a_pod_with_a_host_of_addresses_leaves_room_for_others() {
    let Some(world) = World::new("many") else { return };
    let netns = &world.pod;
    let node = world.start();
    let mut pod = world.enroll(&node);
    let task = world.runtime.handle().clone().spawn(pod.take_watch().unwrap().run());
    let add = |n| format!("addr add 10.1.{}.{}/32 dev lo", n / 200, n % 200 + 1);
    let add: Vec<_> = (0..300).map(add).collect();
    let batch = tempfile::NamedTempFile::new().unwrap();
    fs::write(&batch, add.join("\n")).unwrap();
    run(&format!("ip -n {netns} -batch {}", batch.path().display()));
    let last: IpAddr = "10.1.1.100".parse().unwrap();
    let addresses = pod.addresses();
    eventually("the last address is seen", || addresses.owns(last));
    eventually("the room is full", || world.addresses(pod.id()).len() >= 256);
    eventually("the rest is counted", || node.failures().contains(&("address_ignored", 47)));
    let held = world.addresses(pod.id());
    assert_eq!(held.len(), 256);
    for own in [POD_V4, POD_V6] {
        assert!(held.contains(&own.parse().unwrap()), "{own}");
    }
    task.abort();
    // The same when it is enrolled with all of them.
    drop(pod);
    let pod = world.enroll(&node);
    assert_eq!(world.addresses(pod.id()).len(), 256);
    node.unenroll(pod).unwrap();
    node.dismantle().unwrap();
}

#[test]
fn a_pod_whose_namespace_has_no_path_stays_pinned_until_it_is_gone() {
    let Some(world) = World::new("lost") else { return };
    let node = world.start();
    let started = world.pins();
    let hidden = Namespace::new(&format!("{}-hidden", world.name));
    run(&format!("ip -n {hidden} link add eth0 type veth peer name eth1"));
    let netns = hidden.netns();
    drop(world.try_enroll(&node, &netns).unwrap());
    let pinned = world.pins();
    drop(hidden);
    for _ in 0..2 {
        let error = node.sweep(&[]).unwrap_err();
        assert!(matches!(error, CaptureError::NoPath { .. }), "{error}");
        assert_eq!(world.pins(), pinned);
    }
    drop(netns);
    eventually_ok("the namespace is gone", || node.sweep(&[]));
    assert_eq!(world.pins(), started);
    node.dismantle().unwrap();
}
