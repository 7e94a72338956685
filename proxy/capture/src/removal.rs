//! The reverse of enrolment, for a pod and for a whole node. Each step takes what is missing for done, so that a
//! removal which was cut short is finished by the next.

use std::{collections::BTreeSet, fs, os::fd::AsFd as _};

use culvert_sys::{bpf, netns::Netns};

use crate::{
    cleanup::find_netns,
    error::{CaptureError, InNetns as _, chain},
    hooks::{self, GUARD, HOLD_IN, HOLD_OUT, Inside},
    interfaces::{Family, Kind, look_into},
    node::SharedMaps,
    node_end,
    pins::{PodPins, VersionPins, pin_error},
    routing, sysctls, tcx,
};

/// Ends the capture of new connections of a pod and to it. Those that are captured go on: for them rules, routes and
/// sysctls stay.
pub(crate) fn withdraw(
    maps: Option<&SharedMaps>,
    pins: &PodPins,
    netns: Option<&Netns>,
) -> Result<(), CaptureError> {
    let id = pins.id();
    let unmark = || maps.map_or(Ok(()), |maps| maps.lock().withdraw(id));
    let Some(netns) = netns else {
        unmark()?;
        detach_lookup(pins)?;
        remove_links(pins)?;
        return forget_addresses(maps, id);
    };
    let (mut rtnl, now) = look_into(netns)?;
    let inside = &mut Inside::pod(netns, &mut rtnl, &now);
    // First: once nothing is marked any more, it drops every connection that the pod makes.
    node_end::remove(pins, Some(inside))?;
    for interface in now.iter().filter(|interface| interface.kind == Kind::Outside) {
        hooks::detach(pins, inside, interface, GUARD)?;
    }
    unmark()?;
    detach_lookup(pins)?;
    // What virtual interfaces bring in is known by nothing else, so that the captured of it end here.
    for family in Family::ALL {
        routing::set_reroutes(inside.rtnl, family, &BTreeSet::new())
            .in_netns(id, "remove the rules of rerouted interfaces")?;
    }
    for interface in now.iter() {
        let filter = match interface.kind {
            Kind::Loopback => HOLD_OUT,
            Kind::Outside => HOLD_IN,
        };
        hooks::detach(pins, inside, interface, filter)?;
    }
    // Of interfaces that left the pod's namespace.
    remove_links(pins)?;
    // Nobody asks for them any more, and another pod may be given them.
    forget_addresses(maps, id)
}

fn remove_links(pins: &PodPins) -> Result<(), CaptureError> {
    pins.tc_links()?.into_iter().try_for_each(|link| tcx::remove(&link.path))
}

fn forget_addresses(maps: Option<&SharedMaps>, id: u32) -> Result<(), CaptureError> {
    maps.map_or(Ok(()), |maps| maps.lock().forget_addresses(id))
}

/// Removes all that enrolment has made. Without `netns` the namespace is gone, and what was inside with it. Without
/// `maps` they are another version's, and the sysctls stay as they are.
pub(crate) fn remove(
    maps: Option<&SharedMaps>,
    pins: &PodPins,
    netns: Option<&Netns>,
) -> Result<(), CaptureError> {
    let id = pins.id();
    withdraw(maps, pins, netns)?;
    if let Some(netns) = netns {
        restore(maps, pins, netns)?;
    }
    if let Some(maps) = maps {
        let mut maps = maps.lock();
        maps.forget_saved(id)?;
        maps.forget_settings(id)?;
    }
    pins.remove()
}

/// Removes these pods, whose namespaces are looked for. One that fails does not keep the others; gives how many there were,
/// or the first failure.
pub(crate) fn remove_each(
    maps: Option<&SharedMaps>,
    pods: impl IntoIterator<Item = PodPins>,
) -> Result<usize, CaptureError> {
    let mut outcome = Ok(0);
    for pod in pods {
        let removed = match find_netns(&pod) {
            // Forgotten, its guard would cut it off for good.
            None if pod.is_attached() => Err(CaptureError::NoPath { pod: pod.id() }),
            netns => remove(maps, &pod, netns.as_ref()),
        };
        match (removed, &mut outcome) {
            (Ok(()), Ok(count)) => *count += 1,
            (Err(error), Ok(_)) => outcome = Err(error),
            (Ok(()), Err(_)) => {}
            (Err(error), Err(_)) => {
                tracing::warn!(error = chain(&error), pod = pod.id(), "pod not removed either");
            }
        }
    }
    outcome
}

fn restore(maps: Option<&SharedMaps>, pins: &PodPins, netns: &Netns) -> Result<(), CaptureError> {
    let id = pins.id();
    let (mut rtnl, now) = look_into(netns)?;
    let inside = &mut Inside::pod(netns, &mut rtnl, &now);
    for interface in now.iter() {
        hooks::drop_qdisc(pins, inside, interface)?;
    }
    for family in Family::ALL {
        routing::remove_rules(&mut rtnl, family).in_netns(id, "remove the routing rules")?;
        routing::remove_route(&mut rtnl, family).in_netns(id, "remove the route")?;
    }
    let saved = match maps {
        Some(maps) => maps.lock().saved(id)?,
        None => None,
    };
    match saved {
        Some(saved) => sysctls::write(netns, saved).in_netns(id, "restore the sysctls"),
        None => Ok(()),
    }
}

/// Detaches the pod's `sk_lookup` link.
fn detach_lookup(pins: &PodPins) -> Result<(), CaptureError> {
    let link = pins.open_link();
    // First: a pinned link that is detached already looks like one whose namespace is gone.
    pins.remove_link()?;
    if let Some(link) = link {
        // Where the namespace is gone, there is nothing to detach from.
        drop(bpf::link_detach(link.as_fd()));
    }
    Ok(())
}

/// Detaches the node's programs, and removes maps, links and folders of an ABI version that has no pods any more.
pub(crate) fn remove_version(version: &VersionPins) -> Result<(), CaptureError> {
    detach_node(version)?;
    version.remove()
}

/// Detaches the node's programs.
pub(crate) fn detach_node(version: &VersionPins) -> Result<(), CaptureError> {
    for path in version.links()? {
        if let Ok(link) = bpf::open_pin(&path) {
            // Its cgroup may be gone.
            drop(bpf::link_detach(link.as_fd()));
        }
        fs::remove_file(&path).map_err(pin_error("remove", &path))?;
    }
    Ok(())
}
