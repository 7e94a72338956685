//! Which program of ours belongs at which hook of a pod's interfaces, and by what it is attached there: a tcx link where
//! the kernel has them, else a netlink filter. That is found by trying, hook by hook, never by the kernel's version.
//!
//! `tcx` and `filters` know how each of the two is done.

use std::{collections::BTreeSet, fs, os::fd::AsFd as _, sync::PoisonError};

use aya::programs::{ProgramError, ProgramFd, SchedClassifier};
use culvert_sys::netns::Netns;

use crate::{
    counts::Repair,
    error::{CaptureError, InNetns as _},
    filters::{self, Filter, Hook, Packets, Qdisc},
    interfaces::{Interface, Interfaces, Kind},
    node::WhenDown,
    object::{self, programs},
    pins::{PodPins, pin_error},
    pod::Steered,
    rtnl::Rtnl,
    tcx::{self, Place, Standing},
};

pub(crate) const HOLD_IN: Filter =
    Filter { name: programs::HOLD_IN, hook: Hook::Ingress, packets: Packets::All };
/// IPv4 needs none: an outbound SYN that finds no listener is not answered at all.
pub(crate) const HOLD_OUT: Filter =
    Filter { name: programs::HOLD_OUT, hook: Hook::Ingress, packets: Packets::Ipv6 };
pub(crate) const GUARD: Filter =
    Filter { name: programs::GUARD, hook: Hook::Egress, packets: Packets::All };

/// The loaded programs, for interfaces that appear later.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) hold_in: FilterProgram,
    pub(crate) hold_out: FilterProgram,
    pub(crate) guard: FilterProgram,
}

/// A loaded program for a hook of tc.
#[derive(Debug)]
pub(crate) struct FilterProgram {
    pub(crate) fd: ProgramFd,
    /// How the kernel names it to whoever lists what is attached.
    pub(crate) id: u32,
}

impl FilterProgram {
    /// Loads it from the pod's object.
    pub(crate) fn load(object: &mut aya::Ebpf, name: &'static str) -> Result<Self, CaptureError> {
        let refused = |source| CaptureError::Program { attempt: "load", program: name, source };
        let program: &mut SchedClassifier = object::program(object, name)?;
        program.load().map_err(refused)?;
        let id = program.info().map_err(refused)?.id();
        let fd = program.fd().map_err(refused)?;
        let fd = fd.try_clone().map_err(ProgramError::IOError).map_err(refused)?;
        Ok(Self { fd, id })
    }
}

/// What becomes of a program of ours that is attached already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing<'a> {
    /// It is of this process, which has attached all of them to these interfaces.
    Keep(&'a BTreeSet<u32>),
    /// It is of a process before.
    Replace,
}

impl WhenDown {
    /// Whether the program is needed. What is marked must be held also on a node that is open while no process runs: when
    /// the next one starts, it marks before each pod has its listeners again.
    fn holds(self, filter: Filter) -> bool {
        match self {
            Self::Hold => true,
            Self::Refuse => false,
            Self::Open => filter.name == programs::HOLD_OUT,
        }
    }
}

/// Which end of a pod's interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// In the pod.
    Pod,
    /// In the node's namespace.
    Node,
}

/// A namespace while the hooks there are looked after.
pub(crate) struct Inside<'a> {
    pub(crate) netns: &'a Netns,
    pub(crate) rtnl: &'a mut Rtnl,
    /// What the pod has.
    pub(crate) now: &'a Interfaces,
    pub(crate) side: Side,
}

impl<'a> Inside<'a> {
    /// A pod's.
    pub(crate) fn pod(netns: &'a Netns, rtnl: &'a mut Rtnl, now: &'a Interfaces) -> Self {
        Self { netns, rtnl, now, side: Side::Pod }
    }
}

