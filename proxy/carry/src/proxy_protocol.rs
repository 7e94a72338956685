//! The PROXY protocol, version 2: what an application that takes connections for others is told about each.
//!
//! Only the header's bytes; when an application wants one, and who the client is, is the caller's. None is ever read:
//! nothing that a pod writes may tell the proxy whose a connection is.

use std::net::{IpAddr, SocketAddr};

/// First bytes of every header.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY.
const VERSION_PROXY: u8 = 0x21;
const TCP_OVER_IPV4: u8 = 0x11;
const TCP_OVER_IPV6: u8 = 0x21;
/// The two ends have no family in common.
const STREAM_UNSPECIFIED: u8 = 0x01;
/// Of the range for applications: the peer's SPIFFE ID, as Istio's waypoints read it.
const PEER_IDENTITY: u8 = 0xd0;
/// The longest identity that is told; a certificate cannot hold one that comes near.
const MAX_IDENTITY: usize = 32 << 10;

/// The header of a connection from `source` to `destination`, whose peer proved to be `identity`.
///
/// IPv4-mapped addresses count as IPv4. Addresses of different families are left out, as the header has room for one.
pub fn header(source: SocketAddr, destination: SocketAddr, identity: Option<&str>) -> Vec<u8> {
    let (source_ip, destination_ip) = (source.ip().to_canonical(), destination.ip().to_canonical());
    let mut body = Vec::with_capacity(64);
    let family = match (source_ip, destination_ip) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            body.extend(source.octets());
            body.extend(destination.octets());
            TCP_OVER_IPV4
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            body.extend(source.octets());
            body.extend(destination.octets());
            TCP_OVER_IPV6
        }
        _ => STREAM_UNSPECIFIED,
    };
    if family != STREAM_UNSPECIFIED {
        body.extend(source.port().to_be_bytes());
        body.extend(destination.port().to_be_bytes());
    }
    if let Some(identity) = identity.filter(|identity| identity.len() <= MAX_IDENTITY) {
        body.push(PEER_IDENTITY);
        body.extend(length(identity.len()));
        body.extend(identity.bytes());
    }
    let mut header = Vec::with_capacity(16 + body.len());
    header.extend(SIGNATURE);
    header.extend([VERSION_PROXY, family]);
    header.extend(length(body.len()));
    header.extend(body);
    header
}

/// Never more than [`MAX_IDENTITY`] and some bytes.
fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, destination: &str, identity: Option<&str>, want: &[u8]) {
        let got = header(source.parse().unwrap(), destination.parse().unwrap(), identity);
        assert_eq!(got, want, "{got:02x?}");
    }

    #[test]
    fn headers_are_as_the_specification_has_them() {
        check(
            "10.1.2.3:4660",
            "10.96.0.10:80",
            Some("spiffe://td/ns/a/sa/b"),
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x24\x0a\x01\x02\x03\x0a\x60\x00\x0a\x12\x34\x00\x50\
              \xd0\x00\x15spiffe://td/ns/a/sa/b",
        );
        check(
            "[fd00::1]:1",
            "[fd00::2]:65535",
            None,
            b"\r\n\r\n\0\r\nQUIT\n\x21\x21\x00\x24\
              \xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x02\
              \x00\x01\xff\xff",
        );
    }

    #[test]
    fn a_mapped_address_is_an_ipv4_one() {
        let want = header("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap(), None);
        check("[::ffff:10.0.0.1]:1", "10.0.0.2:2", None, &want);
    }

    #[test]
    fn addresses_of_two_families_are_left_out() {
        let tlv = b"\r\n\r\n\0\r\nQUIT\n\x21\x01\x00\x06\xd0\x00\x03s:b";
        check("10.0.0.1:1", "[fd00::2]:2", Some("s:b"), tlv);
    }

    #[test]
    fn an_identity_of_any_length_leaves_a_header_of_the_length_it_tells() {
        for length in [0, 1, 255, 256, MAX_IDENTITY, MAX_IDENTITY + 1, 70_000] {
            let identity = "i".repeat(length);
            let got = header(
                "[fd00::1]:1".parse().unwrap(),
                "[fd00::2]:2".parse().unwrap(),
                Some(&identity),
            );
            let told = usize::from(u16::from_be_bytes([got[14], got[15]]));
            assert_eq!(told, got.len() - 16, "{length}");
            assert_eq!(got.ends_with(identity.as_bytes()), length <= MAX_IDENTITY, "{length}");
        }
    }
}
