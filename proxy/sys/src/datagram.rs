//! Datagrams that were sent to another address than the socket's, and answers in that address's name; whoever calls
//! decides what they mean.

use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket},
    os::fd::{AsFd, AsRawFd as _},
};

use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt,
    sockopt::{Ipv4OrigDstAddr, Ipv6OrigDstAddr},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::socket::{canonical, set_transparent};

/// `IPPROTO_RAW`: the caller writes the IP header, and nothing is ever received.
const IPPROTO_RAW: i32 = 255;
/// Protocol number of UDP (IANA).
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;
const TTL: u8 = 64;

/// Opens a non-blocking UDP socket in the calling thread's namespace that tells where each datagram was sent to.
///
/// `addr` need not be local. An IPv6 socket takes IPv6 only. Needs `CAP_NET_ADMIN`.
pub fn receiver(addr: SocketAddr) -> io::Result<UdpSocket> {
    let socket =
        Socket::new(Domain::for_address(addr), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
    set_transparent(&socket, addr)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
        setsockopt(&socket, Ipv6OrigDstAddr, &true)?;
    } else {
        setsockopt(&socket, Ipv4OrigDstAddr, &true)?;
    }
    socket.bind(&addr.into())?;
    Ok(socket.into())
}

/// Opens a non-blocking UDP socket in the calling thread's namespace that sends to `peer` and hears nobody else, from a
/// port that the kernel chooses.
pub fn connected(peer: SocketAddr, mark: Option<u32>) -> io::Result<UdpSocket> {
    let kind = Type::DGRAM.nonblocking();
    let socket = Socket::new(Domain::for_address(peer), kind, Some(Protocol::UDP))?;
    if let Some(mark) = mark {
        socket.set_mark(mark)?;
    }
    socket.connect(&peer.into())?;
    Ok(socket.into())
}

/// A datagram that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// How many bytes were written to the buffer.
    pub length: usize,
    /// Who sent it.
    pub from: SocketAddr,
    /// Where it was sent to.
    pub to: SocketAddr,
}

/// The next datagram at a [`receiver`]. `None` for one that is of no use: larger than `buffer`, or without addresses.
pub fn receive(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<Option<Received>> {
    let mut parts = [IoSliceMut::new(buffer)];
    let mut space = nix::cmsg_space!(libc::sockaddr_in6);
    let fd = socket.as_fd().as_raw_fd();
    let message = recvmsg::<SockaddrStorage>(fd, &mut parts, Some(&mut space), MsgFlags::empty())?;
    let to = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4OrigDstAddr(to) => Some(SocketAddr::V4(v4(to))),
        ControlMessageOwned::Ipv6OrigDstAddr(to) => Some(SocketAddr::V6(v6(to))),
        _ => None,
    });
    let from = message.address.as_ref().and_then(|from| {
        let v4 = from.as_sockaddr_in().map(|from| SocketAddr::V4((*from).into()));
        v4.or_else(|| from.as_sockaddr_in6().map(|from| SocketAddr::V6((*from).into())))
    });
    let whole = !message.flags.contains(MsgFlags::MSG_TRUNC);
    Ok(from.zip(to).filter(|_| whole).map(|(from, to)| Received {
        length: message.bytes,
        from: canonical(from),
        to: canonical(to),
    }))
}

/// A socket that sends datagrams in any address's name, and takes no port of the calling thread's namespace. Needs
/// `CAP_NET_RAW`.
#[derive(Debug)]
pub struct Sender(Socket);

impl Sender {
    /// One for the family of `addr`.
    pub fn open(addr: IpAddr) -> io::Result<Self> {
        let domain = if addr.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
        let kind = Type::RAW.nonblocking();
        Socket::new(domain, kind, Some(Protocol::from(IPPROTO_RAW))).map(Self)
    }

    /// Sends one datagram. Errors: `EINVAL` for addresses of two families, `EMSGSIZE` for a payload that does not fit.
    pub fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let packet = packet(from, to, payload)?;
        let to = match to {
            SocketAddr::V4(to) => SocketAddr::V4(SocketAddrV4::new(*to.ip(), 0)),
            SocketAddr::V6(to) => SocketAddr::V6(SocketAddrV6::new(*to.ip(), 0, 0, to.scope_id())),
        };
        self.0.send_to(&packet, &to.into()).map(drop)
    }
}

/// The IP packet of a datagram (RFC 768, RFC 791 §3.1, RFC 8200 §3).
fn packet(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<Vec<u8>> {
    let too_long = |_| io::Error::from(nix::errno::Errno::EMSGSIZE);
    let length = u16::try_from(UDP_HEADER + payload.len()).map_err(too_long)?;
    let (mut packet, addresses) = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            // The kernel writes its own header's checksum.
            let total = length.checked_add(20).ok_or(nix::errno::Errno::EMSGSIZE)?;
            (header_v4(from, to, total), sum(&from.octets()) + sum(&to.octets()))
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            (header_v6(from, to, length), sum(&from.octets()) + sum(&to.octets()))
        }
        _ => return Err(nix::errno::Errno::EINVAL.into()),
    };
    // That of the pseudo header (RFC 768, RFC 8200 §8.1) and of the datagram itself.
    let words = addresses + u64::from(UDP) + 2 * u64::from(length);
    let ports = u64::from(from.port()) + u64::from(to.port());
    let checksum = checksum(words + ports + sum(payload));
    for word in [from.port(), to.port(), length, checksum] {
        packet.extend_from_slice(&word.to_be_bytes());
    }
    packet.extend_from_slice(payload);
    Ok(packet)
}