impl Steered {
    /// Attaches what holds connections while there is no listener, where they are to be held.
    pub(crate) fn attach_holds(
        &self,
        inside: &mut Inside<'_>,
        existing: Existing<'_>,
    ) -> Result<(), CaptureError> {
        for interface in inside.now.iter() {
            let (filter, program) = match interface.kind {
                Kind::Loopback => (HOLD_OUT, &self.programs.hold_out),
                Kind::Outside => (HOLD_IN, &self.programs.hold_in),
            };
            if self.when_down.holds(filter) {
                self.attach(inside, interface, (filter, program), existing)?;
            } else if matches!(existing, Existing::Replace) {
                // Of a process before, under which connections were held.
                detach(&self.pins, inside, interface, filter)?;
            }
        }
        Ok(())
    }

    /// Attaches what drops that which capture has missed.
    pub(crate) fn attach_guards(
        &self,
        inside: &mut Inside<'_>,
        existing: Existing<'_>,
    ) -> Result<(), CaptureError> {
        for interface in inside.now.iter().filter(|interface| interface.kind == Kind::Outside) {
            self.attach(inside, interface, (GUARD, &self.programs.guard), existing)?;
        }
        Ok(())
    }

    /// Attaches a program.
    pub(crate) fn attach(
        &self,
        inside: &mut Inside<'_>,
        interface: &Interface,
        (filter, program): (Filter, &FilterProgram),
        existing: Existing<'_>,
    ) -> Result<(), CaptureError> {
        let place = place(&self.pins, inside.netns, interface, filter);
        let standing = place.standing()?;
        let running = match standing {
            Standing::Unsupported => {
                return self.attach_filter(inside, interface, (filter, program), existing);
            }
            Standing::Absent => None,
            Standing::First(running) | Standing::Behind(running) => Some(running),
        };
        let is_ours = running == Some(program.id);
        match standing {
            Standing::First(_) if is_ours => {}
            Standing::First(_) => place.update(program.fd.as_fd())?,
            Standing::Behind(_) if is_ours => {
                // A program is not twice in a chain: until the new link is ahead, another copy runs by the old one.
                let copy = self.load_again(filter.name)?;
                place.update(copy.fd.as_fd())?;
                place.attach(program.fd.as_fd())?;
            }
            Standing::Behind(_) | Standing::Absent | Standing::Unsupported => {
                place.attach(program.fd.as_fd())?;
            }
        }
        match existing {
            // Of a version that had netlink filters alone: it goes once the link is in.
            Existing::Replace => {
                detach_filter(inside, interface, filter)?;
                drop_qdisc(&self.pins, inside, interface)
            }
            Existing::Keep(known) => {
                let repair = match standing {
                    Standing::First(_) if is_ours => return Ok(()),
                    Standing::Behind(_) => Repair::FilterOrder,
                    _ => Repair::Filter,
                };
                if known.contains(&interface.index) {
                    let what = format_args!("{} of {}, by a tcx link", filter.name, interface.name);
                    self.counts.repaired(self.pins.id(), repair, what);
                }
                Ok(())
            }
        }
    }

    /// Another copy of a program that is loaded, on the same maps.
    fn load_again(&self, name: &'static str) -> Result<FilterProgram, CaptureError> {
        let listeners = self.pins.listeners();
        // A new map would be an empty one, which must not be pinned in its place.
        fs::metadata(&listeners).map_err(pin_error("open", &listeners))?;
        let mut loader = self.loader.lock().unwrap_or_else(PoisonError::into_inner);
        FilterProgram::load(&mut loader.load_pod(&self.pins)?, name)
    }

