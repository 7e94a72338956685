//! The rules and routes that bring marked packets to `lo`, in a table, at preferences and under a protocol number of
//! our own; anything else in the namespace is left alone.

use std::{collections::BTreeSet, io, net::IpAddr};

use culvert_abi::{MARK_CAPTURED, MARK_DELIVERY, MARK_MASK};
use nix::errno::Errno;
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE},
    packet_route::{
        AddressFamily, IpProtocol, RouteNetlinkMessage,
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use crate::{
    interfaces::Family,
    rtnl::{Rtnl, tolerate},
};

const TABLE: u32 = 1111;
/// Of both rules and routes; how we know ours again.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(193);
/// Before `main` (32766); the rule of `local` (0) stays first.
const RULES: [(u32, u32); 2] = [(MARK_CAPTURED, 1110), (MARK_DELIVERY, 1111)];
/// Of the rules by interface.
const REROUTE: u32 = 1112;

/// Adds the rules of `family`, where they are missing and the kernel has the family; gives the marks of those that were.
pub(crate) fn add_rules(rtnl: &mut Rtnl, family: Family) -> io::Result<Vec<u32>> {
    let mut missing = Vec::new();
    for (mark, preference) in RULES {
        let request = RouteNetlinkMessage::NewRule(rule(family, mark, preference));
        match rtnl.change(request, NLM_F_CREATE | NLM_F_EXCL) {
            Ok(()) => missing.push(mark),
            added => {
                let added = tolerate(added, Errno::EEXIST);
                match family {
                    Family::V4 => added?,
                    Family::V6 => tolerate(added, Errno::EAFNOSUPPORT)?,
                }
            }
        }
    }
    Ok(missing)
}

/// Makes what each of these interfaces brings in by TCP arrive at `lo`, and of no others; gives those whose rule was missing.
/// An interface that is not there yet is found by its name once it comes.
pub(crate) fn set_reroutes(
    rtnl: &mut Rtnl,
    family: Family,
    interfaces: &BTreeSet<String>,
) -> io::Result<BTreeSet<String>> {
    let mut missing = interfaces.clone();
    for rule in our_rules(rtnl, family)? {
        let Some(name) = interface_of(&rule) else { continue };
        let wanted = interfaces.contains(&name) && is_reroute(&rule, family, &name);
        // A second one like it does no good.
        if !(wanted && missing.remove(&name)) {
            tolerate(rtnl.change(RouteNetlinkMessage::DelRule(rule), 0), Errno::ENOENT)?;
        }
    }
    for name in &missing {
        let request = RouteNetlinkMessage::NewRule(reroute(family, name));
        let added = rtnl.change(request, NLM_F_CREATE | NLM_F_EXCL);
        match family {
            Family::V4 => added?,
            Family::V6 => tolerate(added, Errno::EAFNOSUPPORT)?,
        }
    }
    Ok(missing)
}

/// Whether [`set_route`] with the same `source` has been called, and nothing has happened to the route since.
pub(crate) fn has_route(rtnl: &mut Rtnl, loopback: u32, source: IpAddr) -> io::Result<bool> {
    let mut request = RouteMessage::default();
    request.header.address_family = address_family(Family::of(source));
    request.attributes.push(RouteAttribute::Table(TABLE));
    let routes = match rtnl.dump(&RouteNetlinkMessage::GetRoute(request)) {
        Ok(routes) => routes,
        // There is no such table.
        Err(e) if e.raw_os_error() == Some(Errno::ENOENT as i32) => return Ok(false),
        Err(e) => return Err(e),
    };
    let wanted = [RouteAttribute::Table(TABLE), RouteAttribute::Oif(loopback), prefer(source)];
    Ok(routes.iter().any(|found| match found {
        RouteNetlinkMessage::NewRoute(found) => {
            (found.header.kind, found.header.destination_prefix_length) == (RouteType::Local, 0)
                && wanted.iter().all(|attribute| found.attributes.contains(attribute))
        }
        _ => false,
    }))
}

/// Sends what the rules select to `lo`. Without `source`, a second `connect()` of one socket would be unroutable.
pub(crate) fn set_route(rtnl: &mut Rtnl, loopback: u32, source: IpAddr) -> io::Result<()> {
    let mut message = route(Family::of(source));
    message.header.scope = RouteScope::Host;
    message.header.kind = RouteType::Local;
    message.attributes.push(RouteAttribute::Oif(loopback));
    message.attributes.push(prefer(source));
    rtnl.change(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_REPLACE)
}

/// Removes the route of `family`, if it is there.
pub(crate) fn remove_route(rtnl: &mut Rtnl, family: Family) -> io::Result<()> {
    let removed = rtnl.change(RouteNetlinkMessage::DelRoute(route(family)), 0);
    let removed = tolerate(removed, Errno::ESRCH);
    // What the kernel says when it has no such table, or not even the family.
    let removed = tolerate(removed, Errno::ENOENT);
    tolerate(tolerate(removed, Errno::EAFNOSUPPORT), Errno::EOPNOTSUPP)
}

/// Removes our rules of `family`, however many there are.
pub(crate) fn remove_rules(rtnl: &mut Rtnl, family: Family) -> io::Result<()> {
    for rule in our_rules(rtnl, family)? {
        tolerate(rtnl.change(RouteNetlinkMessage::DelRule(rule), 0), Errno::ENOENT)?;
    }
    Ok(())
}

fn our_rules(rtnl: &mut Rtnl, family: Family) -> io::Result<Vec<RuleMessage>> {
    let mut request = RuleMessage::default();
    request.header.family = address_family(family);
    let rules = match rtnl.dump(&RouteNetlinkMessage::GetRule(request)) {
        Ok(rules) => rules,
        Err(e) if e.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let ours = [RuleAttribute::Protocol(PROTOCOL), RuleAttribute::Table(TABLE)];
    let rules = rules.into_iter().filter_map(|rule| match rule {
        RouteNetlinkMessage::NewRule(rule) => Some(rule),
        _ => None,
    });
    Ok(rules.filter(|rule| ours.iter().all(|one| rule.attributes.contains(one))).collect())
}

fn interface_of(rule: &RuleMessage) -> Option<String> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Iifname(name) => Some(name.clone()),
        _ => None,
    })
}

