//! Enrolment: a pod's namespace is prepared step by step, and the pod counts as captured from one commit point on.
//!
//! Each step may be repeated, so that a pod of a process before is adopted by the same steps. `removal` undoes them.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, UdpSocket},
    os::fd::AsFd as _,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use aya::{
    maps::{Map, MapData, MapError, SockMap},
    programs::{ProgramError, ProgramFd, SkLookup, links::FdLink},
};
use culvert_abi::maps as names;
use culvert_sys::{bpf, netns::Netns};

use crate::{
    cleanup::find_netns,
    counts::{Counts, Failure},
    dns::{self, DnsSocket},
    error::{CaptureError, InNetns as _, chain},
    exclusions::Entries,
    hooks::{Existing, FilterProgram, Inside, Programs},
    interfaces::{Interfaces, look_into},
    listeners::{self, Listener},
    maps::{BPF_NOEXIST, failed},
    node::{Loaded, Steering},
    node_end::NodeGuard,
    object::{self, Loader, programs},
    pins::{PodPins, pin_error},
    pod::{Addresses, Changes, Inner, Pod, PodCapture, Steered, sync_routing},
    removal,
    rtnl::Rtnl,
    settings::Settings,
    sysctls,
    upkeep::{Held, Upkeep},
};

/// Within this time a `connect()` has sent its SYN.
const IN_FLIGHT: Duration = Duration::from_millis(50);

/// Opens the pod's listeners where someone else's rules redirect to.
pub(crate) fn redirect(
    netns: &Netns,
    settings: &Settings,
    counts: &Arc<Counts>,
) -> Result<Pod, CaptureError> {
    let id = netns.inode();
    let changes = Changes::subscribe(netns).in_netns(id, "watch the interfaces")?;
    let (_, now) = look_into(netns)?;
    let addresses = Addresses::default();
    addresses.set(&now, settings);
    let listeners = listeners::open(netns, Steering::Redirect, &addresses)?;
    let (counts, settings) = (Arc::clone(counts), ArcSwap::from_pointee(settings.clone()));
    let inner = Inner { id, netns: netns.clone(), addresses, counts, settings, steered: None };
    Ok(Pod::new(Arc::new(inner), listeners, Vec::new(), changes))
}

/// Captures the pod. What this call did is undone when a step fails; what a process before did is not.
pub(crate) fn enroll(
    node: &Loaded,
    netns: &Netns,
    settings: &Settings,
    counts: &Arc<Counts>,
) -> Result<Pod, CaptureError> {
    let id = netns.inode();
    if let Some(other) = node.seat.pins.other_owner(id)? {
        return Err(CaptureError::EnrolledElsewhere { pod: id, node: other });
    }
    let pins = node.version.pod(id);
    if pins.is_dead() {
        // The inode number belonged to a namespace that is gone.
        removal::remove(Some(&node.maps), &pins, None)?;
    }
    let cookie = cookie(node, netns)?;
    let adopted = pins.is_attached() && node.maps.lock().is_committed(id, cookie);
    let enrolled = install(node, netns, settings, counts, &pins, cookie);
    if enrolled.is_err()
        && !adopted
        && let Err(error) = removal::remove(Some(&node.maps), &pins, Some(netns))
    {
        tracing::error!(error = chain(&error), pod = id, "cannot undo an enrolment that failed");
    }
    enrolled
}

/// The cookie of the namespace; from our programs where the kernel tells it to none but those (before 5.14).
fn cookie(node: &Loaded, netns: &Netns) -> Result<u64, CaptureError> {
    let id = netns.inode();
    if let Some(cookie) = netns.cookie().in_netns(id, "read the cookie")? {
        return Ok(cookie);
    }
    let socket = netns.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))).flatten();
    let socket = socket.in_netns(id, "make a socket to learn the cookie by")?;
    node.maps.lock().told_cookie(&socket)
}

