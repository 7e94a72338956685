//! The pinned maps that user space reads and writes; what an entry means is written in the ABI crate.

use std::{
    collections::BTreeSet,
    fmt,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, UdpSocket},
};

use aya::maps::{HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, SkStorage, lpm_trie::Key};
use culvert_abi::{
    ADDR_CAPTURED, ADDR_EXCLUDED, Addr, Exclusion, Outcome, Pod, PodAddr, PodNetwork, Saved,
    Settings, maps,
};

use crate::{
    error::CaptureError,
    exclusions::{EXCLUDED, Entries},
    interfaces::{from_abi, is_link_local, to_abi},
    pins::VersionPins,
};

/// Room in [`maps::SAVED`], as in [`maps::PODS`].
const PODS: u32 = 4096;
/// Room in [`maps::OWN_CGROUPS`], as the pod's object has it.
const OWN_CGROUPS: u32 = 64;
/// `linux/bpf.h`.
const BPF_F_NO_PREALLOC: u32 = 1;

/// `linux/bpf.h`.
pub(crate) const BPF_NOEXIST: u64 = 1;

/// Where nobody listens (RFC 863).
const DISCARD: u16 = 9;

/// Whether an address tells the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    Granted,
    /// It is another pod's for now.
    Contested,
}

/// Open maps of a node.
pub(crate) struct Maps {
    pods: HashMap<MapData, u64, Pod>,
    pods_by_addr: HashMap<MapData, Addr, Pod>,
    addrs: HashMap<MapData, PodAddr, u8>,
    own_cgroups: HashMap<MapData, u64, u8>,
    outcomes: PerCpuArray<MapData, u64>,
    saved: HashMap<MapData, u32, Saved>,
    settings: HashMap<MapData, u32, Settings>,
    exclusions: HashMap<MapData, Exclusion, u8>,
    networks: LpmTrie<MapData, PodAddr, u8>,
    noted: SkStorage<MapData, u64>,
}

impl Maps {
    /// Opens all from their pins. The key and value sizes of each are checked against this build's.
    pub(crate) fn open(pins: &VersionPins) -> Result<Self, CaptureError> {
        Ok(Self {
            pods: open(pins, maps::PODS)?,
            pods_by_addr: open(pins, maps::PODS_BY_ADDR)?,
            addrs: open(pins, maps::ADDRS)?,
            own_cgroups: open(pins, maps::OWN_CGROUPS)?,
            outcomes: open(pins, maps::OUTCOMES)?,
            saved: open(pins, maps::SAVED)?,
            settings: open(pins, maps::SETTINGS)?,
            exclusions: open(pins, maps::EXCLUSIONS)?,
            networks: open(pins, maps::EXCLUDED_CIDRS)?,
            noted: open(pins, maps::NOTED)?,
        })
    }

    /// Pins the maps that the node's objects do not define, where they are not pinned yet.
    pub(crate) fn create(pins: &VersionPins) -> Result<(), CaptureError> {
        create::<u64, u8>(pins, maps::OWN_CGROUPS, OWN_CGROUPS, BPF_F_NO_PREALLOC)?;
        create::<u32, Saved>(pins, maps::SAVED, PODS, 0)
    }