/// Whether the kernel's rule is the one that [`reroute`] has made.
fn is_reroute(rule: &RuleMessage, family: Family, interface: &str) -> bool {
    let wanted = reroute(family, interface);
    rule.header.action == wanted.header.action
        && wanted.attributes.iter().all(|attribute| rule.attributes.contains(attribute))
}

fn reroute(family: Family, interface: &str) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = address_family(family);
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(REROUTE),
        RuleAttribute::Iifname(interface.to_owned()),
        RuleAttribute::IpProtocol(IpProtocol::Tcp),
        RuleAttribute::Table(TABLE),
        RuleAttribute::Protocol(PROTOCOL),
    ];
    message
}

fn rule(family: Family, mark: u32, preference: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = address_family(family);
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(preference),
        RuleAttribute::FwMark(mark),
        RuleAttribute::FwMask(MARK_MASK),
        RuleAttribute::Table(TABLE),
        RuleAttribute::Protocol(PROTOCOL),
    ];
    message
}

fn route(family: Family) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = address_family(family);
    message.header.protocol = PROTOCOL;
    // 0 (RT_SCOPE_UNIVERSE) would match only such a route on removal.
    message.header.scope = RouteScope::NoWhere;
    message.attributes.push(RouteAttribute::Table(TABLE));
    message
}

const fn prefer(source: IpAddr) -> RouteAttribute {
    RouteAttribute::PrefSource(match source {
        IpAddr::V4(ip) => RouteAddress::Inet(ip),
        IpAddr::V6(ip) => RouteAddress::Inet6(ip),
    })
}

const fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}
