//! The interfaces and addresses of a network namespace, as one snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv6Addr},
};

use culvert_sys::netns::Netns;
use ipnet::IpNet;
use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
};

use crate::{
    error::{CaptureError, InNetns as _},
    rtnl::Rtnl,
};

/// Of one pod, in maps that all pods of a node share: what a pod adds to itself beyond that must not take the others'
/// room.
const MAX_ADDRESSES: usize = 256;

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// The other end, of a veth.
    pub(crate) peer: Option<Peer>,
}

/// The other end of a veth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its index in the namespace where it is.
    pub(crate) index: u32,
    /// How the veth's own namespace numbers that one; `None` if it is the same.
    pub(crate) netns: Option<i32>,
}

/// What an interface is to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `lo`.
    Loopback,
    /// Leads out of the pod.
    Outside,
}

#[derive(Clone, Debug)]
struct Address {
    ip: IpAddr,
    /// How much of it the link has in common.
    prefix: u8,
    interface: u32,
    standing: Standing,
}

/// How good an address is as a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Primary,
    /// Secondary, deprecated or temporary.
    Lesser,
    /// Link-local, or not yet proved unique.
    Unfit,
}

/// What a namespace holds at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interfaces {
    interfaces: Vec<Interface>,
    addresses: Vec<Address>,
}

impl Interfaces {
    fn read(rtnl: &mut Rtnl) -> io::Result<Self> {
        let links = rtnl.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        let addresses = rtnl.dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        Ok(Self {
            interfaces: links.iter().filter_map(interface).collect(),
            addresses: addresses.iter().filter_map(address).collect(),
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Interface> {
        self.interfaces.iter()
    }

    pub(crate) fn loopback(&self) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.kind == Kind::Loopback)
    }

    /// All addresses that are the pod's own, link-local and secondary ones included, `127.0.0.0/8` and `::1` not.
    pub(crate) fn owned(&self) -> BTreeSet<IpAddr> {
        self.addresses.iter().map(|address| address.ip).filter(|ip| !ip.is_loopback()).collect()
    }

    /// The same with the interface of each; `None` where several have it.
    pub(crate) fn owners(&self) -> BTreeMap<IpAddr, Option<u32>> {
        let mut owners = BTreeMap::new();
        for address in self.addresses.iter().filter(|address| !address.ip.is_loopback()) {
            owners
                .entry(address.ip)
                .and_modify(|owner| *owner = None)
                .or_insert(Some(address.interface));
        }
        owners
    }

    /// As many of the pod's own addresses as the maps may hold for one pod, and how many are left over. Those that
    /// connections start from come first, then those `held` already, then the kernel's order.
    pub(crate) fn tracked(&self, held: &BTreeSet<IpAddr>) -> (BTreeSet<IpAddr>, usize) {
        let owned = self.owned();
        let primary = Family::ALL.into_iter().filter_map(|family| self.primary(family));
        let in_order = self.addresses.iter().map(|address| address.ip);
        let mut tracked = BTreeSet::new();
        for ip in primary.chain(owned.intersection(held).copied()).chain(in_order) {
            if tracked.len() == MAX_ADDRESSES {
                break;
            }
            if owned.contains(&ip) {
                tracked.insert(ip);
            }
        }
        let left_over = owned.len() - tracked.len();
        (tracked, left_over)
    }

    /// Addresses that only interfaces of these names have.
    pub(crate) fn addresses_of_only(&self, names: &BTreeSet<String>) -> BTreeSet<IpAddr> {
        let named = self.indexes(names);
        let (of, beside): (Vec<_>, Vec<_>) =
            self.addresses.iter().partition(|address| named.contains(&address.interface));
        let beside: BTreeSet<_> = beside.iter().map(|address| address.ip).collect();
        of.iter().map(|address| address.ip).filter(|ip| !beside.contains(ip)).collect()
    }

    /// The networks that interfaces of these names are on; not the link-local ones, which are every link's.
    pub(crate) fn networks_of(&self, names: &BTreeSet<String>) -> Vec<IpNet> {
        let named = self.indexes(names);
        let on = self.addresses.iter().filter(|address| {
            named.contains(&address.interface) && !is_link_local(address.ip) && address.prefix > 0
        });
        on.filter_map(|address| IpNet::new(address.ip, address.prefix).ok()).collect()
    }

    fn indexes(&self, names: &BTreeSet<String>) -> BTreeSet<u32> {
        let named = self.interfaces.iter().filter(|interface| names.contains(&interface.name));
        named.map(|interface| interface.index).collect()
    }

    /// The address that a captured connection of the family starts from when the application has bound none.
    pub(crate) fn primary(&self, family: Family) -> Option<IpAddr> {
        let loopback = self.loopback().map(|interface| interface.index);
        self.addresses
            .iter()
            .filter(|address| Family::of(address.ip) == family && !address.ip.is_loopback())
            .filter(|address| address.standing != Standing::Unfit)
            // Among equals, the kernel's own order: the first address of the first interface.
            .min_by_key(|address| (address.standing, Some(address.interface) == loopback))
            .map(|address| address.ip)
    }

    /// Whether it is the address that others know the pod by.
    pub(crate) fn is_known_by(&self, ip: IpAddr) -> bool {
        self.primary(Family::of(ip)) == Some(ip)
    }
}

/// A client inside a namespace, and what it sees there.
pub(crate) fn look_into(netns: &Netns) -> Result<(Rtnl, Interfaces), CaptureError> {
    let id = netns.inode();
    let mut rtnl = Rtnl::open(netns).in_netns(id, "open rtnetlink")?;
    let now = Interfaces::read(&mut rtnl).in_netns(id, "read the interfaces")?;
    Ok((rtnl, now))
}

/// Whether the address means another host on each link.
pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The form that BPF maps hold: IPv4 in its v4-mapped form.
pub(crate) fn to_abi(ip: IpAddr) -> culvert_abi::Addr {
    culvert_abi::Addr(match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    })
}

