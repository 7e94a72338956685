//! An enrolled pod: its listeners, its addresses, and the watch that keeps what capture needs in step with them.

use std::{
    collections::BTreeSet,
    fmt, io,
    net::IpAddr,
    os::fd::AsFd as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use aya::programs::ProgramFd;
use culvert_sys::netns::Netns;
use rtnetlink::{
    MulticastGroup,
    sys::{
        AsyncSocket as _, AsyncSocketExt as _, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE,
    },
};

use crate::{
    error::{CaptureError, InNetns as _, chain},
    filters::{self, Filter, Hook, Packets, Qdisc},
    interfaces::{Family, Interface, Interfaces, Kind, look_into},
    listeners::Listener,
    node::SharedMaps,
    object::programs,
    pins::PodPins,
    routing,
    rtnl::Rtnl,
};

/// How long a change that the kernel failed to announce may go unseen.
const RESYNC: Duration = Duration::from_secs(30);
/// How long changes are gathered: an interface is configured in several steps.
const GATHER: Duration = Duration::from_millis(20);

pub(crate) const HOLD_IN: Filter =
    Filter { name: programs::HOLD_IN, hook: Hook::Ingress, packets: Packets::All };
/// IPv4 needs none: an outbound SYN that finds no listener is not answered at all.
pub(crate) const HOLD_OUT: Filter =
    Filter { name: programs::HOLD_OUT, hook: Hook::Ingress, packets: Packets::Ipv6 };
pub(crate) const GUARD: Filter =
    Filter { name: programs::GUARD, hook: Hook::Egress, packets: Packets::All };

/// A pod whose connections are captured. Dropping it closes its listeners and leaves everything else: new connections
/// are then held.
#[derive(Debug)]
pub struct Pod {
    inner: Arc<Inner>,
    listeners: Vec<Listener>,
    changes: Option<Changes>,
}

/// What the pod and its watch share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) id: u32,
    pub(crate) netns: Netns,
    pub(crate) addresses: Addresses,
    pub(crate) steered: Option<Steered>,
}

/// What is kept in step where our programs steer.
#[derive(Debug)]
pub(crate) struct Steered {
    pub(crate) maps: SharedMaps,
    pub(crate) pins: PodPins,
    pub(crate) programs: Programs,
    /// Locked while the watch makes changes, so that it makes none once the pod is leaving.
    pub(crate) standing: Mutex<Standing>,
}

/// Whether the watch may still set things up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    #[default]
    Enrolled,
    Leaving,
}

/// The loaded filters, for interfaces that appear later.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) hold_in: ProgramFd,
    pub(crate) hold_out: ProgramFd,
    pub(crate) guard: ProgramFd,
}

/// What becomes of a filter of ours that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// It is of this process.
    Keep,
    /// It is of a process before.
    Replace,
}

/// The addresses of a pod as of now; cheap to clone and to ask.
#[derive(Clone, Debug, Default)]
pub struct Addresses(Arc<ArcSwap<BTreeSet<IpAddr>>>);

impl Addresses {
    /// Whether the pod has the address: the proof that a connection to the outbound listener is the pod's own.
    pub fn owns(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        ip.is_loopback() || self.0.load().contains(&ip)
    }

    pub(crate) fn set(&self, owned: BTreeSet<IpAddr>) {
        self.0.store(Arc::new(owned));
    }
}

impl Pod {
    pub(crate) fn new(inner: Arc<Inner>, listeners: Vec<Listener>, changes: Changes) -> Self {
        Self { inner, listeners, changes: Some(changes) }
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

    /// Waits for a change of the watch that is under way, and lets it make no more.
    pub(crate) fn leave(&self) {
        if let Some(steered) = &self.inner.steered {
            *steered.standing() = Standing::Leaving;
        }
    }

    /// The pod's listeners, once: whoever takes them must keep each for as long as it is to accept.
    pub fn take_listeners(&mut self) -> Vec<Listener> {
        std::mem::take(&mut self.listeners)
    }

    /// The watch over the pod's interfaces and addresses, once. Without it addresses that the pod gets later are taken
    /// for foreign ones.
    pub fn take_watch(&mut self) -> Option<Watch> {
        let changes = self.changes.take()?;
        Some(Watch { inner: Arc::clone(&self.inner), changes })
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
            let inner = Arc::clone(&inner);
            let synced = tokio::task::spawn_blocking(move || inner.sync()).await;
            if let Ok(Err(error)) = synced {
                tracing::warn!(error = chain(&error), pod = id, "cannot follow a pod's interfaces");
            }
        }
    }
}

