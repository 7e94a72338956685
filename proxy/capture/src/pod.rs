//! An enrolled pod: its listeners, its addresses, and the watch that keeps what capture needs in step with them.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use aya::programs::ProgramFd;
use culvert_sys::netns::Netns;
use ipnet::IpNet;
use rtnetlink::{
    MulticastGroup,
    sys::{
        AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE,
    },
};
use tokio::task::JoinError;

use crate::{
    counts::{Counts, Failure},
    dns::{Dns, DnsSocket},
    error::{CaptureError, InNetns as _, chain},
    hooks::Programs,
    interfaces::{Family, Interfaces, look_into},
    listeners::{Listener, Place, Role},
    node::{SharedMaps, WhenDown},
    node_end::NodeGuard,
    object::Loader,
    pins::PodPins,
    routing,
    rtnl::Rtnl,
    settings::Settings,
    upkeep::Upkeep,
};

/// How long a change that the kernel failed to announce may go unseen.
const RESYNC: Duration = Duration::from_secs(5);
/// How long changes are gathered: an interface is configured in several steps.
const GATHER: Duration = Duration::from_millis(20);

/// A pod whose connections are captured. Dropping it closes its listeners and leaves everything else: new connections
/// are then held.
#[derive(Debug)]
pub struct Pod {
    inner: Arc<Inner>,
    listeners: Vec<Listener>,
    dns: Dns,
    changes: Option<Changes>,
}

/// What the pod and its watch share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) id: u32,
    pub(crate) netns: Netns,
    pub(crate) addresses: Addresses,
    pub(crate) counts: Arc<Counts>,
    pub(crate) settings: ArcSwap<Settings>,
    pub(crate) steered: Option<Steered>,
}

/// What is kept in step where our programs steer.
#[derive(Debug)]
pub(crate) struct Steered {
    pub(crate) when_down: WhenDown,
    pub(crate) maps: SharedMaps,
    pub(crate) pins: PodPins,
    pub(crate) loader: Arc<Mutex<Loader>>,
    pub(crate) programs: Programs,
    pub(crate) node_guard: Option<NodeGuard>,
    /// `pick_listener`, loaded.
    pub(crate) lookup: ProgramFd,
    /// The pod's listeners, which end with those who accept from them.
    pub(crate) places: Vec<Place>,
    pub(crate) counts: Arc<Counts>,
    /// Locked while the watch makes changes, so that it makes none once the pod is leaving.
    pub(crate) upkeep: Mutex<Upkeep>,
}

/// The addresses of a pod as of now; cheap to clone and to ask.
#[derive(Clone, Debug, Default)]
pub struct Addresses(Arc<ArcSwap<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// With the interface of each, unless several have it.
    own: BTreeMap<IpAddr, Option<u32>>,
    /// What is behind interfaces whose connections are captured as the pod's own.
    behind: Vec<IpNet>,
}

impl Addresses {
    /// Whether the pod has the address, or it is behind an interface that the pod reroutes: the proof that a connection to
    /// the outbound listener is the pod's own.
    pub fn owns(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        let known = self.0.load();
        ip.is_loopback()
            || known.own.contains_key(&ip)
            || known.behind.iter().any(|net| net.contains(&ip))
    }

    /// The interface that has the address, unless several have.
    pub(crate) fn interface_of(&self, ip: IpAddr) -> Option<u32> {
        self.0.load().own.get(&ip).copied().flatten()
    }

    pub(crate) fn set(&self, now: &Interfaces, settings: &Settings) {
        let behind = now.networks_of(&settings.reroute_interfaces);
        self.0.store(Arc::new(Known { own: now.owners(), behind }));
    }
}

impl Pod {
    pub(crate) fn new(
        inner: Arc<Inner>,
        listeners: Vec<Listener>,
        queries: Vec<DnsSocket>,
        changes: Changes,
    ) -> Self {
        let (dns, listeners) = listeners.into_iter().partition(|one| one.role() == Role::Dns);
        let dns = Dns { queries, listeners: dns };
        Self { inner, listeners, dns, changes: Some(changes) }
    }