/// The inverse of [`to_abi`].
pub(crate) fn from_abi(addr: culvert_abi::Addr) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(addr.0)).to_canonical()
}

fn interface(message: &RouteNetlinkMessage) -> Option<Interface> {
    let RouteNetlinkMessage::NewLink(link) = message else { return None };
    let name = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let kind = if link.header.flags.contains(LinkFlags::Loopback) {
        Kind::Loopback
    } else {
        Kind::Outside
    };
    Some(Interface { index: link.header.index, name, kind, peer: peer(link) })
}

fn peer(link: &LinkMessage) -> Option<Peer> {
    let veth = LinkInfo::Kind(InfoKind::Veth);
    let (mut is_veth, mut index, mut netns) = (false, None, None);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::LinkInfo(info) => is_veth = info.contains(&veth),
            LinkAttribute::Link(other) => index = Some(*other),
            LinkAttribute::LinkNetNsId(id) => netns = Some(*id),
            _ => {}
        }
    }
    is_veth.then_some(Peer { index: index?, netns })
}

fn address(message: &RouteNetlinkMessage) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = message else { return None };
    let mut local = None;
    let mut remote = None;
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => remote = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    // On a point-to-point link `Address` is the other end's; elsewhere it is the only one that IPv6 sends.
    let ip = local.or(remote)?;
    Some(Address {
        ip,
        prefix: message.header.prefix_len,
        interface: message.header.index,
        standing: standing(message, flags, ip),
    })
}

