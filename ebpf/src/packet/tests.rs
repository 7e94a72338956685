// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Frames built by hand; whole recorded ones are run through the real programs from `bpf-fixtures/packets`.

extern crate alloc;

use alloc::{vec, vec::Vec};
use core::net::IpAddr;

use super::*;

/// A frame as the kernel receives it from Ethernet: what it notes is what the header says.
impl Frame for Vec<u8> {
    fn protocol(&self) -> u16 {
        self.get(12..14).map_or(0, |field| u16::from_be_bytes([field[0], field[1]]))
    }

    fn bytes<const N: usize>(&self, position: Position) -> Option<[u8; N]> {
        read(self, position, 14)
    }

    fn length(&self) -> u32 {
        self.len().try_into().unwrap()
    }

    fn any(&self, value: u32) -> u32 {
        value
    }
}

/// A frame of a device that has no link-layer header, or with a protocol that the kernel was told.
struct Noted {
    protocol: u16,
    link: u32,
    data: Vec<u8>,
}

impl Frame for Noted {
    fn protocol(&self) -> u16 {
        self.protocol
    }

    fn bytes<const N: usize>(&self, position: Position) -> Option<[u8; N]> {
        read(&self.data, position, self.link)
    }

    fn length(&self) -> u32 {
        self.data.len().try_into().unwrap()
    }

    fn any(&self, value: u32) -> u32 {
        value
    }
}

fn read<const N: usize>(data: &[u8], position: Position, link: u32) -> Option<[u8; N]> {
    let start = match position.origin {
        LINK => position.offset,
        _ => link + position.offset,
    };
    let start = usize::try_from(start).ok()?;
    data.get(start..start + N)?.try_into().ok()
}

const ESP: u8 = 50;
const TCP_SYN: [u8; 20] =
    [0x9c, 0x40, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, SYN, 0xff, 0xff, 0, 0, 0, 0];

fn ethernet(ethertype: &[u8], rest: &[&[u8]]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend_from_slice(ethertype);
    for part in rest {
        frame.extend_from_slice(part);
    }
    frame
}

fn ipv4(words: u8, fragment: u16, protocol: u8) -> Vec<u8> {
    let mut header = vec![0; usize::from(words) * 4];
    header[0] = 0x40 | words;
    header[6..8].copy_from_slice(&fragment.to_be_bytes());
    header[9] = protocol;
    header[12..16].copy_from_slice(&[192, 0, 2, 7]);
    header[16..20].copy_from_slice(&[10, 0, 0, 7]);
    header
}

fn ipv6(next: u8) -> Vec<u8> {
    let mut header = vec![0; 40];
    header[0] = 0x60;
    header[6] = next;
    header[23] = 1;
    header[39] = 2;
    header
}

fn v4_frame(words: u8, fragment: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
    ethernet(&[0x08, 0x00], &[&ipv4(words, fragment, protocol), payload])
}

fn v6_frame(first: u8, extensions: &[&[u8]], payload: &[u8]) -> Vec<u8> {
    ethernet(&[0x86, 0xdd], &[&ipv6(first), &extensions.concat(), payload])
}

#[track_caller]
fn check(frame: Vec<u8>, want: Kind) {
    assert_eq!(parse(&frame).kind, want);
}

#[test]
fn ipv4_options_are_skipped_up_to_the_longest() {
    for words in 5..=15 {
        let packet = parse(&v4_frame(words, 0, TCP, &TCP_SYN));
        assert_eq!(
            (packet.kind, packet.source_port, packet.destination_port),
            (Kind::Tcp, 40000, 8080)
        );
        assert!(packet.opens());
    }
}

#[test]
fn an_ipv4_header_shorter_than_its_minimum_is_malformed() {
    let mut frame = v4_frame(5, 0, TCP, &TCP_SYN);
    frame[14] = 0x44;
    check(frame, Kind::Malformed);
}

#[test]
fn later_fragments_hold_no_header() {
    check(v4_frame(5, 0x2002, TCP, &TCP_SYN), Kind::Other);
    check(v6_frame(FRAGMENT, &[&[TCP, 0, 0, 0x11, 0, 0, 0, 1]], &TCP_SYN), Kind::Other);
}

