//! Interfaces as they are found in the field: other MTUs, no offloads, reverse path filters. And what is not TCP.

use std::{
    io::{self, Read as _},
    net::{SocketAddr, UdpSocket},
};

use culvert_tests::{
    apps::{App, Behaviour},
    client,
    culvert::{Mesh, Remains},
    flow_log::Direction,
    mesh_file::MeshFile,
    payload::Source,
    poll,
    topology::{Family, Pod, Topology},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::talk::{carried, talks};

/// Odd, so that no segment is full.
const LENGTH: usize = (3 << 20) + 12_345;

/// Bulk in both directions between a1 and b1, and between x and a1.
fn carries_bulk(topology: &Topology, what: &str) {
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let want = Source::digest(LENGTH).report();
    for (from, to) in [(a1, b1), (a1, x), (x, a1)] {
        let sink = App::start(&to.netns, Behaviour::Sink).unwrap();
        let source = App::start(&to.netns, Behaviour::Source(LENGTH)).unwrap();
        for family in Family::BOTH {
            let report = from
                .netns
                .run(|| client::upload(&mut client::dial(to.at(family, sink.port()))?, LENGTH));
            let way = format!("{} -> {} by {family:?}, {what}", from.name, to.name);
            assert_eq!(report.unwrap_or_else(|e| panic!("{way}: {e}")), want, "{way}");
            let digest = from
                .netns
                .run(|| client::download(&mut client::dial(to.at(family, source.port()))?));
            let digest = digest.unwrap_or_else(|e| panic!("back, {way}: {e}"));
            assert_eq!(digest.report(), want, "back, {way}");
        }
    }
}

fn set_mtu(topology: &Topology, pods: u16, nodes: u16) {
    for (node, pods_of) in [(&topology.a, ["a1", "a2"]), (&topology.b, ["b1", "x"])] {
        let of = |interface: &str, mtu| format!("link set {interface} mtu {mtu}\n");
        let inside = pods_of.map(|pod| of(&format!("cali-{pod}"), pods)).concat();
        node.netns.ip(&(inside + &of("eth0", nodes))).unwrap();
    }
    for pod in topology.pods() {
        pod.netns.ip(&format!("link set eth0 mtu {pods}\n")).unwrap();
    }
    topology.wire.ip(&format!("link set to-a mtu {nodes}\nlink set to-b mtu {nodes}\n")).unwrap();
}

#[test]
fn small_and_large_packets_are_carried_also_where_the_wire_takes_less_than_the_pods_send() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for (pods, nodes) in [(1280, 1280), (9000, 9000), (9000, 1400)] {
        set_mtu(&topology, pods, nodes);
        carries_bulk(&topology, &format!("MTU {pods} in pods, {nodes} between nodes"));
    }
}

#[test]
fn bulk_is_carried_without_segmentation_offload() {
    let Some(topology) = Topology::with_culvert() else { return };
    let _mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    for pod in topology.pods() {
        for interface in ["lo", "eth0"] {
            let arguments = [
                "-K", interface, "tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off",
            ];
            // Not part of every system; what iproute2 can set is enough to keep segments small.
            if pod.netns.output("ethtool", &arguments).is_err() {
                pod.netns.ip(&format!("link set {interface} gso_max_segs 1\n")).unwrap();
            }
        }
    }
    carries_bulk(&topology, "no offloads");
}