fn standing(message: &AddressMessage, flags: AddressFlags, ip: IpAddr) -> Standing {
    let unproved = AddressFlags::Tentative | AddressFlags::Dadfailed;
    let lesser = AddressFlags::Secondary | AddressFlags::Deprecated;
    if flags.intersects(unproved) || is_link_local(ip) || message.header.scope == AddressScope::Link
    {
        Standing::Unfit
    } else if flags.intersects(lesser) {
        Standing::Lesser
    } else {
        Standing::Primary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces(addresses: &[(&str, u32, Standing)]) -> Interfaces {
        let interface =
            |index, name: &str, kind| Interface { index, name: name.to_owned(), kind, peer: None };
        Interfaces {
            interfaces: vec![
                interface(1, "lo", Kind::Loopback),
                interface(2, "eth0", Kind::Outside),
            ],
            addresses: addresses
                .iter()
                .map(|(ip, interface, standing)| Address {
                    ip: ip.parse().unwrap(),
                    prefix: if ip.contains(':') { 64 } else { 24 },
                    interface: *interface,
                    standing: *standing,
                })
                .collect(),
        }
    }

    #[test]
    fn the_primary_address_is_one_that_others_can_reach() {
        let all = interfaces(&[
            ("127.0.0.1", 1, Standing::Primary),
            ("10.9.9.9", 1, Standing::Primary),
            ("169.254.1.1", 2, Standing::Unfit),
            ("10.0.0.6", 2, Standing::Lesser),
            ("10.0.0.5", 2, Standing::Primary),
            ("fe80::1", 2, Standing::Unfit),
        ]);
        assert_eq!(all.primary(Family::V4), Some("10.0.0.5".parse().unwrap()));
        assert_eq!(all.primary(Family::V6), None);
        assert_eq!(all.owned().len(), 5);
    }

    #[test]
    fn an_address_of_several_interfaces_tells_none_of_them() {
        let owners = interfaces(&[
            ("127.0.0.1", 1, Standing::Primary),
            ("fe80::1", 2, Standing::Unfit),
            ("fe80::2", 2, Standing::Unfit),
            ("fe80::2", 3, Standing::Unfit),
        ])
        .owners();
        let owner = |ip: &str| owners.get(&ip.parse::<IpAddr>().unwrap()).copied();
        assert_eq!(owner("fe80::1"), Some(Some(2)));
        assert_eq!(owner("fe80::2"), Some(None));
        assert_eq!(owner("127.0.0.1"), None);
    }

    #[test]
    fn no_more_addresses_are_tracked_than_a_pod_may_have() {
        let many: Vec<String> = (0..300).map(|n| format!("10.1.{}.{}", n / 200, n % 200)).collect();
        let mut addresses: Vec<_> =
            many.iter().map(|ip| (ip.as_str(), 1, Standing::Lesser)).collect();
        addresses.push(("10.200.0.5", 2, Standing::Primary));
        let all = interfaces(&addresses);
        let held = BTreeSet::from(["10.1.1.99".parse().unwrap(), "10.9.9.9".parse().unwrap()]);
        let (tracked, left_over) = all.tracked(&held);
        assert_eq!((tracked.len(), left_over), (256, 45));
        for (ip, wanted) in
            [("10.200.0.5", true), ("10.1.1.99", true), ("10.1.0.0", true), ("10.9.9.9", false)]
        {
            assert_eq!(tracked.contains(&ip.parse().unwrap()), wanted, "{ip}");
        }
    }

    #[test]
    fn an_address_is_an_interfaces_alone_only_if_no_other_has_it() {
        let all = interfaces(&[
            ("10.0.0.5", 2, Standing::Primary),
            ("fe80::2", 2, Standing::Unfit),
            ("fe80::2", 1, Standing::Unfit),
            ("10.9.9.9", 1, Standing::Primary),
        ]);
        let only = |name: &str| all.addresses_of_only(&BTreeSet::from([name.to_owned()]));
        assert_eq!(only("eth0"), BTreeSet::from(["10.0.0.5".parse().unwrap()]));
        assert_eq!(only("net1"), BTreeSet::new());
        let networks = all.networks_of(&BTreeSet::from(["eth0".to_owned()]));
        assert!(networks.iter().any(|net| net.contains(&"10.0.0.200".parse::<IpAddr>().unwrap())));
        for foreign in ["10.0.1.1", "fe80::1"] {
            let foreign: IpAddr = foreign.parse().unwrap();
            assert!(!networks.iter().any(|net| net.contains(&foreign)), "{foreign}");
        }
    }

    #[test]
    fn addresses_survive_the_way_to_a_map_and_back() {
        for ip in ["10.0.0.5", "fd00::5", "fe80::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            assert_eq!(from_abi(to_abi(ip)), ip);
        }
    }
}
