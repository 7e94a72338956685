//! Virtual interfaces in a pod, as a virtual machine or Docker in the pod has them: what they bring in is the pod's own.

use std::{io, net::SocketAddr, time::Duration};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::MeshFile,
    netns::Netns,
    poll,
    tap::Tap,
    topology::{Family, Pod, Topology},
};

use crate::talk::count;

const REROUTE: &str = "istio.io/reroute-virtual-interfaces";
const NEEDLE: &[u8] = b"from a machine in the pod";
const AT_ONCE: Duration = Duration::from_secs(2);

/// A machine behind a bridge of the pod.
struct Machine(Netns);

impl Machine {
    fn new(pod: &Pod, bridge: &str) -> Self {
        let name = format!("{}-vm", pod.netns.name());
        pod.netns.output("ip", &["netns", "add", &name]).unwrap();
        let machine = Self(Netns::adopt(name));
        pod.netns
            .ip(&format!(
                "link add {bridge} type bridge forward_delay 0 mcast_snooping 0\n\
                 link add tap0 type veth peer name eth0 netns {}\n\
                 link set tap0 master {bridge}\nlink set tap0 up\nlink set {bridge} up\n\
                 addr add 10.77.0.1/24 dev {bridge}\naddr add fd77::1/64 dev {bridge} nodad\n",
                machine.0.name(),
            ))
            .unwrap();
        machine.0.set_sysctl("ipv6/conf/all/accept_dad", "0").unwrap();
        machine
            .0
            .ip("link set lo up\nlink set eth0 up\n\
                 addr add 10.77.0.2/24 dev eth0\naddr add fd77::2/64 dev eth0 nodad\n\
                 route add default via 10.77.0.1\nroute add default via fd77::1\n")
            .unwrap();
        for key in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            pod.netns.set_sysctl(key, "1").unwrap();
        }
        machine
    }

    fn says(&self, to: SocketAddr, within: Duration) -> io::Result<Vec<u8>> {
        self.0.run(|| client::converse(&mut client::dial_within(to, within)?, NEEDLE))
    }

    fn reaches(&self, to: SocketAddr) -> bool {
        self.says(to, AT_ONCE).is_ok_and(|reply| reply == NEEDLE)
    }
}

fn annotate(topology: &Topology, mesh: &Mesh<'_>, annotations: &[(&str, &str)]) {
    mesh.a.annotate(&[(&topology.a1, annotations), (&topology.a2, &[])]).unwrap();
}

#[test]
fn what_a_virtual_interface_brings_in_is_carried_under_the_pods_identity() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    // Before the interface is there.
    annotate(&topology, &mesh, &[(REROUTE, "br-vm")]);
    let machine = Machine::new(a1, "br-vm");
    let eth0 = Tap::start(&a1.netns, "eth0", &[NEEDLE]).unwrap();
    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        poll::until(poll::SOON, "the machine to be captured", || machine.reaches(to).then_some(()));
        mesh.b.flow("the pod's identity", |flow| {
            flow.goes(Direction::Inbound)
                && flow.is("dst.hbone_addr", &to.to_string())
                && flow.identities().is_some_and(|(source, _)| source == a1.identity())
        });
    }
    let report = eth0.stop();
    assert_eq!(report.needles().count(), 0);
    assert_eq!(report.plaintext().count(), 0);

    // Not asked for any more: it is forwarded, which a captured pod lets nothing be.
    annotate(&topology, &mesh, &[]);
    let eth0 = Tap::start(&a1.netns, "eth0", &[]).unwrap();
    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        poll::until(poll::SOON, "capture to end", || (!machine.reaches(to)).then_some(()));
    }
    assert_eq!(eth0.stop().plaintext().count(), 0);
}

#[test]
fn connections_of_a_virtual_interface_wait_while_no_proxy_runs() {
    let Some(topology) = Topology::with_culvert() else { return };
    let (a1, b1) = (&topology.a1, &topology.b1);
    let app = App::start(&b1.netns, Behaviour::Echo).unwrap();
    let machine = Machine::new(a1, "br-vm");
    let mut mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Pins).unwrap();
    annotate(&topology, &mesh, &[(REROUTE, "br-vm")]);
    for family in Family::BOTH {
        let to = b1.at(family, app.port());
        poll::until(poll::SOON, "the machine to be captured", || machine.reaches(to).then_some(()));
    }
    mesh.a.kill();
    let waiting = Family::BOTH.map(|family| {
        let to = b1.at(family, app.port());
        let error = machine.says(to, AT_ONCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{family:?}");
        machine.0.start(move || client::exchange(to, NEEDLE))
    });
    mesh.a.launch().unwrap();
    mesh.a.wait_ready().unwrap();
    for waiting in waiting {
        assert_eq!(waiting.join().unwrap().unwrap(), NEEDLE);
    }
}

#[test]
fn a_rule_by_interface_is_put_back_and_goes_with_the_capture() {
    let Some(topology) = Topology::with_culvert() else { return };
    let a1 = &topology.a1;
    let app = App::start(&topology.b1.netns, Behaviour::Echo).unwrap();
    let machine = Machine::new(a1, "br-vm");
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    annotate(&topology, &mesh, &[(REROUTE, "br-vm")]);
    let rules = |family: Family| {
        let flag = if family == Family::V4 { "-4" } else { "-6" };
        let shown = a1.netns.output("ip", &[flag, "rule", "show"]).unwrap();
        shown.lines().filter(|line| line.contains("iif br-vm")).count()
    };
    for family in Family::BOTH {
        let to = topology.b1.at(family, app.port());
        poll::until(poll::SOON, "the rule", || (rules(family) == 1).then_some(()));
        let flag = if family == Family::V4 { "-4" } else { "-6" };
        a1.netns.output("ip", &[flag, "rule", "del", "iif", "br-vm"]).unwrap();
        poll::until(poll::SOON, "the rule again", || (rules(family) == 1).then_some(()));
        assert!(machine.reaches(to), "{to}");
    }
    assert_eq!(count(&mesh.a, "culvert_steering_repairs_total", &[("kind", "rule")]), 2);
    mesh.a.set_pods(&[&topology.a2]).unwrap();
    for family in Family::BOTH {
        poll::until(poll::SOON, "the rule to go", || (rules(family) == 0).then_some(()));
    }
}
