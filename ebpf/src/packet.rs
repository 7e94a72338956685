// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Finds the TCP header of a frame, or that of a DNS query, within bounds that the verifier can follow.
//!
//! Where the kernel says IPv4 or IPv6, the IP header is where the kernel says it is: a tunnel's frames have no Ethernet
//! header. Whatever else it says (a VLAN tag in the frame, or a protocol that a packet socket made up) is looked up in
//! the Ethernet header. Understands one VLAN tag, IPv4 with options, and IPv6 with up to [`MAX_EXTENSIONS`] extension
//! headers. What a packet means is for `guard` and `inbound`.

use culvert_abi::{Addr, DNS_PORT};

use crate::{
    Family,
    endpoint::{Connection, Endpoint, v4_mapped},
};

/// TCP flag: opens a connection.
pub const SYN: u8 = 0x02;
/// TCP flag: acknowledges.
pub const ACK: u8 = 0x10;

/// Real chains of extension headers are one or two long, and each step costs the verifier; longer ones are malformed.
pub const MAX_EXTENSIONS: u32 = 4;

/// Where an Ethernet header has the type of what follows; a tag comes before it.
const TYPE: Position = Position { origin: LINK, offset: 12 };
/// Length of a VLAN tag.
const TAG: u32 = 4;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_QINQ: u16 = 0x88a8;

const HOP_BY_HOP: u8 = 0;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// Offsets count from the link-layer header, where there is one (`enum bpf_hdr_start_off`).
pub const LINK: u32 = 0;
/// Offsets count from the network header.
pub const NETWORK: u32 = 1;

/// Where a header starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// What `offset` counts from: [`LINK`] or [`NETWORK`].
    pub origin: u32,
    /// In bytes.
    pub offset: u32,
}

impl Position {
    #[inline(always)]
    const fn plus(self, bytes: u32) -> Self {
        Self { origin: self.origin, offset: self.offset + bytes }
    }
}

/// A frame that can be read at any position.
pub trait Frame {
    /// The protocol of the network header as the kernel has noted it: an Ethernet type, also where there is no Ethernet.
    fn protocol(&self) -> u16;

    /// `N` bytes at `position`; `None` if the frame ends before, or has no such header.
    fn bytes<const N: usize>(&self, position: Position) -> Option<[u8; N]>;

    /// Length of the frame, from its link-layer header.
    fn length(&self) -> u32;

    /// `value`, without the verifier knowing which it is: it walks once through what follows, not once for each.
    fn any(&self, value: u32) -> u32;
}

/// What a frame holds, as far as culvert cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A TCP header.
    Tcp,
    /// A UDP header of a datagram to port 53 that is no fragment; only [`parse_with_dns`] tells.
    Dns,
    /// Another protocol, or a later fragment, which holds no header.
    Other,
    /// TCP by its protocol number, but without a header that can be read; or headers that hide what follows.
    Malformed,
}

/// The headers of a frame.
///
/// Not an enum with a payload: the verifier refuses to copy what was never written, so every field is set whatever the
/// kind. Those after `kind` are zero unless it is [`Kind::Tcp`] or
/// [`Kind::Dns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// What the frame holds.
    pub kind: Kind,
    /// Family of the IP header.
    pub family: Family,
    /// Where the IP header is.
    pub network: Position,
    /// Source port, host order.
    pub source_port: u16,
    /// Destination port, host order.
    pub destination_port: u16,
    /// TCP flags, as on the wire; zero for [`Kind::Dns`].
    pub flags: u8,
}

impl Packet {
    const OTHER: Self = Self::without_header(Kind::Other);
    const MALFORMED: Self = Self::without_header(Kind::Malformed);

    const fn without_header(kind: Kind) -> Self {
        let network = Position { origin: LINK, offset: 0 };
        Self { kind, family: Family::V4, network, source_port: 0, destination_port: 0, flags: 0 }
    }

    /// Whether it is the first packet of a TCP connection: SYN without ACK.
    #[inline(always)]
    pub const fn opens(&self) -> bool {
        self.flags & (SYN | ACK) == SYN
    }

    /// How long its link-layer header is, by the length that its IP header says; `None` if the frame ends before.
    #[inline(always)]
    pub fn link_length(&self, frame: &impl Frame) -> Option<u32> {
        let (at, rest) = match self.family {
            Family::V4 => (2, 0),
            Family::V6 => (4, 40),
        };
        let length = u32::from(u16::from_be_bytes(frame.bytes(self.network.plus(at))?)) + rest;
        Some(frame.length().wrapping_sub(length))
    }

    /// Both ends as its receiver names them; `None` if the frame ends before, which [`parse`] has ruled out for TCP.
    #[inline(always)]
    pub fn connection(&self, frame: &impl Frame) -> Option<Connection> {
        let ip = self.network;
        let (source, destination) = match self.family {
            Family::V4 => (v4_at(frame, ip.plus(12))?, v4_at(frame, ip.plus(16))?),
            Family::V6 => (v6_at(frame, ip.plus(8))?, v6_at(frame, ip.plus(24))?),
        };
        Some(Connection {
            local: Endpoint { addr: destination, port: self.destination_port },
            remote: Endpoint { addr: source, port: self.source_port },
        })
    }
}