    /// Makes the pod one that programs act on. Gives its addresses that are another pod's by [`maps::PODS_BY_ADDR`].
    pub(crate) fn commit(
        &mut self,
        pod: u32,
        cookie: u64,
        owned: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpAddr>, CaptureError> {
        let mut contested = BTreeSet::new();
        for ip in owned {
            if self.add_by_address(pod, *ip)? == Claim::Contested {
                contested.insert(*ip);
            }
        }
        self.pods.insert(cookie, Pod { id: pod }, 0).map_err(failed("insert into", maps::PODS))?;
        Ok(contested)
    }

    /// The first thing that an un-enrolment does: no new connection of the pod is marked.
    pub(crate) fn withdraw(&mut self, pod: u32) -> Result<(), CaptureError> {
        remove_matching(&mut self.pods, maps::PODS, |_, value| value.id == pod)?;
        remove_matching(&mut self.pods_by_addr, maps::PODS_BY_ADDR, |_, value| value.id == pod)
    }

    /// The pod is committed.
    pub(crate) fn is_committed(&self, pod: u32, cookie: u64) -> bool {
        self.pods.get(&cookie, 0).is_ok_and(|value| value.id == pod)
    }

    /// The cookie of the namespace of an unconnected `socket`, as `note_netns4` tells it. Nothing is sent.
    pub(crate) fn told_cookie(&mut self, socket: &UdpSocket) -> Result<u64, CaptureError> {
        const UNTOLD: u64 = 0;
        self.noted.insert(socket, UNTOLD, 0).map_err(failed("insert into", maps::NOTED))?;
        // Whether the namespace has a route is no matter: the program runs before that is asked.
        drop(socket.connect((Ipv4Addr::LOCALHOST, DISCARD)));
        match self.noted.get(socket, 0).map_err(failed("read", maps::NOTED))? {
            UNTOLD => Err(CaptureError::SelfCheck {
                reason: "note_netns4 does not run for them; a net_cls or net_prio cgroup may hide cgroup2 from \
                         sockets: mount neither"
                    .to_owned(),
            }),
            cookie => Ok(cookie),
        }
    }

    /// Adds the entry, unless another pod has the address too and came first.
    pub(crate) fn add_by_address(&mut self, pod: u32, ip: IpAddr) -> Result<Claim, CaptureError> {
        if is_link_local(ip) {
            return Ok(Claim::Granted);
        }
        let (key, value) = (to_abi(ip), Pod { id: pod });
        match self.pods_by_addr.insert(key, value, BPF_NOEXIST) {
            Ok(()) => Ok(Claim::Granted),
            Err(MapError::SyscallError(e)) if e.io_error.kind() == ErrorKind::AlreadyExists => {
                let ours = self.pods_by_addr.get(&key, 0).is_ok_and(|value| value.id == pod);
                Ok(if ours { Claim::Granted } else { Claim::Contested })
            }
            Err(e) => Err(failed("insert into", maps::PODS_BY_ADDR)(e)),
        }
    }

    /// Removes the entry, unless it has become another pod's.
    pub(crate) fn remove_by_address(&mut self, pod: u32, ip: IpAddr) -> Result<(), CaptureError> {
        let key = to_abi(ip);
        if !self.pods_by_addr.get(&key, 0).is_ok_and(|value| value.id == pod) {
            return Ok(());
        }
        absent_is_fine(self.pods_by_addr.remove(&key))
            .map_err(failed("remove from", maps::PODS_BY_ADDR))
    }

    /// Adds the address, or tells anew whether it is excluded.
    pub(crate) fn add_address(
        &mut self,
        pod: u32,
        ip: IpAddr,
        excluded: bool,
    ) -> Result<(), CaptureError> {
        let key = PodAddr { pod, addr: to_abi(ip) };
        let value = if excluded { ADDR_EXCLUDED } else { ADDR_CAPTURED };
        self.addrs.insert(key, value, 0).map_err(failed("insert into", maps::ADDRS))
    }

    pub(crate) fn remove_address(&mut self, pod: u32, ip: IpAddr) -> Result<(), CaptureError> {
        let key = PodAddr { pod, addr: to_abi(ip) };
        absent_is_fine(self.addrs.remove(&key)).map_err(failed("remove from", maps::ADDRS))
    }

    /// The addresses that the map holds for a pod. Reads all of it, which is for enrolments alone.
    pub(crate) fn addresses(&self, pod: u32) -> Result<Vec<IpAddr>, CaptureError> {
        let entries = self.addrs.keys().collect::<Result<Vec<_>, _>>();
        let entries = entries.map_err(failed("read", maps::ADDRS))?;
        Ok(entries.iter().filter(|key| key.pod == pod).map(|key| from_abi(key.addr)).collect())
    }

    /// Other pods with one of these addresses, and which; link-local ones may repeat.
    pub(crate) fn shared_with(
        &self,
        pod: u32,
        owned: &BTreeSet<IpAddr>,
    ) -> Result<Vec<(u32, IpAddr)>, CaptureError> {
        let keys = self.addrs.keys().collect::<Result<Vec<_>, _>>();
        let keys = keys.map_err(failed("read", maps::ADDRS))?;
        let others = keys.iter().filter(|key| key.pod != pod);
        let shared = others.map(|key| (key.pod, from_abi(key.addr)));
        Ok(shared.filter(|(_, ip)| owned.contains(ip) && !is_link_local(*ip)).collect())
    }

    pub(crate) fn forget_addresses(&mut self, pod: u32) -> Result<(), CaptureError> {
        remove_matching(&mut self.addrs, maps::ADDRS, |key, _| key.pod == pod)
    }

    /// Brings what the maps hold of a pod's settings from `held` to `wanted`; `held` stays true to it also when that fails.
    ///
    /// New entries come before the flags that have them asked, and old ones go after: nothing is captured meanwhile that is
    /// excluded before and after.
    pub(crate) fn change_settings(
        &mut self,
        pod: u32,
        held: &mut Entries,
        wanted: &Entries,
    ) -> Result<(), CaptureError> {
        for entry in &wanted.exclusions {
            if held.exclusions.insert(*entry) {
                let inserted = self.exclusions.insert(exclusion(pod, *entry), EXCLUDED, 0);
                if let Err(e) = inserted {
                    held.exclusions.remove(entry);
                    return Err(failed("insert into", maps::EXCLUSIONS)(e));
                }
            }
        }
        // One network has one value, which is replaced.
        for entry in wanted.networks.difference(&held.networks.clone()) {
            let (key, value) = (network(pod, *entry), entry.2);
            let inserted = self.networks.insert(&key, value, 0);
            inserted.map_err(failed("insert into", maps::EXCLUDED_CIDRS))?;
            held.networks.retain(|(prefix, addr, _)| (*prefix, *addr) != (entry.0, entry.1));
            held.networks.insert(*entry);
        }
        if held.flags != wanted.flags {
            let flags = Settings { flags: wanted.flags };
            self.settings.insert(pod, flags, 0).map_err(failed("insert into", maps::SETTINGS))?;
            held.flags = wanted.flags;
        }
        for entry in
            held.exclusions.difference(&wanted.exclusions.clone()).copied().collect::<Vec<_>>()
        {
            absent_is_fine(self.exclusions.remove(&exclusion(pod, entry)))
                .map_err(failed("remove from", maps::EXCLUSIONS))?;
            held.exclusions.remove(&entry);
        }
        for entry in held.networks.difference(&wanted.networks.clone()).copied().collect::<Vec<_>>()
        {
            absent_is_fine(self.networks.remove(&network(pod, entry)))
                .map_err(failed("remove from", maps::EXCLUDED_CIDRS))?;
            held.networks.remove(&entry);
        }
        Ok(())
    }

    /// What the maps hold of a pod's settings. Reads all of them, which is for enrolments alone.
    pub(crate) fn settings(&self, pod: u32) -> Result<Entries, CaptureError> {
        let flags = match self.settings.get(&pod, 0) {
            Ok(settings) => settings.flags,
            Err(MapError::KeyNotFound) => 0,
            Err(e) => return Err(failed("read", maps::SETTINGS)(e)),
        };
        let exclusions = self.exclusions.keys().collect::<Result<Vec<_>, _>>();
        let exclusions = exclusions.map_err(failed("read", maps::EXCLUSIONS))?;
        let own = exclusions.iter().filter(|key| key.pod == pod);
        let exclusions = own.map(|key| (key.kind, key.value)).collect();
        let networks = self.networks.iter().collect::<Result<Vec<_>, _>>();
        let networks = networks.map_err(failed("read", maps::EXCLUDED_CIDRS))?;
        let own = networks.iter().filter(|(key, _)| key.data().pod == pod);
        let prefix = |key: &Key<PodAddr>| {
            u8::try_from(key.prefix_len().saturating_sub(PodNetwork::bits(0))).unwrap_or(u8::MAX)
        };
        let networks = own.map(|(key, value)| (prefix(key), key.data().addr.0, *value)).collect();
        Ok(Entries { flags, exclusions, networks })
    }

    pub(crate) fn forget_settings(&mut self, pod: u32) -> Result<(), CaptureError> {
        let mut held = self.settings(pod)?;
        self.change_settings(pod, &mut held, &Entries::default())?;
        absent_is_fine(self.settings.remove(&pod)).map_err(failed("remove from", maps::SETTINGS))
    }

    pub(crate) fn saved(&self, pod: u32) -> Result<Option<Saved>, CaptureError> {
        match self.saved.get(&pod, 0) {
            Ok(saved) => Ok(Some(saved)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(e) => Err(failed("read", maps::SAVED)(e)),
        }
    }

    pub(crate) fn save(&mut self, pod: u32, saved: Saved) -> Result<(), CaptureError> {
        self.saved.insert(pod, saved, 0).map_err(failed("insert into", maps::SAVED))
    }

    pub(crate) fn forget_saved(&mut self, pod: u32) -> Result<(), CaptureError> {
        absent_is_fine(self.saved.remove(&pod)).map_err(failed("remove from", maps::SAVED))
    }

    /// Makes sockets of the cgroup `id` ours.
    pub(crate) fn add_own_cgroup(&mut self, id: u64) -> Result<(), CaptureError> {
        self.own_cgroups.insert(id, 1, 0).map_err(failed("insert into", maps::OWN_CGROUPS))
    }

    /// Makes sockets of all other cgroups nobody's of ours.
    pub(crate) fn keep_own_cgroups(&mut self, ids: &[u64]) -> Result<(), CaptureError> {
        remove_matching(&mut self.own_cgroups, maps::OWN_CGROUPS, |key, _| !ids.contains(key))
    }

    /// How often each outcome happened, since the maps were pinned.
    pub(crate) fn outcomes(&self) -> Result<Vec<(Outcome, u64)>, CaptureError> {
        Outcome::ALL.iter().map(|outcome| Ok((*outcome, self.outcome(*outcome)?))).collect()
    }

    pub(crate) fn outcome(&self, outcome: Outcome) -> Result<u64, CaptureError> {
        let index = outcome as u32;
        let values = self.outcomes.get(&index, 0).map_err(failed("read", maps::OUTCOMES))?;
        Ok(values.iter().sum())
    }
}

impl fmt::Debug for Maps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maps").finish_non_exhaustive()
    }
}

