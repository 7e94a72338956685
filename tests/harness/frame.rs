//! Finds the TCP segment in an Ethernet frame.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Flag bits of the TCP header.
pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

/// A TCP segment inside a frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tcp<'a> {
    pub(crate) src: SocketAddr,
    pub(crate) dst: SocketAddr,
    pub(crate) sequence: u32,
    pub(crate) flags: u8,
    pub(crate) payload: &'a [u8],
}

impl Tcp<'_> {
    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// `None` for everything that is not TCP over IPv4, or over IPv6 without extension headers.
pub(crate) fn parse(frame: &[u8]) -> Option<Tcp<'_>> {
    let packet = frame.get(14..)?;
    match be16(frame, 12)? {
        0x0800 => {
            let header = usize::from(packet.first()? & 0x0f) * 4;
            if *packet.get(9)? != 6 {
                return None;
            }
            let address = |at| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
            // Padding may follow the packet; a length of 0 stands for a segment of more than 64 KiB.
            let length = match usize::from(be16(packet, 2)?) {
                0 => packet.len(),
                length => length,
            };
            segment(packet.get(header..length)?, address(12)?.into(), address(16)?.into())
        }
        0x86dd => {
            if *packet.get(6)? != 6 {
                return None;
            }
            let address = |at| Some(Ipv6Addr::from(*packet.get(at..)?.first_chunk::<16>()?));
            let length = match usize::from(be16(packet, 4)?) {
                0 => packet.len(),
                length => 40 + length,
            };
            segment(packet.get(40..length)?, address(8)?.into(), address(24)?.into())
        }
        _ => None,
    }
}

fn segment(tcp: &[u8], src: IpAddr, dst: IpAddr) -> Option<Tcp<'_>> {
    let header = usize::from(tcp.get(12)? >> 4) * 4;
    Some(Tcp {
        src: SocketAddr::new(src, be16(tcp, 0)?),
        dst: SocketAddr::new(dst, be16(tcp, 2)?),
        sequence: u32::from_be_bytes(*tcp.get(4..)?.first_chunk::<4>()?),
        flags: *tcp.get(13)?,
        payload: tcp.get(header..)?,
    })
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk::<2>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4_frame() -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00]);
        frame.extend([0x45, 0, 0, 43, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([
            0x30,
            0x39,
            0x3a,
            0xa0,
            0,
            0,
            0,
            7,
            0,
            0,
            0,
            0,
            0x50,
            SYN | ACK,
            0,
            0,
            0,
            0,
            0,
            0,
        ]);
        frame.extend(b"abc");
        frame
    }

    #[test]
    fn padding_is_not_payload() {
        let mut frame = v4_frame();
        frame.extend([0; 9]);
        let tcp = parse(&frame).unwrap();
        assert_eq!(tcp.src, "10.0.0.1:12345".parse().unwrap());
        assert_eq!(tcp.dst, "10.0.0.2:15008".parse().unwrap());
        assert_eq!((tcp.sequence, tcp.flags, tcp.payload), (7, SYN | ACK, &b"abc"[..]));
    }

    #[test]
    fn a_cut_frame_is_no_segment() {
        let frame = v4_frame();
        for length in 0..frame.len() {
            assert_eq!(parse(&frame[..length]), None, "{length} bytes");
        }
    }
}