#[test]
fn reverse_path_filters_of_every_kind_let_captured_connections_through() {
    let Some(topology) = Topology::with_culvert() else { return };
    let mesh = Mesh::start(&topology, &MeshFile::new(&topology), Remains::Nothing).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    let apps = [a1, b1, x].map(|pod| App::start(&pod.netns, Behaviour::Echo).unwrap());
    let [on_a1, on_b1, on_x] = apps.each_ref().map(App::port);
    for (filter, by_mark) in ["0", "1", "2"].into_iter().flat_map(|f| [(f, "0"), (f, "1")]) {
        for pod in [a1, b1] {
            for interface in ["all", "eth0", "lo"] {
                pod.netns.set_sysctl(&format!("ipv4/conf/{interface}/rp_filter"), filter).unwrap();
                pod.netns
                    .set_sysctl(&format!("ipv4/conf/{interface}/src_valid_mark"), by_mark)
                    .unwrap();
            }
        }
        let what = format!("rp_filter {filter}, src_valid_mark {by_mark}");
        for family in Family::BOTH {
            let since = mesh.a.flows().len();
            talks(a1, b1.at(family, on_b1), &what);
            carried(&mesh.a, since, Direction::Outbound, b1.at(family, on_b1));
            talks(a1, x.at(family, on_x), &what);
            talks(b1, a1.at(family, on_a1), &what);
            talks(x, a1.at(family, on_a1), &what);
        }
    }
}

/// Sends an echo request of ICMP, and waits for the reply of the other pod's kernel.
fn ping(from: &Pod, to: SocketAddr) -> io::Result<()> {
    let (protocol, request, reply, header) = match to {
        // The sum of type and code is the whole of the header but for its checksum.
        SocketAddr::V4(_) => (Protocol::ICMPV4, [8, 0, 0xf7, 0xff, 0, 0, 0, 0], 0, 20),
        // Its checksum is the kernel's work (RFC 3542 section 3.1).
        SocketAddr::V6(_) => (Protocol::ICMPV6, [128, 0, 0, 0, 0, 0, 0, 0], 129, 0),
    };
    from.netns.run(|| {
        let mut socket = Socket::new(Domain::for_address(to), Type::RAW, Some(protocol))?;
        socket.set_read_timeout(Some(poll::SOON))?;
        socket.connect(&SocketAddr::new(to.ip(), 0).into())?;
        socket.send(&request)?;
        let mut packet = [0; 256];
        while socket.read(&mut packet)? <= header || packet[header] != reply {}
        Ok(())
    })
}

/// Sends a datagram to a socket of the other pod, which sends it back.
fn datagram(from: &Pod, to: &Pod, family: Family, port: u16) -> io::Result<Vec<u8>> {
    let (here, there) = (from.at(family, 0), to.at(family, port));
    let bind = |pod: &Pod, address: SocketAddr| {
        pod.netns.run(|| {
            let socket = UdpSocket::bind(address)?;
            socket.set_read_timeout(Some(poll::SOON))?;
            io::Result::Ok(socket)
        })
    };
    let (client, server) = (bind(from, here)?, bind(to, there)?);
    client.send_to(b"a datagram", there)?;
    let mut chunk = [0; 64];
    let (length, peer) = server.recv_from(&mut chunk)?;
    server.send_to(&chunk[..length], peer)?;
    let (length, peer) = client.recv_from(&mut chunk)?;
    // The reply must come from where it was asked.
    if peer == there {
        Ok(chunk[..length].to_vec())
    } else {
        Err(io::Error::other(peer.to_string()))
    }
}

#[test]
fn datagrams_and_pings_are_left_alone() {
    let Some(topology) = Topology::with_culvert() else { return };
    let file = MeshFile::new(&topology);
    let options = ["--dns-capture", "false"];
    let mesh = Mesh::start_with(&topology, &file, Remains::Nothing, &options).unwrap();
    let (a1, b1, x) = (&topology.a1, &topology.b1, &topology.x);
    for (from, to) in [(a1, b1), (b1, a1), (a1, x), (x, a1), (a1, &topology.a2)] {
        for family in Family::BOTH {
            let way = format!("{} -> {} by {family:?}", from.name, to.name);
            // DNS, QUIC, and the ports that mean something to us over TCP.
            for port in [53, 443, 15001, 15008] {
                let reply = datagram(from, to, family, port);
                assert_eq!(reply.unwrap_or_else(|e| panic!("{way}: {e}")), b"a datagram", "{way}");
            }
            ping(from, to.at(family, 0)).unwrap_or_else(|e| panic!("ping {way}: {e}"));
        }
    }
    assert_eq!(mesh.a.flows().len() + mesh.b.flows().len(), 0);
}