const fn exclusion(pod: u32, (kind, value): (u32, u32)) -> Exclusion {
    Exclusion { pod, kind, value }
}

const fn network(pod: u32, (prefix, addr, _): (u8, [u8; 16], u8)) -> Key<PodAddr> {
    Key::new(PodNetwork::bits(prefix), PodAddr { pod, addr: Addr(addr) })
}

/// Names `attempt` on `map`.
pub(crate) fn failed(
    attempt: &'static str,
    map: &'static str,
) -> impl FnOnce(MapError) -> CaptureError {
    move |source| CaptureError::Map { attempt, map, source }
}

fn open<T: TryFrom<Map, Error = MapError>>(
    pins: &VersionPins,
    name: &'static str,
) -> Result<T, CaptureError> {
    let map = MapData::from_pin(pins.map(name)).map_err(failed("open", name))?;
    Map::from_map_data(map).and_then(T::try_from).map_err(failed("adopt", name))
}

fn create<K: aya::Pod, V: aya::Pod>(
    pins: &VersionPins,
    name: &'static str,
    entries: u32,
    flags: u32,
) -> Result<(), CaptureError> {
    let path = pins.map(name);
    if path.exists() {
        return Ok(());
    }
    let map = HashMap::<MapData, K, V>::create(entries, flags).map_err(failed("create", name))?;
    map.pin(path).map_err(|error| {
        failed("pin", name)(MapError::PinError { name: Some(name.to_owned()), error })
    })
}

fn absent_is_fine(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(e)) if e.io_error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn remove_matching<K: aya::Pod, V: aya::Pod>(
    map: &mut HashMap<MapData, K, V>,
    name: &'static str,
    matches: impl Fn(&K, &V) -> bool,
) -> Result<(), CaptureError> {
    let entries = map.iter().collect::<Result<Vec<_>, _>>().map_err(failed("read", name))?;
    for (key, _) in entries.iter().filter(|(key, value)| matches(key, value)) {
        absent_is_fine(map.remove(key)).map_err(failed("remove from", name))?;
    }
    Ok(())
}