    /// Inode number of the pod's network namespace.
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// The pod's network namespace.
    pub fn netns(&self) -> &Netns {
        &self.inner.netns
    }

    /// The pod's addresses, kept up to date by [`Watch`].
    pub fn addresses(&self) -> Addresses {
        self.inner.addresses.clone()
    }

    /// What changes how the pod is captured, from any thread.
    pub fn capture(&self) -> PodCapture {
        PodCapture(Arc::clone(&self.inner))
    }

    /// Waits for a change of the watch that is under way, and lets it make no more: for one that is about to be replaced by
    /// [`Node::enroll`](crate::Node::enroll). Blocks.
    pub fn leave(&self) {
        if let Some(steered) = &self.inner.steered {
            steered.upkeep().leave();
        }
    }

    /// The pod's listeners, once: whoever takes them must keep each for as long as it is to accept.
    pub fn take_listeners(&mut self) -> Vec<Listener> {
        std::mem::take(&mut self.listeners)
    }

    /// What the pod's DNS queries arrive at, once: whoever takes it must keep each part for as long as it is to be answered.
    /// It is there whether or not the pod's settings capture DNS.
    pub fn take_dns(&mut self) -> Dns {
        std::mem::take(&mut self.dns)
    }

    /// How the pod is captured now.
    pub fn settings(&self) -> Arc<Settings> {
        self.inner.settings.load_full()
    }

    /// The watch over the pod's interfaces and addresses, once. Without it addresses that the pod gets later are taken
    /// for foreign ones.
    pub fn take_watch(&mut self) -> Option<Watch> {
        let changes = self.changes.take()?;
        Some(Watch { inner: Arc::clone(&self.inner), changes })
    }
}

/// The capture of a pod, without what its connections arrive at.
#[derive(Clone, Debug)]
pub struct PodCapture(pub(crate) Arc<Inner>);

impl PodCapture {
    /// Captures new connections of the pod, and to it, by other settings; those that are open keep the way on which they were
    /// opened. The former settings stay where that fails, as it does when the maps have no room for these. With redirect
    /// steering, and once the pod is leaving, there is nothing to set. Blocks.
    pub fn configure(&self, settings: &Settings) -> Result<(), CaptureError> {
        self.0.configure(settings)
    }

    /// Waits for a change of the watch that is under way, and lets it make no more, until
    /// [`Node::reclaim_pod`](crate::Node::reclaim_pod): another process is about to take the pod over. Blocks.
    pub fn release(&self) {
        if let Some(steered) = &self.0.steered {
            steered.upkeep().suspend();
        }
    }
}

/// Follows the interfaces and addresses of a pod.
#[derive(Debug)]
pub struct Watch {
    inner: Arc<Inner>,
    changes: Changes,
}

impl Watch {
    /// Runs until it is dropped; failures are logged and tried again.
    pub async fn run(self) {
        let Self { inner, mut changes } = self;
        let id = inner.id;
        loop {
            changes.wait().await;
            let synced = tokio::task::spawn_blocking({
                let inner = Arc::clone(&inner);
                move || inner.sync()
            });
            report(id, &inner.counts, synced.await);
        }
    }
}

/// Logs and counts what went wrong in one look at a pod; the next is not far.
fn report(id: u32, counts: &Counts, synced: Result<Result<(), CaptureError>, JoinError>) {
    match synced {
        Ok(Err(error)) => {
            counts.failed(Failure::Refused, 1);
            tracing::warn!(error = chain(&error), pod = id, "cannot keep up a pod's capture");
        }
        Err(error) if error.is_panic() => {
            counts.failed(Failure::Panicked, 1);
            tracing::error!(%error, pod = id, "the watch over a pod's capture panicked; it goes on");
        }
        // The process ends.
        Ok(Ok(())) | Err(_) => {}
    }
}