fn install(
    node: &Loaded,
    netns: &Netns,
    settings: &Settings,
    counts: &Arc<Counts>,
    pins: &PodPins,
    cookie: u64,
) -> Result<Pod, CaptureError> {
    let id = netns.inode();
    if !pins.exists() {
        // Of a pod that had the inode number before, if any.
        let mut maps = node.maps.lock();
        maps.forget_saved(id)?;
        maps.forget_settings(id)?;
    }
    pins.make()?;
    if let Some(probes) = &node.attached().probes {
        probes.distrust(id)?;
    }

    // Before the first reading: a change in between is seen by the watch.
    let changes = Changes::subscribe(netns).in_netns(id, "watch the interfaces")?;
    let (rtnl, now) = look_into(netns)?;
    let excluded = now.addresses_of_only(&settings.exclude_interfaces);
    let tracked = claim_addresses(node, id, &now, &excluded)?;

    let addresses = Addresses::default();
    addresses.set(&now, settings);
    let listeners = listeners::open(netns, Steering::Ebpf, &addresses)?;
    let queries = dns::open(netns, &addresses)?;
    let mut object = node.loader.lock().unwrap_or_else(PoisonError::into_inner).load_pod(pins)?;
    let lookup: &mut SkLookup = object::program(&mut object, programs::PICK_LISTENER)?;
    lookup.load().map_err(refused("load", programs::PICK_LISTENER))?;
    let lookup = descriptor(lookup)?;
    let places = listeners.iter().map(Listener::place).chain(queries.iter().map(DnsSocket::place));
    let steered = Steered {
        when_down: node.options.when_down,
        maps: node.maps.clone(),
        pins: pins.clone(),
        loader: Arc::clone(&node.loader),
        counts: Arc::clone(counts),
        programs: Programs {
            hold_in: FilterProgram::load(&mut object, programs::HOLD_IN)?,
            hold_out: FilterProgram::load(&mut object, programs::HOLD_OUT)?,
            guard: FilterProgram::load(&mut object, programs::GUARD)?,
        },
        node_guard: match &node.guarded_home {
            Some(home) => Some(NodeGuard {
                program: FilterProgram::load(&mut object, programs::GUARD_HOST)?,
                home: home.clone(),
            }),
            None => None,
        },
        lookup,
        places: places.collect(),
        upkeep: Mutex::default(),
    };
    fill_slots(&steered, Slots::All)?;
    let (settings, entries) = claim_settings(node, id, &now, settings, counts)?;
    save_sysctls(node, netns)?;
    let captured_before = pins.is_attached();
    let attach = || {
        let lookup: &mut SkLookup = object::program(&mut object, programs::PICK_LISTENER)?;
        attach_lookup(lookup, netns, pins)
    };
    let namespace = Namespace { netns, rtnl, now, tracked, excluded, entries, cookie };
    steer(&steered, namespace, &settings, captured_before, attach)?;
    let (counts, settings) = (Arc::clone(counts), ArcSwap::from_pointee(settings));
    let steered = Some(steered);
    let inner = Inner { id, netns: netns.clone(), addresses, counts, settings, steered };
    Ok(Pod::new(Arc::new(inner), listeners, queries, changes))
}

/// A pod's namespace, as it was looked into.
struct Namespace<'a> {
    netns: &'a Netns,
    rtnl: Rtnl,
    now: Interfaces,
    tracked: BTreeSet<IpAddr>,
    excluded: BTreeSet<IpAddr>,
    entries: Entries,
    cookie: u64,
}

/// Lets the programs of this process steer into the pod's listeners, which are in their slots already. `attach` attaches
/// `pick_listener`.
fn steer(
    steered: &Steered,
    namespace: Namespace<'_>,
    settings: &Settings,
    captured_before: bool,
    attach: impl FnOnce() -> Result<(), CaptureError>,
) -> Result<(), CaptureError> {
    let Namespace { netns, mut rtnl, now, tracked, excluded, entries, cookie } = namespace;
    let id = netns.inode();
    sysctls::write(netns, sysctls::WANTED).in_netns(id, "write the sysctls")?;
    sync_routing(id, &mut rtnl, &now, settings)?;
    attach()?;
    let inside = &mut Inside::pod(netns, &mut rtnl, &now);
    steered.attach_holds(inside, Existing::Replace)?;

    // Commit point.
    let contested = steered.maps.lock().commit(id, cookie, &tracked)?;

    // Last: before the pod is captured, it would drop every connection that the pod makes. And not at once: a connect()
    // that ran before the commit has no mark, and its SYN may only now be on its way out.
    if !captured_before {
        wait_for_syns();
    }
    steered.attach_guards(inside, Existing::Replace)?;
    let ends = steered.attach_node_guards(inside, &settings.exclude_interfaces, None)?;

    // What is left over is counted at the watch's first look.
    *steered.upkeep() = Upkeep::new(
        &now,
        settings,
        ends,
        Held { addresses: tracked, contested, excluded, entries },
    );
    Ok(())
}