    /// Attaches a netlink filter, and the qdisc that it needs.
    fn attach_filter(
        &self,
        inside: &mut Inside<'_>,
        interface: &Interface,
        (filter, program): (Filter, &FilterProgram),
        existing: Existing<'_>,
    ) -> Result<(), CaptureError> {
        let (id, Interface { index, name, .. }) = (inside.netns.inode(), interface);
        let attempt = || format!("attach {} to {name}", filter.name);
        let repairs = match existing {
            Existing::Replace => false,
            Existing::Keep(known) => {
                let runs = filters::runs(inside.rtnl, *index, filter, program.id);
                if runs.in_netns(id, attempt())? {
                    return Ok(());
                }
                known.contains(index)
            }
        };
        if inside.side == Side::Node {
            // Whoever removes it must find the namespace first, and would not look for it in vain.
            self.pins.note_node_filter(*index)?;
        }
        let qdisc = self.ensure_qdisc(inside, interface)?;
        if repairs && qdisc == Qdisc::Made {
            self.counts.repaired(
                self.pins.id(),
                Repair::Qdisc,
                format_args!("the clsact qdisc of {name}"),
            );
        }
        filters::attach(inside.rtnl, *index, filter, program.fd.as_fd()).in_netns(id, attempt())?;
        if repairs {
            let what = format_args!("filter {} of {name}", filter.name);
            self.counts.repaired(self.pins.id(), Repair::Filter, what);
        }
        Ok(())
    }

    /// The note comes first: a qdisc of ours without one would never be removed.
    fn ensure_qdisc(
        &self,
        inside: &mut Inside<'_>,
        interface: &Interface,
    ) -> Result<Qdisc, CaptureError> {
        let (id, side, index) = (inside.netns.inode(), inside.side, interface.index);
        let attempt = format!("add a clsact qdisc to {}", interface.name);
        if self.pins.has_qdisc(side, index) {
            return filters::add_qdisc(inside.rtnl, index).in_netns(id, attempt);
        }
        self.pins.note_qdisc(side, index)?;
        let added = filters::add_qdisc(inside.rtnl, index);
        if !matches!(added, Ok(Qdisc::Made)) {
            self.pins.forget_qdisc(side, index)?;
        }
        added.in_netns(id, attempt)
    }
}

/// Detaches the program, by whatever it is attached.
pub(crate) fn detach(
    pins: &PodPins,
    inside: &mut Inside<'_>,
    interface: &Interface,
    filter: Filter,
) -> Result<(), CaptureError> {
    tcx::remove(&pins.tc_link(interface.index, filter.name))?;
    detach_filter(inside, interface, filter)
}

/// Removes the links of interfaces that the pod does not have (any more).
pub(crate) fn remove_links_but(pins: &PodPins, now: &Interfaces) -> Result<(), CaptureError> {
    let there: BTreeSet<u32> = now.iter().map(|interface| interface.index).collect();
    let links = pins.tc_links()?.into_iter().filter(|link| link.program != programs::GUARD_HOST);
    links
        .filter(|link| !there.contains(&link.interface))
        .try_for_each(|link| tcx::remove(&link.path))
}

fn detach_filter(
    inside: &mut Inside<'_>,
    interface: &Interface,
    filter: Filter,
) -> Result<(), CaptureError> {
    filters::detach(inside.rtnl, interface.index, filter)
        .in_netns(inside.netns.inode(), format!("detach {} from {}", filter.name, interface.name))
}

/// Removes a qdisc that was made for filters, once none is left on it.
pub(crate) fn drop_qdisc(
    pins: &PodPins,
    inside: &mut Inside<'_>,
    interface: &Interface,
) -> Result<(), CaptureError> {
    let (side, index) = (inside.side, interface.index);
    if !pins.has_qdisc(side, index) {
        return Ok(());
    }
    let removed = filters::remove_qdisc_if_unused(inside.rtnl, index)
        .in_netns(inside.netns.inode(), format!("remove the clsact qdisc of {}", interface.name))?;
    if removed { pins.forget_qdisc(side, index) } else { Ok(()) }
}

fn place<'a>(
    pins: &'a PodPins,
    netns: &'a Netns,
    interface: &Interface,
    filter: Filter,
) -> Place<'a> {
    Place { netns, interface: interface.index, hook: filter.hook, name: filter.name, pins }
}
