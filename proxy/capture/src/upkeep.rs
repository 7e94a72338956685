//! Upkeep: what an enrolled pod needs in its namespace is kept as enrolment made it, whoever else changes it, and in
//! step with the pod's interfaces and addresses. When to look is the watch's, in `pod`.

use std::{collections::BTreeSet, net::IpAddr};

use arc_swap::ArcSwap;
use culvert_sys::netns::Netns;

use crate::{
    counts::{Failure, Repair},
    enrolment,
    error::{CaptureError, InNetns as _},
    exclusions::Entries,
    hooks::{self, Existing, Inside},
    interfaces::{Family, Interfaces},
    maps::Claim,
    node_end::NodeEnds,
    pod::Steered,
    routing,
    rtnl::Rtnl,
    settings::Settings,
    sysctls,
};

/// What has been set up so far: whatever is missing of it now, somebody else has taken away.
#[derive(Debug, Default)]
pub(crate) struct Upkeep {
    standing: Standing,
    /// Those with all of their filters.
    interfaces: BTreeSet<u32>,
    node_ends: NodeEnds,
    /// Where the route of each [`Family`] starts from.
    sources: [Option<IpAddr>; 2],
    /// Interfaces with a rule of their own.
    rerouted: BTreeSet<String>,
    held: Held,
    /// How many addresses the maps have no room for.
    left_over: usize,
}

/// What the maps hold for the pod.
#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// Addresses that tell another pod until that one gives them up.
    pub(crate) contested: BTreeSet<IpAddr>,
    /// Addresses of interfaces that the pod excludes.
    pub(crate) excluded: BTreeSet<IpAddr>,
    pub(crate) entries: Entries,
}

/// Whether the watch may still set things up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Standing {
    #[default]
    Enrolled,
    /// Another process keeps the pod up.
    Suspended,
    Leaving,
}

impl Upkeep {
    /// Of a pod that has just been enrolled.
    pub(crate) fn new(
        now: &Interfaces,
        settings: &Settings,
        node_ends: NodeEnds,
        held: Held,
    ) -> Self {
        Self {
            standing: Standing::Enrolled,
            interfaces: now.iter().map(|interface| interface.index).collect(),
            node_ends,
            sources: Family::ALL.map(|family| now.primary(family)),
            rerouted: settings.reroute_interfaces.clone(),
            held,
            left_over: 0,
        }
    }

    /// Until the pod is taken back nothing is set up.
    pub(crate) fn suspend(&mut self) {
        if self.standing == Standing::Enrolled {
            self.standing = Standing::Suspended;
        }
    }

    /// From now on nothing is set up any more.
    pub(crate) fn leave(&mut self) {
        self.standing = Standing::Leaving;
    }
}

impl Steered {
    /// Puts back what is missing, and follows what has changed. A step that fails does not keep the others.
    pub(crate) fn mend(
        &self,
        netns: &Netns,
        rtnl: &mut Rtnl,
        now: &Interfaces,
        settings: &ArcSwap<Settings>,
    ) -> Result<(), CaptureError> {
        let id = netns.inode();
        let mut upkeep = self.upkeep();
        if upkeep.standing != Standing::Enrolled {
            return Ok(());
        }
        let settings = settings.load_full();
        let existing = Existing::Keep(&upkeep.interfaces);
        let inside = &mut Inside::pod(netns, rtnl, now);
        let gone = hooks::remove_links_but(&self.pins, now);
        let holds = self.attach_holds(inside, existing);
        let guards = self.attach_guards(inside, existing);
        let node_guards = self
            .attach_node_guards(inside, &settings.exclude_interfaces, Some(&upkeep.node_ends))
            .map(|ends| upkeep.node_ends = ends);
        upkeep.interfaces = now.iter().map(|interface| interface.index).collect();
        let steps = [
            gone,
            holds,
            guards,
            node_guards,
            self.mend_routing(id, rtnl, now, &settings, &mut upkeep),
            self.mend_lookup(netns),
            self.mend_sysctls(netns),
            self.sync_settings(id, now, &settings, &mut upkeep),
        ];
        steps.into_iter().collect()
    }

    /// Applies other settings.
    pub(crate) fn configure(
        &self,
        netns: &Netns,
        rtnl: &mut Rtnl,
        now: &Interfaces,
        settings: &Settings,
    ) -> Result<(), CaptureError> {
        let id = netns.inode();
        let mut upkeep = self.upkeep();
        if upkeep.standing != Standing::Enrolled {
            return Ok(());
        }
        self.sync_settings(id, now, settings, &mut upkeep)?;
        for family in Family::ALL {
            routing::set_reroutes(rtnl, family, &settings.reroute_interfaces)
                .in_netns(id, "set the rules of rerouted interfaces")?;
        }
        upkeep.rerouted.clone_from(&settings.reroute_interfaces);
        let inside = &mut Inside::pod(netns, rtnl, now);
        let excluded = &settings.exclude_interfaces;
        upkeep.node_ends = self.attach_node_guards(inside, excluded, Some(&upkeep.node_ends))?;
        Ok(())
    }