fn header_v4(from: Ipv4Addr, to: Ipv4Addr, total: u16) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend_from_slice(&total.to_be_bytes());
    header.extend_from_slice(&[0, 0, 0, 0, TTL, UDP, 0, 0]);
    header.extend_from_slice(&from.octets());
    header.extend_from_slice(&to.octets());
    header
}

fn header_v6(from: Ipv6Addr, to: Ipv6Addr, length: u16) -> Vec<u8> {
    let mut header = vec![0x60, 0, 0, 0];
    header.extend_from_slice(&length.to_be_bytes());
    header.extend_from_slice(&[UDP, TTL]);
    header.extend_from_slice(&from.octets());
    header.extend_from_slice(&to.octets());
    header
}

/// The words of `bytes`, added up (RFC 1071 §1).
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(2).map(|word| match *word {
        [high, low] => u16::from_be_bytes([high, low]),
        [high] => u16::from_be_bytes([high, 0]),
        _ => 0,
    });
    words.map(u64::from).sum()
}

/// The checksum of a datagram; zero would mean that there is none.
fn checksum(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !u16::try_from(sum).unwrap_or(u16::MAX) {
        0 => u16::MAX,
        checksum => checksum,
    }
}

fn v4(addr: libc::sockaddr_in) -> SocketAddrV4 {
    SocketAddrV4::new(u32::from_be(addr.sin_addr.s_addr).into(), u16::from_be(addr.sin_port))
}

fn v6(addr: libc::sockaddr_in6) -> SocketAddrV6 {
    let port = u16::from_be(addr.sin6_port);
    SocketAddrV6::new(addr.sin6_addr.s6_addr.into(), port, 0, addr.sin6_scope_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(addr: &str) -> SocketAddr {
        addr.parse().unwrap()
    }

    #[test]
    fn a_packet_says_whose_it_is_and_its_words_add_up_to_ones() {
        let v4 = packet(at("192.0.2.53:53"), at("10.0.0.7:40000"), b"odd").unwrap();
        assert_eq!(v4.len(), 31);
        assert_eq!(v4[..12], [0x45, 0, 0, 31, 0, 0, 0, 0, 64, 17, 0, 0]);
        assert_eq!(v4[12..26], [192, 0, 2, 53, 10, 0, 0, 7, 0, 53, 0x9c, 0x40, 0, 11]);
        let pseudo = |packet: &[u8], addresses: usize| {
            let udp = &packet[addresses + if addresses == 12 { 8 } else { 32 }..];
            let length = u64::try_from(udp.len()).unwrap();
            sum(&packet[addresses..]) + length + u64::from(UDP)
        };
        let folded = |sum: u64| (sum & 0xffff) + (sum >> 16);
        assert_eq!(folded(pseudo(&v4, 12)), 0xffff);
        let v6 = packet(at("[2001:db8::53]:53"), at("[fd00::7]:40000"), b"even").unwrap();
        assert_eq!(v6[..8], [0x60, 0, 0, 0, 0, 12, 17, 64]);
        assert_eq!(folded(pseudo(&v6, 8)), 0xffff);
    }

    #[test]
    fn what_cannot_be_sent_is_refused() {
        let error = |from, to, length| {
            packet(at(from), at(to), &vec![0; length]).unwrap_err().raw_os_error()
        };
        assert_eq!(error("10.0.0.1:53", "[fd00::7]:1", 0), Some(libc::EINVAL));
        assert_eq!(error("10.0.0.1:53", "10.0.0.7:1", 65508), Some(libc::EMSGSIZE));
        assert_eq!(error("[fd00::1]:53", "[fd00::7]:1", 65528), Some(libc::EMSGSIZE));
        assert!(packet(at("10.0.0.1:53"), at("10.0.0.7:1"), &vec![0; 65507]).is_ok());
    }

    #[test]
    fn a_connected_socket_takes_an_answer_in_the_name_of_its_peer() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: IP_TRANSPARENT needs CAP_NET_ADMIN");
            return;
        }
        for own in ["127.0.0.1:0", "[::1]:0"] {
            let receiver = receiver(at(own)).unwrap();
            let asked = receiver.local_addr().unwrap();
            let client = UdpSocket::bind(own).unwrap();
            client.connect(asked).unwrap();
            client.send(b"question").unwrap();
            let mut buffer = [0; 16];
            receiver.set_nonblocking(false).unwrap();
            let got = receive(&receiver, &mut buffer).unwrap().unwrap();
            assert_eq!(&buffer[..got.length], b"question");
            assert_eq!((got.from, got.to), (client.local_addr().unwrap(), asked));
            let sender = Sender::open(got.to.ip()).unwrap();
            sender.send(got.to, got.from, b"answer").unwrap();
            let length = client.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"answer");
        }
    }
}
