// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Addresses and ports as the programs compare them: IPv4 in its v4-mapped form, ports in host order.
//!
//! Which addresses a pod owns is known by the map `addrs`; the caller looks that up.

use culvert_abi::{ADDR_EXCLUDED, Addr};
use zerocopy::transmute;

/// One end of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The address.
    pub addr: Addr,
    /// The port, host order.
    pub port: u16,
}

/// Both ends of a TCP connection, named from the socket or pod that the program looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// This end.
    pub local: Endpoint,
    /// The other end.
    pub remote: Endpoint,
}

/// Where an address lies, seen from a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// 127.0.0.0/8 (also v4-mapped) or `::1`.
    Loopback,
    /// An address of the pod.
    Own,
    /// An address of the pod, of an interface that it excludes from capture.
    Excluded,
    /// Any other address.
    Elsewhere,
}

impl Place {
    /// Places `addr`; `owned` gives what `addrs` holds for it, and is not asked about loopback.
    #[inline(always)]
    pub fn of(addr: &Addr, owned: impl FnOnce(&Addr) -> Option<u8>) -> Self {
        if is_loopback(addr) {
            return Self::Loopback;
        }
        match owned(addr) {
            None => Self::Elsewhere,
            Some(ADDR_EXCLUDED) => Self::Excluded,
            Some(_) => Self::Own,
        }
    }

    /// Whether what is sent there never leaves the pod.
    #[inline(always)]
    pub const fn is_inside(self) -> bool {
        !matches!(self, Self::Elsewhere)
    }
}

/// The v4-mapped form of an IPv4 address in network order, as BPF contexts hold it.
#[inline(always)]
pub const fn v4_mapped(addr: u32) -> Addr {
    v6([0, 0, V4_PREFIX, addr])
}

/// An IPv6 address from the four words in network order that BPF contexts hold.
#[inline(always)]
pub const fn v6(words: [u32; 4]) -> Addr {
    transmute!(words)
}

// Compared by words: byte arrays are taken apart by the compiler into more instructions than the rest of a program.
#[inline(always)]
fn is_loopback(addr: &Addr) -> bool {
    let words: [u32; 4] = transmute!(*addr);
    match words {
        [0, 0, 0, last] => last == 1_u32.to_be(),
        [0, 0, V4_PREFIX, v4] => v4.to_ne_bytes()[0] == 127,
        _ => false,
    }
}

/// Whether it is in `fe80::/10`, and so means another host on each link.
#[inline(always)]
pub fn is_link_local_v6(addr: &Addr) -> bool {
    let [first, ..]: [u32; 4] = transmute!(*addr);
    u32::from_be(first) >> 22 == 0xfe80 >> 6
}

const V4_PREFIX: u32 = 0xffff_u32.to_be();

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv6Addr};
    use culvert_abi::ADDR_CAPTURED;

    fn addr(text: &str) -> Addr {
        match text.parse().unwrap() {
            IpAddr::V4(v4) => v4_mapped(u32::from_ne_bytes(v4.octets())),
            IpAddr::V6(v6) => Addr(v6.octets()),
        }
    }

    #[track_caller]
    fn place(text: &str, want: Place) {
        let owned = |a: &Addr| match a {
            a if *a == addr("10.0.0.7") => Some(ADDR_CAPTURED),
            a if *a == addr("10.9.0.7") => Some(ADDR_EXCLUDED),
            _ => None,
        };
        assert_eq!(Place::of(&addr(text), owned), want);
    }

    #[test]
    fn loopback_is_127_slash_8_its_mapped_form_and_v6_one() {
        for text in ["127.0.0.1", "127.255.255.254", "::ffff:127.0.0.53", "::1"] {
            place(text, Place::Loopback);
        }
    }

    #[test]
    fn neighbours_of_loopback_are_elsewhere() {
        for text in
            ["126.255.255.255", "128.0.0.1", "::", "::2", "::7f00:1", "::fffe:127.0.0.1", "1::1"]
        {
            place(text, Place::Elsewhere);
        }
    }

    #[test]
    fn an_own_address_is_found_in_either_spelling() {
        place("10.0.0.7", Place::Own);
        place("::ffff:10.0.0.7", Place::Own);
    }

    #[test]
    fn an_address_of_an_excluded_interface_is_told() {
        place("10.9.0.7", Place::Excluded);
    }

    #[test]
    fn a_link_local_address_is_known_by_its_first_ten_bits() {
        for (text, want) in
            [("fe80::1", true), ("febf::1", true), ("fec0::1", false), ("169.254.0.1", false)]
        {
            assert_eq!(is_link_local_v6(&addr(text)), want, "{text}");
        }
    }

    #[test]
    fn words_in_network_order_spell_the_address() {
        let want: Ipv6Addr = "fd00:1:2:3:4:5:6:7".parse().unwrap();
        let octets = want.octets();
        let word = |i: usize| u32::from_ne_bytes(octets[i..i + 4].try_into().unwrap());
        assert_eq!(v6([word(0), word(4), word(8), word(12)]), Addr(octets));
    }
}