impl Inner {
    /// Brings maps, routes and filters in step with the namespace as it is.
    fn sync(&self) -> Result<(), CaptureError> {
        let (mut rtnl, now) = look_into(&self.netns)?;
        if let Some(steered) = &self.steered {
            let standing = steered.standing();
            if *standing == Standing::Leaving {
                return Ok(());
            }
            steered.sync_addresses(self.id, &now)?;
            sync_routing(self.id, &mut rtnl, &now)?;
            steered.attach_holds(self.id, &mut rtnl, &now, Existing::Keep)?;
            steered.attach_guards(self.id, &mut rtnl, &now, Existing::Keep)?;
        }
        self.addresses.set(now.owned());
        Ok(())
    }
}

impl Steered {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `addrs` and, for a committed pod, `pods_by_addr` hold just the pod's addresses.
    fn sync_addresses(&self, id: u32, now: &Interfaces) -> Result<(), CaptureError> {
        let owned = now.owned();
        let mut maps = self.maps.lock();
        let before: BTreeSet<IpAddr> = maps.addresses(id)?.into_iter().collect();
        for ip in owned.difference(&before) {
            maps.add_address(id, *ip)?;
            maps.add_by_address(id, *ip)?;
        }
        for ip in before.difference(&owned) {
            maps.remove_by_address(id, *ip)?;
            maps.remove_address(id, *ip)?;
        }
        Ok(())
    }

    /// Attaches the filters that hold connections while there is no listener.
    pub(crate) fn attach_holds(
        &self,
        id: u32,
        rtnl: &mut Rtnl,
        now: &Interfaces,
        existing: Existing,
    ) -> Result<(), CaptureError> {
        for interface in now.iter() {
            self.ensure_qdisc(id, rtnl, interface)?;
            let (filter, program) = match interface.kind {
                Kind::Loopback => (HOLD_OUT, &self.programs.hold_out),
                Kind::Outside => (HOLD_IN, &self.programs.hold_in),
            };
            attach(id, rtnl, interface, (filter, program), existing)?;
        }
        Ok(())
    }

    /// Attaches the filter that drops what capture has missed, to interfaces that have their qdisc.
    pub(crate) fn attach_guards(
        &self,
        id: u32,
        rtnl: &mut Rtnl,
        now: &Interfaces,
        existing: Existing,
    ) -> Result<(), CaptureError> {
        for interface in now.iter().filter(|interface| interface.kind == Kind::Outside) {
            attach(id, rtnl, interface, (GUARD, &self.programs.guard), existing)?;
        }
        Ok(())
    }

    /// The note comes first: a qdisc of ours without one would never be removed.
    fn ensure_qdisc(
        &self,
        id: u32,
        rtnl: &mut Rtnl,
        interface: &Interface,
    ) -> Result<(), CaptureError> {
        let Interface { index, name, .. } = interface;
        if self.pins.has_qdisc(*index) {
            let attempt = format!("add a clsact qdisc to {name}");
            return filters::add_qdisc(rtnl, *index).map(drop).in_netns(id, attempt);
        }
        self.pins.note_qdisc(*index)?;
        let added = filters::add_qdisc(rtnl, *index);
        if !matches!(added, Ok(Qdisc::Made)) {
            self.pins.forget_qdisc(*index)?;
        }
        added.map(drop).in_netns(id, format!("add a clsact qdisc to {name}"))
    }
}

fn attach(
    id: u32,
    rtnl: &mut Rtnl,
    interface: &Interface,
    (filter, program): (Filter, &ProgramFd),
    existing: Existing,
) -> Result<(), CaptureError> {
    let attempt = || format!("attach {} to {}", filter.name, interface.name);
    if existing == Existing::Keep
        && filters::is_attached(rtnl, interface.index, filter).in_netns(id, attempt())?
    {
        return Ok(());
    }
    filters::attach(rtnl, interface.index, filter, program.as_fd()).in_netns(id, attempt())
}

/// Sends captured connections to `lo`, from the pod's address of now.
pub(crate) fn sync_routing(id: u32, rtnl: &mut Rtnl, now: &Interfaces) -> Result<(), CaptureError> {
    let Some(loopback) = now.loopback() else { return Ok(()) };
    for family in Family::ALL {
        routing::add_rules(rtnl, family).in_netns(id, "add the routing rules")?;
        match now.primary(family) {
            // Even if it seems to be there: the kernel drops it when the address goes, if only for a moment.
            Some(ip) => routing::set_route(rtnl, loopback.index, ip)
                .in_netns(id, format!("set the route of captured connections from {ip}"))?,
            None => routing::remove_route(rtnl, family)
                .in_netns(id, "remove the route of captured connections")?,
        }
    }
    Ok(())
}

/// rtnetlink's announcements of interfaces and addresses that change.
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
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
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