    fn sync_settings(
        &self,
        id: u32,
        now: &Interfaces,
        settings: &Settings,
        upkeep: &mut Upkeep,
    ) -> Result<(), CaptureError> {
        let wanted = Entries::of(settings, now);
        let changed = self.maps.lock().change_settings(id, &mut upkeep.held.entries, &wanted);
        let excluded = now.addresses_of_only(&settings.exclude_interfaces);
        let synced = self.sync_addresses(id, now, excluded, upkeep);
        changed.and(synced)
    }

    fn mend_routing(
        &self,
        id: u32,
        rtnl: &mut Rtnl,
        now: &Interfaces,
        settings: &Settings,
        upkeep: &mut Upkeep,
    ) -> Result<(), CaptureError> {
        let Some(loopback) = now.loopback() else { return Ok(()) };
        for (family, before) in Family::ALL.into_iter().zip(&mut upkeep.sources) {
            for mark in routing::add_rules(rtnl, family).in_netns(id, "add the routing rules")? {
                let what = format_args!("the {family:?} rule of mark {mark:#x}");
                self.counts.repaired(id, Repair::Rule, what);
            }
            let rerouted = routing::set_reroutes(rtnl, family, &settings.reroute_interfaces)
                .in_netns(id, "set the rules of rerouted interfaces")?;
            for name in rerouted.intersection(&upkeep.rerouted) {
                let what = format_args!("the {family:?} rule of interface {name}");
                self.counts.repaired(id, Repair::Rule, what);
            }
            let source = now.primary(family);
            if let Some(ip) = source {
                let attempt = || format!("set the route of captured connections from {ip}");
                if !routing::has_route(rtnl, loopback.index, ip).in_netns(id, attempt())? {
                    routing::set_route(rtnl, loopback.index, ip).in_netns(id, attempt())?;
                    if *before == source {
                        self.counts.repaired(
                            id,
                            Repair::Route,
                            format_args!("the {family:?} route"),
                        );
                    }
                }
            } else {
                routing::remove_route(rtnl, family)
                    .in_netns(id, "remove the route of captured connections")?;
            }
            *before = source;
        }
        upkeep.rerouted.clone_from(&settings.reroute_interfaces);
        Ok(())
    }

    fn mend_lookup(&self, netns: &Netns) -> Result<(), CaptureError> {
        if self.pins.is_attached() {
            return Ok(());
        }
        enrolment::attach_lookup_anew(&self.loader, netns, &self.pins)?;
        self.counts.repaired(netns.inode(), Repair::Lookup, "the sk_lookup link");
        Ok(())
    }

    fn mend_sysctls(&self, netns: &Netns) -> Result<(), CaptureError> {
        let id = netns.inode();
        let astray = sysctls::astray(sysctls::read(netns).in_netns(id, "read the sysctls")?);
        if astray.is_empty() {
            return Ok(());
        }
        sysctls::write(netns, sysctls::WANTED).in_netns(id, "write the sysctls")?;
        for path in astray {
            self.counts.repaired(id, Repair::Sysctl, path);
        }
        Ok(())
    }

    /// Makes `addrs` and `pods_by_addr` hold just the pod's addresses, or as many of them as there is room for.
    fn sync_addresses(
        &self,
        id: u32,
        now: &Interfaces,
        excluded: BTreeSet<IpAddr>,
        upkeep: &mut Upkeep,
    ) -> Result<(), CaptureError> {
        let held = &mut upkeep.held;
        let (tracked, left_over) = now.tracked(&held.addresses);
        if let Some(more) = left_over.checked_sub(upkeep.left_over).filter(|more| *more > 0) {
            tracing::warn!(pod = id, left_over, "the pod has more addresses than it may: ignored");
            self.counts.failed(Failure::AddressIgnored, more.try_into().unwrap_or(u64::MAX));
        }
        upkeep.left_over = left_over;
        let mut maps = self.maps.lock();
        let gone: Vec<_> = held.addresses.difference(&tracked).copied().collect();
        for ip in gone {
            maps.remove_by_address(id, ip)?;
            maps.remove_address(id, ip)?;
            held.addresses.remove(&ip);
            held.contested.remove(&ip);
        }
        for ip in tracked {
            let new = !held.addresses.contains(&ip);
            if new || held.excluded.contains(&ip) != excluded.contains(&ip) {
                maps.add_address(id, ip, excluded.contains(&ip))?;
            }
            if new {
                held.addresses.insert(ip);
                held.contested.insert(ip);
            }
            if held.contested.contains(&ip) && maps.add_by_address(id, ip)? == Claim::Granted {
                held.contested.remove(&ip);
            }
        }
        held.excluded = excluded;
        Ok(())
    }
}