#[test]
fn first_fragments_are_read() {
    check(v4_frame(5, 0x2000, TCP, &TCP_SYN), Kind::Tcp);
    check(v6_frame(FRAGMENT, &[&[TCP, 0, 0, 0x01, 0, 0, 0, 1]], &TCP_SYN), Kind::Tcp);
}

#[test]
fn fragments_that_would_overwrite_the_flags_are_malformed() {
    check(v4_frame(5, 0x2001, TCP, &TCP_SYN), Kind::Malformed);
    check(v6_frame(FRAGMENT, &[&[TCP, 0, 0, 0x09, 0, 0, 0, 1]], &TCP_SYN), Kind::Malformed);
}

#[test]
fn a_tcp_header_that_is_cut_or_too_short_is_malformed() {
    for end in 0..20 {
        check(v4_frame(5, 0, TCP, &TCP_SYN[..end]), Kind::Malformed);
        check(v6_frame(TCP, &[], &TCP_SYN[..end]), Kind::Malformed);
    }
    let mut short = TCP_SYN;
    short[12] = 0x40;
    check(v4_frame(5, 0, TCP, &short), Kind::Malformed);
}

#[test]
fn frames_without_a_whole_ip_header_are_of_no_concern() {
    for end in 0..34 {
        check(v4_frame(5, 0, TCP, &[])[..end].to_vec(), Kind::Other);
    }
    for end in 0..54 {
        check(v6_frame(TCP, &[], &[])[..end].to_vec(), Kind::Other);
    }
}

#[test]
fn other_protocols_are_of_no_concern() {
    check(v4_frame(5, 0, UDP, &TCP_SYN), Kind::Other);
    check(v6_frame(UDP, &[], &TCP_SYN), Kind::Other);
    check(v6_frame(ESP, &[], &TCP_SYN), Kind::Other);
    check(ethernet(&[0x08, 0x06], &[&[0; 28]]), Kind::Other);
}