impl Inner {
    /// Brings what capture needs in step with the namespace as it is.
    fn sync(&self) -> Result<(), CaptureError> {
        let (mut rtnl, now) = look_into(&self.netns)?;
        self.addresses.set(&now, &self.settings.load());
        match &self.steered {
            Some(steered) => steered.mend(&self.netns, &mut rtnl, &now, &self.settings),
            None => Ok(()),
        }
    }

    fn configure(&self, settings: &Settings) -> Result<(), CaptureError> {
        let Some(steered) = &self.steered else { return Ok(()) };
        let (mut rtnl, now) = look_into(&self.netns)?;
        let before = self.settings.swap(Arc::new(settings.clone()));
        // First: what they reroute is known before it arrives.
        self.addresses.set(&now, settings);
        let configured = steered.configure(&self.netns, &mut rtnl, &now, settings);
        if configured.is_err() {
            self.counts.failed(Failure::SettingsRefused, 1);
            // The next look takes back what has been done.
            self.settings.store(before);
        }
        configured
    }
}

impl Steered {
    pub(crate) fn upkeep(&self) -> MutexGuard<'_, Upkeep> {
        // It is changed step by step along with the kernel's state, and a panic leaves it true to that.
        self.upkeep.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends captured connections to `lo`, from the pod's address of now.
pub(crate) fn sync_routing(
    id: u32,
    rtnl: &mut Rtnl,
    now: &Interfaces,
    settings: &Settings,
) -> Result<(), CaptureError> {
    let Some(loopback) = now.loopback() else { return Ok(()) };
    for family in Family::ALL {
        routing::add_rules(rtnl, family).in_netns(id, "add the routing rules")?;
        match now.primary(family) {
            Some(ip) => routing::set_route(rtnl, loopback.index, ip)
                .in_netns(id, format!("set the route of captured connections from {ip}"))?,
            None => routing::remove_route(rtnl, family)
                .in_netns(id, "remove the route of captured connections")?,
        }
        routing::set_reroutes(rtnl, family, &settings.reroute_interfaces)
            .in_netns(id, "set the rules of rerouted interfaces")?;
    }
    Ok(())
}

/// rtnetlink's announcements of what changes among interfaces, addresses, routes, rules, and filters.
pub(crate) struct Changes {
    socket: TokioSocket,
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").finish_non_exhaustive()
    }
}

impl Changes {
    /// Subscribes; whatever changes from now on is not missed. Must run in a tokio runtime.
    pub(crate) fn subscribe(netns: &Netns) -> io::Result<Self> {
        let mut socket = netns.run(|| TokioSocket::new(NETLINK_ROUTE))??;
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Tc,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv4Rule,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Ipv6Rule,
        ];
        let mask = groups.iter().fold(0, |mask, group| mask | 1 << (*group as u32 - 1));
        socket.socket_mut().bind(&SocketAddr::new(0, mask))?;
        Ok(Self { socket })
    }

    /// Waits for a change, or so long that an unannounced one would be due.
    async fn wait(&mut self) {
        let mut buffer = Vec::with_capacity(4096);
        // An announcement, a timeout and a loss of announcements ask for the same: look again.
        drop(tokio::time::timeout(RESYNC, self.socket.recv(&mut buffer)).await);
        let gathered = tokio::time::sleep(GATHER);
        tokio::pin!(gathered);
        loop {
            buffer.clear();
            tokio::select! {
                () = &mut gathered => return,
                _ = self.socket.recv(&mut buffer) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_look_that_panics_is_counted() {
        let counts = Counts::default();
        let looked = tokio::task::spawn_blocking(|| panic!("in a look"));
        report(1, &counts, looked.await);
        assert!(counts.failures().contains(&("panicked", 1)));
    }
}
