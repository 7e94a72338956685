//! `guard_host` at the other end of a veth pair, in another namespace: what a packet's socket still tells there.

use std::net::{SocketAddr, TcpListener};

use aya::{
    maps::HashMap,
    programs::{
        SchedClassifier, TcAttachType,
        tc::{NlOptions, TcAttachOptions, qdisc_add_clsact},
    },
};
use culvert_abi::{Outcome, maps};
use culvert_sys::netns::Netns;
use culvert_tests::poll::{SOON, until};
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

use crate::{
    cgroup,
    netns::{self, ip},
    objects,
    outcomes::Outcomes,
    packets,
};

/// `linux/if_packet.h`.
const PACKET_QDISC_BYPASS: libc::c_int = 20;

#[test]
fn a_packet_keeps_its_socket_on_the_way_to_the_node() {
    // Sockets belong to the cgroup of this process.
    let _here = cgroup::stay();
    if !objects::available() {
        return;
    }
    for (gateway, frame) in [("10.0.0.1:0", "out-v4-syn.hex"), ("[fd00::1]:0", "out-v6-syn.hex")] {
        netns::in_new(|| {
            // Only the other one is a pod.
            ip("link del eth0");
            let (node, thread) = (Netns::current().unwrap(), nix::unistd::gettid());
            netns::in_new(|| {
                ip(&format!("link set peer0 netns {thread} name node0"));
                check(&node, gateway.parse().unwrap(), &packets::frame_of(frame));
            });
        });
    }
}

fn check(node: &Netns, gateway: SocketAddr, frame: &[u8]) {
    let mut object = objects::open("pod");
    let outcomes = Outcomes::of(&mut object);
    let program: &mut SchedClassifier =
        object.program_mut("guard_host").unwrap().try_into().unwrap();
    let listener = node.run(|| {
        ip("link set node0 address 02:00:00:00:00:01 up");
        ip("addr add 10.0.0.1/24 dev node0");
        ip("addr add fd00::1/64 dev node0 nodad");
        qdisc_add_clsact("node0").unwrap();
        program.load().unwrap();
        let options = TcAttachOptions::Netlink(NlOptions::default());
        program.attach_with_options("node0", TcAttachType::Ingress, options).unwrap();
        TcpListener::bind(gateway).unwrap()
    });
    let listener = listener.unwrap();
    let to = listener.local_addr().unwrap();
    let await_count = |outcome| {
        until(SOON, &format!("{outcome:?}"), || (outcomes.total(outcome) > 0).then_some(()));
    };

    let socket =
        Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), Some(Protocol::TCP));
    let socket = socket.unwrap();
    let started = socket.connect(&to.into()).unwrap_err();
    assert_eq!(started.raw_os_error(), Some(libc::EINPROGRESS));
    await_count(Outcome::HostUncaptured);

    send_past_tc(frame);
    await_count(Outcome::HostHandmade);

    // The kernel sends the SYN again.
    let map = object.map_mut(maps::OWN_CGROUPS).unwrap();
    let mut cgroups: HashMap<_, u64, u8> = map.try_into().unwrap();
    cgroups.insert(cgroup::own_id(), 1, 0).unwrap();
    until(SOON, "the connection", || socket.peer_addr().ok());
    assert_eq!(outcomes.total(Outcome::HostUnowned), 0);
}

/// Sends a frame by `eth0` as a packet socket may: past the hooks of tc.
fn send_past_tc(frame: &[u8]) {
    let socket = Socket::new(Domain::PACKET, Type::RAW, None).unwrap();
    let one: libc::c_int = 1;
    // SAFETY: the option is an integer, which is passed with its size.
    #[expect(unsafe_code, reason = "no crate has this option")]
    let rc = unsafe {
        libc::setsockopt(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            libc::SOL_PACKET,
            PACKET_QDISC_BYPASS,
            (&raw const one).cast(),
            size_of::<libc::c_int>().try_into().unwrap(),
        )
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: every `sockaddr` fits into the storage, and zero is a value of each field.
    #[expect(unsafe_code, reason = "socket2 has no address of a packet socket")]
    let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
    address.sll_family = libc::AF_PACKET.try_into().unwrap();
    address.sll_ifindex = nix::net::if_::if_nametoindex("eth0").unwrap().try_into().unwrap();
    let length = size_of::<libc::sockaddr_ll>().try_into().unwrap();
    // SAFETY: the storage holds an address of this length.
    #[expect(unsafe_code, reason = "as above")]
    let address = unsafe { SockAddr::new(storage, length) };
    assert_eq!(socket.send_to(frame, &address).unwrap(), frame.len());
}
