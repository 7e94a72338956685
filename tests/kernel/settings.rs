//! The settings of the pod that fixtures are run in, as words of the fixtures.

use aya::{
    Ebpf,
    maps::{HashMap, LpmTrie, lpm_trie::Key},
};
use culvert_abi::{ADDR_CAPTURED, ADDR_EXCLUDED, Exclusion, PodAddr, PodNetwork, Settings, maps};
use ipnet::IpNet;

use crate::{
    lookups::mapped,
    netns::{OWN_V4, OWN_V6},
    objects::POD_ID,
};

/// Gives the pod of `object` the settings `words`, separated by commas, in place of those that it has.
pub(crate) fn set(object: &mut Ebpf, words: &str) {
    clear(object);
    let mut flags = 0;
    let mut own = ADDR_CAPTURED;
    for word in words.split(',').filter(|word| !word.is_empty()) {
        let (name, value) = word.split_once(':').unwrap_or((word, ""));
        flags |= match name {
            "dns" => Settings::CAPTURE_DNS,
            "bypass-inbound" => Settings::BYPASS_INBOUND,
            "reroutes" => Settings::REROUTES,
            "inbound-port" => {
                exclude(object, Exclusion::INBOUND_PORT, value);
                Settings::INBOUND_PORTS
            }
            "outbound-port" => {
                exclude(object, Exclusion::OUTBOUND_PORT, value);
                Settings::OUTBOUND_PORTS
            }
            "interface" => {
                exclude(object, Exclusion::INTERFACE, value);
                Settings::INTERFACES
            }
            "own-address" => {
                own = ADDR_EXCLUDED;
                Settings::INTERFACES
            }
            "network" => {
                exclude_network(object, value);
                Settings::OUTBOUND_CIDRS
            }
            other => panic!("no such setting: {other}"),
        };
    }
    let mut settings: HashMap<_, u32, Settings> =
        object.map_mut(maps::SETTINGS).unwrap().try_into().unwrap();
    settings.insert(POD_ID, Settings { flags }, 0).unwrap();
    let mut addrs: HashMap<_, PodAddr, u8> =
        object.map_mut(maps::ADDRS).unwrap().try_into().unwrap();
    for ip in [OWN_V4, OWN_V6] {
        let key = PodAddr { pod: POD_ID, addr: mapped(ip.parse().unwrap()) };
        addrs.insert(key, own, 0).unwrap();
    }
}

fn clear(object: &mut Ebpf) {
    let mut exclusions: HashMap<_, Exclusion, u8> =
        object.map_mut(maps::EXCLUSIONS).unwrap().try_into().unwrap();
    for key in exclusions.keys().map(Result::unwrap).collect::<Vec<_>>() {
        exclusions.remove(&key).unwrap();
    }
    let mut networks: LpmTrie<_, PodAddr, u8> =
        object.map_mut(maps::EXCLUDED_CIDRS).unwrap().try_into().unwrap();
    for key in networks.keys().map(Result::unwrap).collect::<Vec<_>>() {
        networks.remove(&key).unwrap();
    }
}

fn exclude(object: &mut Ebpf, kind: u32, value: &str) {
    let mut exclusions: HashMap<_, Exclusion, u8> =
        object.map_mut(maps::EXCLUSIONS).unwrap().try_into().unwrap();
    let key = Exclusion { pod: POD_ID, kind, value: value.parse().unwrap() };
    exclusions.insert(key, 1, 0).unwrap();
}

/// `NETWORK`, or `!NETWORK` for one that is captured though a wider one is not; colons of IPv6 are written as `-`.
fn exclude_network(object: &mut Ebpf, value: &str) {
    let (value, excluded) = value.strip_prefix('!').map_or((value, 1), |value| (value, 0));
    let network: IpNet = value.replace('-', ":").parse().unwrap();
    let prefix = match network {
        IpNet::V4(v4) => v4.prefix_len() + 96,
        IpNet::V6(v6) => v6.prefix_len(),
    };
    let data = PodAddr { pod: POD_ID, addr: mapped(network.network()) };
    let mut networks: LpmTrie<_, PodAddr, u8> =
        object.map_mut(maps::EXCLUDED_CIDRS).unwrap().try_into().unwrap();
    networks.insert(&Key::new(PodNetwork::bits(prefix), data), excluded, 0).unwrap();
}
