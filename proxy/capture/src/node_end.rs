//! The node's end of a pod's interfaces: `guard_host` is attached there, out of the pod's reach, and drops what a packet
//! socket sends around `guard`.
//!
//! Only where an interface is a veth whose other end is in the namespace that this process runs in; others are reported
//! and left alone.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
};

use culvert_sys::netns::Netns;
use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    nsid::{NsidAttribute, NsidMessage},
};

use crate::{
    counts::Failure,
    error::{CaptureError, InNetns as _},
    filters::{Filter, Hook, Packets},
    hooks::{self, Existing, FilterProgram, Inside, Side},
    interfaces::{Interface, Kind},
    object::programs,
    pins::PodPins,
    pod::Steered,
    rtnl::Rtnl,
    tcx,
};

pub(crate) const GUARD_HOST: Filter =
    Filter { name: programs::GUARD_HOST, hook: Hook::Ingress, packets: Packets::All };

/// The loaded program, and the namespace where it is attached.
#[derive(Debug)]
pub(crate) struct NodeGuard {
    pub(crate) program: FilterProgram,
    pub(crate) home: Netns,
}

/// What was found at one look, by index.
#[derive(Debug, Default)]
pub(crate) struct NodeEnds {
    /// The node's ends that have the program.
    guarded: BTreeSet<u32>,
    /// The pod's interfaces whose other end is not to be had.
    unguarded: BTreeSet<u32>,
}

impl Steered {
    /// Attaches `guard_host` to the node's end of each interface; or takes it away, where it is not wanted and a process
    /// before had attached it. `excluded` are names of interfaces that the pod has settled to be left alone; `known` is of
    /// this process's look before.
    pub(crate) fn attach_node_guards(
        &self,
        inside: &mut Inside<'_>,
        excluded: &BTreeSet<String>,
        known: Option<&NodeEnds>,
    ) -> Result<NodeEnds, CaptureError> {
        let Some(guard) = &self.node_guard else {
            if known.is_none() {
                remove(&self.pins, Some(inside))?;
            }
            return Ok(NodeEnds::default());
        };
        let (ends, missing) = find(inside, &guard.home, excluded)?;
        for interface in &missing {
            if known.is_none_or(|known| !known.unguarded.contains(&interface.index)) {
                self.report(interface);
            }
        }
        let index = |interface: &Interface| interface.index;
        let found = NodeEnds {
            guarded: ends.iter().map(index).collect(),
            unguarded: missing.iter().map(index).collect(),
        };
        remove_links_but(&self.pins, &found.guarded)?;
        let mut rtnl = open(&guard.home)?;
        let here =
            &mut Inside { netns: &guard.home, rtnl: &mut rtnl, now: inside.now, side: Side::Node };
        let existing = known.map_or(Existing::Replace, |known| Existing::Keep(&known.guarded));
        for end in &ends {
            self.attach(here, end, (GUARD_HOST, &guard.program), existing)?;
        }
        Ok(found)
    }

    fn report(&self, interface: &Interface) {
        tracing::warn!(
            pod = self.pins.id(),
            interface = interface.name,
            "not a veth with its other end in this node's namespace: what the pod sends there past its own filters is \
             not stopped",
        );
        self.counts.failed(Failure::Unguarded, 1);
    }
}

/// Takes `guard_host` away. Without `inside` the pod's namespace is gone, and both ends of its interfaces with it.
pub(crate) fn remove(pins: &PodPins, inside: Option<&mut Inside<'_>>) -> Result<(), CaptureError> {
    remove_links_but(pins, &BTreeSet::new())?;
    let noted = pins.node_filters()?;
    let Some(inside) = inside.filter(|_| !noted.is_empty()) else { return Ok(()) };
    // A cleanup may run elsewhere than the process that is gone.
    let host = Path::new("/proc/1/ns/net");
    for home in [Netns::current(), Netns::open(host)].into_iter().flatten() {
        let (ends, _) = find(inside, &home, &BTreeSet::new())?;
        let mut rtnl = open(&home)?;
        let here = &mut Inside { netns: &home, rtnl: &mut rtnl, now: inside.now, side: Side::Node };
        for end in ends.iter().filter(|end| noted.contains(&end.index)) {
            hooks::detach(pins, here, end, GUARD_HOST)?;
            hooks::drop_qdisc(pins, here, end)?;
            pins.forget_node_filter(end.index)?;
        }
    }
    for interface in pins.node_filters()? {
        tracing::warn!(pod = pins.id(), interface, "the node's end of a pod is gone, or elsewhere");
    }
    Ok(())
}

/// Removes the links of ends that the pod does not have (any more).
fn remove_links_but(pins: &PodPins, ends: &BTreeSet<u32>) -> Result<(), CaptureError> {
    let links = pins.tc_links()?.into_iter().filter(|link| link.program == GUARD_HOST.name);
    links
        .filter(|link| !ends.contains(&link.interface))
        .try_for_each(|link| tcx::remove(&link.path))
}

/// The ends of the pod's interfaces that are in `home`, and the interfaces that have none there.
fn find(
    inside: &mut Inside<'_>,
    home: &Netns,
    excluded: &BTreeSet<String>,
) -> Result<(Vec<Interface>, Vec<Interface>), CaptureError> {
    let home = number_of(inside.rtnl, home)
        .in_netns(inside.netns.inode(), "ask how the node's namespace is numbered")?;
    let (mut ends, mut missing) = (Vec::new(), Vec::new());
    let outside = inside.now.iter().filter(|interface| interface.kind == Kind::Outside);
    for interface in outside.filter(|interface| !excluded.contains(&interface.name)) {
        match interface.peer.filter(|peer| peer.netns.is_some() && peer.netns == home) {
            Some(peer) => ends.push(Interface {
                index: peer.index,
                name: format!("the node's end of {}", interface.name),
                kind: Kind::Outside,
                peer: None,
            }),
            None => missing.push(interface.clone()),
        }
    }
    Ok((ends, missing))
}

/// How the client's namespace numbers `netns`, if it does.
fn number_of(rtnl: &mut Rtnl, netns: &Netns) -> io::Result<Option<i32>> {
    let fd = netns.as_fd().as_raw_fd().cast_unsigned();
    let mut request = NsidMessage::default();
    request.attributes = vec![NsidAttribute::Fd(fd)];
    let answer = rtnl.ask(RouteNetlinkMessage::GetNsId(request))?;
    Ok(answer.iter().find_map(|message| {
        let RouteNetlinkMessage::NewNsId(message) = message else { return None };
        message.attributes.iter().find_map(|attribute| match attribute {
            // Below zero it has none.
            NsidAttribute::Id(id) => (*id >= 0).then_some(*id),
            _ => None,
        })
    }))
}

fn open(home: &Netns) -> Result<Rtnl, CaptureError> {
    Rtnl::open(home).in_netns(home.inode(), "open rtnetlink")
}