/// Steers into the listeners of this process again, where another had taken the pod over; `false` where the pod is no more
/// enrolled.
pub(crate) fn reclaim(node: &Loaded, PodCapture(pod): &PodCapture) -> Result<bool, CaptureError> {
    let Some(steered) = &pod.steered else { return Ok(true) };
    let (id, netns, settings) = (pod.id, &pod.netns, pod.settings.load_full());
    if !steered.pins.is_attached() {
        return Ok(false);
    }
    // First, and whatever else fails: connections wait for them.
    fill_slots(steered, Slots::All)?;
    let cookie = cookie(node, netns)?;
    let (rtnl, now) = look_into(netns)?;
    pod.addresses.set(&now, &settings);
    let excluded = now.addresses_of_only(&settings.exclude_interfaces);
    let tracked = claim_addresses(node, id, &now, &excluded)?;
    let attach = || replace_lookup(&steered.pins, &steered.lookup).map(drop);
    let (settings, entries) = claim_settings(node, id, &now, &settings, &pod.counts)?;
    let namespace = Namespace { netns, rtnl, now, tracked, excluded, entries, cookie };
    steer(steered, namespace, &settings, true, attach)?;
    Ok(true)
}

/// Puts listeners of this process into slots that are empty; gives how many.
pub(crate) fn refill(PodCapture(pod): &PodCapture) -> Result<usize, CaptureError> {
    match &pod.steered {
        Some(steered) if steered.pins.is_attached() => fill_slots(steered, Slots::Empty),
        _ => Ok(0),
    }
}

#[expect(clippy::disallowed_methods, reason = "enrolment blocks a thread that may")]
fn wait_for_syns() {
    std::thread::sleep(IN_FLIGHT);
}

/// Writes the pod's addresses down and gives them, unless one that others know it by is another living pod's, or the other way round.
/// Those of bridges inside pods may repeat: Docker's is the same in each.
fn claim_addresses(
    node: &Loaded,
    id: u32,
    now: &Interfaces,
    excluded: &BTreeSet<IpAddr>,
) -> Result<BTreeSet<IpAddr>, CaptureError> {
    let shared = node.maps.lock().shared_with(id, &now.owned())?;
    for (other, address) in shared {
        let pins = node.version.pod(other);
        let netns = find_netns(&pins);
        if !pins.is_attached() {
            // A pod that went away while no process ran; its address has been given to this one.
            removal::remove(Some(&node.maps), &pins, netns.as_ref())?;
        } else if now.is_known_by(address)
            || netns.is_some_and(|netns| is_known_by(&netns, address))
        {
            return Err(CaptureError::AddressTaken { pod: id, other, address });
        }
    }
    let mut maps = node.maps.lock();
    let held: BTreeSet<IpAddr> = maps.addresses(id)?.into_iter().collect();
    let (tracked, _) = now.tracked(&held);
    for ip in held.difference(&tracked) {
        maps.remove_by_address(id, *ip)?;
        maps.remove_address(id, *ip)?;
    }
    tracked.iter().try_for_each(|ip| maps.add_address(id, *ip, excluded.contains(ip)))?;
    Ok(tracked)
}

/// Writes the pod's settings down, or none of its own where there is no room for them: it must not stay uncaptured for that.
fn claim_settings(
    node: &Loaded,
    id: u32,
    now: &Interfaces,
    wanted: &Settings,
    counts: &Counts,
) -> Result<(Settings, Entries), CaptureError> {
    let mut maps = node.maps.lock();
    let mut held = maps.settings(id)?;
    let Err(error) = maps.change_settings(id, &mut held, &Entries::of(wanted, now)) else {
        return Ok((wanted.clone(), held));
    };
    counts.failed(Failure::SettingsRefused, 1);
    tracing::error!(
        error = chain(&error),
        pod = id,
        "settings refused; the pod is captured without"
    );
    let settings = Settings { capture_dns: wanted.capture_dns, ..Settings::default() };
    maps.change_settings(id, &mut held, &Entries::of(&settings, now))?;
    Ok((settings, held))
}