#[test]
fn ipv6_extension_headers_are_skipped() {
    let chain: [&[u8]; 4] = [
        &[DESTINATION, 0, 0, 0, 0, 0, 0, 0],
        &[ROUTING, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[AUTHENTICATION, 0, 0, 0, 0, 0, 0, 0],
        &[TCP, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    let packet = parse(&v6_frame(HOP_BY_HOP, &chain, &TCP_SYN));
    assert_eq!((packet.kind, packet.destination_port), (Kind::Tcp, 8080));
}

#[test]
fn a_chain_that_is_too_long_or_cut_is_malformed() {
    let link: &[u8] = &[DESTINATION, 0, 0, 0, 0, 0, 0, 0];
    let last: &[u8] = &[TCP, 0, 0, 0, 0, 0, 0, 0];
    let mut chain = vec![link; usize::try_from(MAX_EXTENSIONS).unwrap() - 1];
    chain.push(last);
    check(v6_frame(DESTINATION, &chain, &TCP_SYN), Kind::Tcp);
    chain.insert(0, link);
    check(v6_frame(DESTINATION, &chain, &TCP_SYN), Kind::Malformed);
    check(v6_frame(DESTINATION, &[], &[TCP, 0]), Kind::Malformed);
}

#[test]
fn one_vlan_tag_is_skipped_and_more_hide_the_packet() {
    let inner = [&[0x08, 0x00], ipv4(5, 0, TCP).as_slice(), &TCP_SYN].concat();
    for tag in [[0x81, 0x00, 0, 7], [0x88, 0xa8, 0, 7]] {
        check(ethernet(&tag, &[&inner]), Kind::Tcp);
        check(ethernet(&tag, &[&tag, &inner]), Kind::Malformed);
    }
}

#[test]
fn a_device_without_ethernet_hides_nothing() {
    let v4 = [ipv4(6, 0, TCP).as_slice(), &TCP_SYN].concat();
    let v6 = [ipv6(TCP).as_slice(), &TCP_SYN].concat();
    for (protocol, data, remote) in [
        (ETHERTYPE_IPV4, v4, v4_mapped(u32::from_ne_bytes([192, 0, 2, 7]))),
        (ETHERTYPE_IPV6, v6, Addr(1_u128.to_be_bytes())),
    ] {
        let frame = Noted { protocol, link: 0, data };
        let packet = parse(&frame);
        assert!(packet.opens(), "{protocol:#x}");
        assert_eq!(
            packet.connection(&frame).unwrap().remote,
            Endpoint { addr: remote, port: 40000 }
        );
    }
}

#[test]
fn a_protocol_that_a_packet_socket_made_up_hides_nothing() {
    for protocol in [0, 0x0806, 0x88cc] {
        let frame = Noted { protocol, link: 14, data: v4_frame(5, 0, TCP, &TCP_SYN) };
        assert!(parse(&frame).opens(), "{protocol:#x}");
    }
}

#[test]
fn only_syn_without_ack_opens_a_connection() {
    const FIN: u8 = 0x01;
    for (flags, want) in
        [(SYN, true), (SYN | FIN, true), (SYN | ACK, false), (ACK, false), (0, false)]
    {
        let mut header = TCP_SYN;
        header[13] = flags;
        assert_eq!(parse(&v4_frame(5, 0, TCP, &header)).opens(), want, "flags {flags:#x}");
    }
}

#[test]
fn ends_are_named_by_the_receiver() {
    let addr = |text: &str| match text.parse().unwrap() {
        IpAddr::V4(v4) => Addr(v4.to_ipv6_mapped().octets()),
        IpAddr::V6(v6) => Addr(v6.octets()),
    };
    for (frame, local, remote) in [
        (v4_frame(6, 0, TCP, &TCP_SYN), "10.0.0.7", "192.0.2.7"),
        (v6_frame(TCP, &[], &TCP_SYN), "::2", "::1"),
    ] {
        let connection = parse(&frame).connection(&frame).unwrap();
        assert_eq!(connection.local, Endpoint { addr: addr(local), port: 8080 });
        assert_eq!(connection.remote, Endpoint { addr: addr(remote), port: 40000 });
    }
}

#[test]
fn a_dns_query_is_told_where_it_is_asked_for() {
    let query = [0x9c, 0x40, 0, 53, 0, 12, 0, 0, 1, 2, 3, 4];
    let other = [0x9c, 0x40, 1, 187, 0, 12, 0, 0, 1, 2, 3, 4];
    let sized_v4 = |fragment, payload: &[u8]| {
        let mut header = ipv4(5, fragment, UDP);
        let length = u16::try_from(20 + payload.len()).unwrap();
        header[2..4].copy_from_slice(&length.to_be_bytes());
        ethernet(&[8, 0], &[&header, payload])
    };
    let sized_v6 = |payload: &[u8]| {
        let mut header = ipv6(UDP);
        let length = u16::try_from(payload.len()).unwrap();
        header[4..6].copy_from_slice(&length.to_be_bytes());
        ethernet(&[0x86, 0xdd], &[&header, payload])
    };
    for frame in [sized_v4(0, &query), sized_v4(0x4000, &query), sized_v6(&query)] {
        assert_eq!(parse(&frame).kind, Kind::Other);
        let packet = parse_with_dns(&frame);
        assert_eq!((packet.kind, packet.destination_port), (Kind::Dns, 53));
        assert_eq!(packet.source_port, 40000);
        assert_eq!(packet.link_length(&frame), Some(14));
        assert!(!packet.opens());
    }
    let no_query = [
        sized_v4(0, &other),
        sized_v6(&other),
        // The first of several fragments, a later one, and a frame that ends before the ports.
        sized_v4(0x2000, &query),
        sized_v4(0x0008, &query),
        sized_v4(0, &query[..3]),
    ];
    for frame in no_query {
        assert_eq!(parse_with_dns(&frame).kind, Kind::Other);
    }
}

#[test]
fn a_frame_without_ethernet_has_a_link_of_no_length() {
    let mut data = ipv4(5, 0, UDP);
    data[2..4].copy_from_slice(&32_u16.to_be_bytes());
    data.extend_from_slice(&[0x9c, 0x40, 0, 53, 0, 12, 0, 0, 1, 2, 3, 4]);
    let frame = Noted { protocol: 0x0800, link: 0, data };
    assert_eq!(parse_with_dns(&frame).link_length(&frame), Some(0));
}