/// Reads the headers of `frame` up to that of TCP.
#[inline(always)]
pub fn parse(frame: &impl Frame) -> Packet {
    parse_up_to::<false>(frame)
}

/// The same, and tells DNS queries.
#[inline(always)]
pub fn parse_with_dns(frame: &impl Frame) -> Packet {
    parse_up_to::<true>(frame)
}

#[inline(always)]
fn parse_up_to<const WITH_DNS: bool>(frame: &impl Frame) -> Packet {
    let mut protocol = frame.protocol();
    let mut network = Position { origin: NETWORK, offset: 0 };
    if !matches!(protocol, ETHERTYPE_IPV4 | ETHERTYPE_IPV6) {
        let Some(field) = frame.bytes(TYPE) else { return Packet::OTHER };
        protocol = u16::from_be_bytes(field);
        // Without a tag the kernel knows where the header is, whatever it was told that it is.
        if is_vlan(protocol) {
            let Some(field) = frame.bytes(TYPE.plus(TAG)) else { return Packet::OTHER };
            protocol = u16::from_be_bytes(field);
            network = TYPE.plus(TAG + 2);
        }
    }
    let network = Position { origin: frame.any(network.origin), offset: frame.any(network.offset) };
    match protocol {
        ETHERTYPE_IPV4 => parse_v4::<WITH_DNS>(frame, network),
        ETHERTYPE_IPV6 => parse_v6::<WITH_DNS>(frame, network),
        tag if is_vlan(tag) => Packet::MALFORMED,
        _ => Packet::OTHER,
    }
}

const fn is_vlan(protocol: u16) -> bool {
    matches!(protocol, ETHERTYPE_VLAN | ETHERTYPE_QINQ)
}

#[inline(always)]
fn parse_v4<const WITH_DNS: bool>(frame: &impl Frame, network: Position) -> Packet {
    let Some(header) = frame.bytes::<20>(network) else { return Packet::OTHER };
    if WITH_DNS && header[9] == UDP {
        // Neither a later fragment nor the first of several.
        if u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0 {
            return Packet::OTHER;
        }
        let length = u32::from(header[0] & 0x0f) * 4;
        return parse_dns(frame, Family::V4, network, network.plus(length));
    }
    if header[9] != TCP {
        return Packet::OTHER;
    }
    match u16::from_be_bytes([header[6], header[7]]) & 0x1fff {
        0 => {}
        // RFC 1858 §3.2: a fragment here would overwrite the flags that the first one showed.
        1 => return Packet::MALFORMED,
        _ => return Packet::OTHER,
    }
    match u32::from(header[0] & 0x0f) * 4 {
        length @ 20.. => parse_tcp(frame, Family::V4, network, network.plus(length)),
        _ => Packet::MALFORMED,
    }
}

#[inline(always)]
fn parse_v6<const WITH_DNS: bool>(frame: &impl Frame, network: Position) -> Packet {
    let Some(header) = frame.bytes::<40>(network) else { return Packet::OTHER };
    // No resolver asks with extension headers.
    if WITH_DNS && header[6] == UDP {
        return parse_dns(frame, Family::V6, network, network.plus(40));
    }
    let (mut next, mut at) = (header[6], network.plus(40));
    for _ in 0..=MAX_EXTENSIONS {
        if next == TCP {
            return parse_tcp(frame, Family::V6, network, at);
        }
        if !matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION) {
            return Packet::OTHER;
        }
        let Some([following, length, high, low]) = frame.bytes(at) else {
            return Packet::MALFORMED;
        };
        at = at.plus(match next {
            FRAGMENT => match (u16::from_be_bytes([high, low]) >> 3, following) {
                (0, _) => 8,
                (1, TCP) => return Packet::MALFORMED,
                _ => return Packet::OTHER,
            },
            AUTHENTICATION => (u32::from(length) + 2) * 4,
            _ => (u32::from(length) + 1) * 8,
        });
        next = following;
    }
    Packet::MALFORMED
}

#[inline(always)]
fn parse_tcp(frame: &impl Frame, family: Family, network: Position, at: Position) -> Packet {
    let Some(header) = frame.bytes::<20>(at) else { return Packet::MALFORMED };
    if header[12] >> 4 < 5 {
        return Packet::MALFORMED;
    }
    Packet {
        kind: Kind::Tcp,
        family,
        network,
        source_port: u16::from_be_bytes([header[0], header[1]]),
        destination_port: u16::from_be_bytes([header[2], header[3]]),
        flags: header[13],
    }
}

#[inline(always)]
fn parse_dns(frame: &impl Frame, family: Family, network: Position, at: Position) -> Packet {
    let Some([a, b, c, d]) = frame.bytes::<4>(at) else { return Packet::OTHER };
    let destination_port = u16::from_be_bytes([c, d]);
    if destination_port != DNS_PORT {
        return Packet::OTHER;
    }
    let source_port = u16::from_be_bytes([a, b]);
    Packet { kind: Kind::Dns, family, network, source_port, destination_port, flags: 0 }
}

#[inline(always)]
fn v4_at(frame: &impl Frame, at: Position) -> Option<Addr> {
    frame.bytes(at).map(u32::from_ne_bytes).map(v4_mapped)
}

#[inline(always)]
fn v6_at(frame: &impl Frame, at: Position) -> Option<Addr> {
    frame.bytes(at).map(Addr)
}

#[cfg(test)]
mod tests;