fn is_known_by(netns: &Netns, address: IpAddr) -> bool {
    look_into(netns).is_ok_and(|(_, now)| now.is_known_by(address))
}

fn descriptor(program: &SkLookup) -> Result<ProgramFd, CaptureError> {
    let fd = program.fd().and_then(|fd| fd.try_clone().map_err(ProgramError::IOError));
    fd.map_err(refused("load", programs::PICK_LISTENER))
}

/// Which slots to fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slots {
    /// All, in place of another process's listeners.
    All,
    Empty,
}

/// Puts each listener into its slot; gives how many were.
fn fill_slots(steered: &Steered, slots: Slots) -> Result<usize, CaptureError> {
    let map = MapData::from_pin(steered.pins.listeners())
        .and_then(Map::from_map_data)
        .map_err(failed("open", names::LISTENERS))?;
    let mut map: SockMap<MapData> = map.try_into().map_err(failed("adopt", names::LISTENERS))?;
    let flags = match slots {
        Slots::All => 0,
        Slots::Empty => BPF_NOEXIST,
    };
    let mut filled = 0;
    for place in &steered.places {
        // Closed: it accepts no more.
        let Some(socket) = place.socket() else { continue };
        match map.set(place.slot as u32, &socket, flags) {
            Ok(()) => filled += 1,
            Err(MapError::SyscallError(e))
                if slots == Slots::Empty && e.io_error.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed("insert into", names::LISTENERS)(e)),
        }
    }
    Ok(filled)
}

/// Writes down what the namespace held before, once: an adopted one holds our own values.
fn save_sysctls(node: &Loaded, netns: &Netns) -> Result<(), CaptureError> {
    let id = netns.inode();
    let mut maps = node.maps.lock();
    if maps.saved(id)?.is_some() {
        return Ok(());
    }
    maps.save(id, sysctls::read(netns).in_netns(id, "read the sysctls")?)
}

/// Puts the pod's `sk_lookup` program back, whose link somebody has detached or unpinned. Its listeners are in their slots
/// still.
pub(crate) fn attach_lookup_anew(
    loader: &Mutex<Loader>,
    netns: &Netns,
    pins: &PodPins,
) -> Result<(), CaptureError> {
    let listeners = pins.listeners();
    // A new map would be an empty one, and hold every connection for good.
    fs::metadata(&listeners).map_err(pin_error("open", &listeners))?;
    let mut object = loader.lock().unwrap_or_else(PoisonError::into_inner).load_pod(pins)?;
    let lookup: &mut SkLookup = object::program(&mut object, programs::PICK_LISTENER)?;
    lookup.load().map_err(refused("load", programs::PICK_LISTENER))?;
    pins.remove_link()?;
    attach_lookup(lookup, netns, pins)
}

/// Attaches the program, or gives the pinned link the new one.
fn attach_lookup(
    program: &mut SkLookup,
    netns: &Netns,
    pins: &PodPins,
) -> Result<(), CaptureError> {
    let name = programs::PICK_LISTENER;
    if replace_lookup(pins, program.fd().map_err(refused("attach", name))?)? {
        return Ok(());
    }
    let id = program.attach(netns).map_err(refused("attach", name))?;
    let link = program.take_link(id).map_err(refused("attach", name))?;
    let _pinned = FdLink::from(link)
        .pin(pins.link())
        .map_err(|e| pin_error("pin", &pins.link())(std::io::Error::other(e)))?;
    Ok(())
}

/// Gives the pinned link the program, where it is attached.
fn replace_lookup(pins: &PodPins, program: &ProgramFd) -> Result<bool, CaptureError> {
    let Some(link) = pins.open_link().filter(|_| pins.is_attached()) else { return Ok(false) };
    bpf::link_update(link.as_fd(), program.as_fd())
        .map_err(ProgramError::IOError)
        .map_err(refused("attach", programs::PICK_LISTENER))?;
    Ok(true)
}

fn refused(
    attempt: &'static str,
    program: &'static str,
) -> impl FnOnce(ProgramError) -> CaptureError {
    move |source| CaptureError::Program { attempt, program, source }
}
