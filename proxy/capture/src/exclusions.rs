//! A pod's settings as the programs read them: flags, and entries of the maps that all pods of a node share.

use std::{collections::BTreeSet, net::IpAddr};

use culvert_abi::{Addr, Exclusion, Settings as Flags};
use ipnet::IpNet;

use crate::{
    interfaces::{Interfaces, to_abi},
    settings::Settings,
};

/// Value of a network whose addresses are excluded.
pub(crate) const EXCLUDED: u8 = 1;
/// Value of a network whose addresses are not, though a wider one of the other family holds them too.
const NOT_EXCLUDED: u8 = 0;
/// How much longer an IPv4 prefix is in the form that the maps hold.
const MAPPED: u8 = 96;

/// What the maps hold for one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entries {
    pub(crate) flags: u32,
    /// Kind and value, as in [`Exclusion`].
    pub(crate) exclusions: BTreeSet<(u32, u32)>,
    /// Length of the prefix, network, and value.
    pub(crate) networks: BTreeSet<(u8, [u8; 16], u8)>,
}

impl Entries {
    /// What the maps must hold for these settings, with the interfaces that are there.
    pub(crate) fn of(settings: &Settings, now: &Interfaces) -> Self {
        let mut entries = Self::default();
        let ports = |kind, ports: &BTreeSet<u16>| {
            let entry = move |port: &u16| (kind, u32::from(*port));
            ports.iter().map(entry).collect::<Vec<_>>()
        };
        let inbound = ports(Exclusion::INBOUND_PORT, &settings.exclude_inbound_ports);
        let outbound = ports(Exclusion::OUTBOUND_PORT, &settings.exclude_outbound_ports);
        let interfaces = now.iter().filter(|i| settings.exclude_interfaces.contains(&i.name));
        let interfaces: Vec<_> = interfaces.map(|i| (Exclusion::INTERFACE, i.index)).collect();
        for (flag, set) in [
            (Flags::CAPTURE_DNS, settings.capture_dns),
            (Flags::BYPASS_INBOUND, settings.bypass_inbound),
            (Flags::INBOUND_PORTS, !inbound.is_empty()),
            (Flags::OUTBOUND_PORTS, !outbound.is_empty()),
            (Flags::OUTBOUND_CIDRS, !settings.exclude_outbound_cidrs.is_empty()),
            (Flags::INTERFACES, !interfaces.is_empty()),
            (Flags::REROUTES, !settings.reroute_interfaces.is_empty()),
        ] {
            if set {
                entries.flags |= flag;
            }
        }
        entries.exclusions.extend(inbound);
        entries.exclusions.extend(outbound);
        entries.exclusions.extend(interfaces);
        for net in &settings.exclude_outbound_cidrs {
            let Addr(addr) = to_abi(net.network());
            let prefix = match net {
                IpNet::V4(net) => net.prefix_len() + MAPPED,
                IpNet::V6(net) => net.prefix_len(),
            };
            entries.networks.insert((prefix, addr, EXCLUDED));
        }
        entries.keep_families_apart();
        entries
    }

    /// IPv4 is a network of IPv6 in the form that the maps hold: where a wide one of IPv6 would take it in, it gets an entry
    /// of its own.
    fn keep_families_apart(&mut self) {
        let all_v4 = to_abi(IpAddr::from([0_u8; 4])).0;
        let holds_v4 = |(prefix, addr, _): &(u8, [u8; 16], u8)| {
            let mask = u128::MAX.checked_shl(128 - u32::from(*prefix)).unwrap_or(0);
            *prefix < MAPPED && (u128::from_be_bytes(all_v4) & mask) == u128::from_be_bytes(*addr)
        };
        if self.networks.iter().any(holds_v4) {
            let own = (MAPPED, all_v4, EXCLUDED);
            if !self.networks.contains(&own) {
                self.networks.insert((MAPPED, all_v4, NOT_EXCLUDED));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidrs(cidrs: &[&str]) -> Vec<(u8, u8)> {
        let settings = Settings {
            exclude_outbound_cidrs: cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect(),
            ..Settings::default()
        };
        let entries = Entries::of(&settings, &Interfaces::default());
        entries.networks.iter().map(|(prefix, _, value)| (*prefix, *value)).collect()
    }

    #[test]
    fn a_wide_network_of_ipv6_does_not_take_in_ipv4() {
        assert_eq!(cidrs(&["fd00::/8"]), [(8, 1)]);
        assert_eq!(cidrs(&["10.0.0.0/8"]), [(104, 1)]);
        assert_eq!(cidrs(&["::/0"]), [(0, 1), (96, 0)]);
        assert_eq!(cidrs(&["::/80"]), [(80, 1), (96, 0)]);
        assert_eq!(cidrs(&["::/0", "10.0.0.0/8"]), [(0, 1), (96, 0), (104, 1)]);
        assert_eq!(cidrs(&["::/0", "0.0.0.0/0"]), [(0, 1), (96, 1)]);
        assert_eq!(cidrs(&["::/96"]), [(96, 1)]);
    }

    #[test]
    fn flags_say_which_maps_to_ask() {
        let flags = |settings| Entries::of(&settings, &Interfaces::default()).flags;
        let port = || BTreeSet::from([80]);
        let none = Settings::default();
        for (settings, want) in [
            (none.clone(), 0),
            (Settings { capture_dns: true, ..none.clone() }, Flags::CAPTURE_DNS),
            (Settings { bypass_inbound: true, ..none.clone() }, Flags::BYPASS_INBOUND),
            (Settings { exclude_inbound_ports: port(), ..none.clone() }, Flags::INBOUND_PORTS),
            (Settings { exclude_outbound_ports: port(), ..none.clone() }, Flags::OUTBOUND_PORTS),
            // None of that name is there yet.
            (
                Settings {
                    exclude_interfaces: BTreeSet::from(["net1".to_owned()]),
                    ..none.clone()
                },
                0,
            ),
            (
                Settings { reroute_interfaces: BTreeSet::from(["br0".to_owned()]), ..none },
                Flags::REROUTES,
            ),
        ] {
            assert_eq!(flags(settings.clone()), want, "{settings:?}");
        }
    }
}
