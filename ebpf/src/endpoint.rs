// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Addresses and ports as the programs compare them: IPv4 in its v4-mapped form, ports in host order.
//!
//! Which addresses a pod owns is known by the map `addrs`; the caller looks that up.

use culvert_abi::Addr;
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
    /// Any other address.
    Elsewhere,
}

impl Place {
    /// Places `addr`; `owned` tells whether the pod has it, and is not asked about loopback.
    #[inline(always)]
    pub fn of(addr: &Addr, owned: impl FnOnce(&Addr) -> bool) -> Self {
        if is_loopback(addr) {
            Self::Loopback
        } else if owned(addr) {
            Self::Own
        } else {
            Self::Elsewhere
        }
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

const V4_PREFIX: u32 = 0xffff_u32.to_be();

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv6Addr};

    fn addr(text: &str) -> Addr {
        match text.parse().unwrap() {
            IpAddr::V4(v4) => v4_mapped(u32::from_ne_bytes(v4.octets())),
            IpAddr::V6(v6) => Addr(v6.octets()),
        }
    }

    #[track_caller]
    fn place(text: &str, want: Place) {
        assert_eq!(Place::of(&addr(text), |a| *a == addr("10.0.0.7")), want);
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
    fn words_in_network_order_spell_the_address() {
        let want: Ipv6Addr = "fd00:1:2:3:4:5:6:7".parse().unwrap();
        let octets = want.octets();
        let word = |i: usize| u32::from_ne_bytes(octets[i..i + 4].try_into().unwrap());
        assert_eq!(v6([word(0), word(4), word(8), word(12)]), Addr(octets));
    }
}
