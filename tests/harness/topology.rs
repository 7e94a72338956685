//! Two nodes, a wire between them, and four pods, each in a network namespace of its own.
//!
//! ```text
//!  a1 ─┐                                      ┌─ b1
//!      ├─ node a ── eth0 ═ wire: br0 ═ eth0 ── node b ─┤
//!  a2 ─┘      10.0.0.1                10.0.0.2         └─ x (outside the mesh)
//! ```
//!
//! Every pod has one IPv4 and one IPv6 address and reaches its node the way Calico does it: a /32 and a /128 on
//! `eth0`, the gateways 169.254.1.1 and `fe80::1` on the node's end of the veth. Addresses are the same in every
//! topology, because namespaces keep them apart; names are not. Leaves what runs in the pods to `apps` and
//! `culvert`.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, Result};

use crate::{
    cgroup, janitor,
    netns::{Netns, ip_batch},
    require,
};

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both, in the order in which scenarios try them.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];
}

/// One pod: a namespace with `eth0`.
#[derive(Debug)]
pub struct Pod {
    /// The pod's namespace.
    pub netns: Netns,
    /// Name in the mesh and the pods file.
    pub name: &'static str,
    /// Namespace in the mesh and the pods file.
    pub namespace: &'static str,
    /// Service account in the mesh and the pods file.
    pub service_account: &'static str,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Pod {
    /// The pod's address.
    pub fn ip(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }

    /// The pod's address with a port.
    pub fn at(&self, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(family), port)
    }

    /// The identity that the mesh file gives it.
    pub fn identity(&self) -> String {
        format!("spiffe://cluster.local/ns/{}/sa/{}", self.namespace, self.service_account)
    }
}

/// One node: a namespace that routes between its pods and the wire.
#[derive(Debug)]
pub struct Node {
    /// The node's namespace, where its proxy runs.
    pub netns: Netns,
    /// Unique among all topologies of this machine; culvert's `--node`.
    pub name: String,
    /// Where the node's files are written.
    pub dir: PathBuf,
}

impl Drop for Node {
    fn drop(&mut self) {
        for cgroup in cgroup::of_node(&self.name) {
            cgroup::remove(&cgroup);
        }
    }
}

/// The whole picture; dropping it removes everything it made.
#[derive(Debug)]
pub struct Topology {
    /// In the mesh, on node a.
    pub a1: Pod,
    /// In the mesh, on node a.
    pub a2: Pod,
    /// In the mesh, on node b.
    pub b1: Pod,
    /// On node b, outside the mesh.
    pub x: Pod,
    /// Holds a1 and a2.
    pub a: Node,
    /// Holds b1 and x.
    pub b: Node,
    /// The cable between the nodes.
    pub wire: Netns,
    dir: tempfile::TempDir,
}

impl Topology {
    /// Builds it for a scenario that runs culvert; `None` where the machine lacks what that takes.
    ///
    /// # Panics
    /// When it cannot be built.
    #[track_caller]
    pub fn with_culvert() -> Option<Self> {
        require::mesh().then(|| Self::build().unwrap_or_else(|error| panic!("{error:#}")))
    }

    /// Builds it in a few hundred milliseconds.
    pub fn build() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        janitor::sweep_once();

        let id = format!("cv{}x{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::Builder::new()
            .prefix(&format!("{id}-"))
            .tempdir()
            .context("make a folder for the topology's files")?;
        fs::create_dir(dir.path().join("mesh")).context("make a folder for the mesh file")?;
        let netns = |role: &str| -> Result<Netns> {
            let name = format!("{id}-{role}");
            ip_batch(None, &format!("netns add {name}\n"))?;
            Ok(Netns::adopt(name))
        };
        let node = |role: &str| -> Result<Node> {
            let name = format!("{id}-{role}");
            let folder = dir.path().join(role);
            fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
            Ok(Node { netns: netns(role)?, name, dir: folder })
        };
        let pod = |name, namespace, service_account, subnet: u16, host: u8| -> Result<Pod> {
            let [_, subnet_low] = subnet.to_be_bytes();
            Ok(Pod {
                netns: netns(name)?,
                name,
                namespace,
                service_account,
                v4: Ipv4Addr::new(10, 244, subnet_low, host),
                v6: Ipv6Addr::new(0xfd00, 0x244, subnet, 0, 0, 0, 0, host.into()),
            })
        };

        let topology = Self {
            a1: pod("a1", "shop", "web", 1, 11)?,
            a2: pod("a2", "shop", "cart", 1, 12)?,
            b1: pod("b1", "bank", "ledger", 2, 11)?,
            x: pod("x", "outside", "default", 2, 12)?,
            a: node("a")?,
            b: node("b")?,
            wire: netns("wire")?,
            dir,
        };
        topology.connect().context("wire up the topology")?;
        Ok(topology)
    }

    /// The folder that goes away with the topology.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// All pods.
    pub fn pods(&self) -> [&Pod; 4] {
        [&self.a1, &self.a2, &self.b1, &self.x]
    }

    fn connect(&self) -> Result<()> {
        let (a, b, wire) = (self.a.netns.name(), self.b.netns.name(), self.wire.name());
        for netns in [&self.a.netns, &self.b.netns, &self.wire] {
            prepare(netns)?;
        }
        for pod in self.pods() {
            prepare(&pod.netns)?;
        }

        let mut links = format!(
            "link add eth0 netns {a} type veth peer name to-a netns {wire}\n\
             link add eth0 netns {b} type veth peer name to-b netns {wire}\n"
        );
        for (node, pod) in [(a, &self.a1), (a, &self.a2), (b, &self.b1), (b, &self.x)] {
            let (inside, name) = (pod.netns.name(), pod.name);
            writeln!(
                links,
                "link add eth0 netns {inside} type veth peer name cali-{name} netns {node}"
            )?;
        }
        ip_batch(None, &links)?;

        self.wire.ip("link add br0 type bridge forward_delay 0 mcast_snooping 0\n\
             link set to-a master br0\nlink set to-b master br0\n\
             link set br0 up\nlink set to-a up\nlink set to-b up\n")?;
        for pod in self.pods() {
            pod.netns.ip(&format!(
                "link set lo up\nlink set eth0 up\n\
                 addr add {v4}/32 dev eth0\naddr add {v6}/128 dev eth0 nodad\n\
                 route add 169.254.1.1 dev eth0 scope link\n\
                 route add default via 169.254.1.1 dev eth0\n\
                 route add default via fe80::1 dev eth0\n",
                v4 = pod.v4,
                v6 = pod.v6,
            ))?;
        }
        connect_node(&self.a, 1, 2, &[&self.a1, &self.a2])?;
        connect_node(&self.b, 2, 1, &[&self.b1, &self.x])
    }
}

/// IPv6 addresses are usable at once.
fn prepare(netns: &Netns) -> Result<()> {
    write_sysctls(
        netns,
        &[("ipv6/conf/default/accept_dad", "0"), ("ipv6/conf/all/accept_dad", "0")],
    )
}

fn write_sysctls(netns: &Netns, values: &[(&str, &str)]) -> Result<()> {
    netns.run(|| {
        for (key, value) in values {
            let path = Path::new("/proc/sys/net").join(key);
            fs::write(&path, value).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    })
}

fn connect_node(node: &Node, own: u8, other: u8, pods: &[&Pod]) -> Result<()> {
    let mut lines = format!(
        "link set lo up\nlink set eth0 up\n\
         addr add 10.0.0.{own}/24 dev eth0\naddr add fd00:10::{own}/64 dev eth0 nodad\n\
         route add 10.244.{other}.0/24 via 10.0.0.{other}\n\
         route add fd00:244:{other}::/64 via fd00:10::{other}\n"
    );
    for pod in pods {
        let link = format!("cali-{}", pod.name);
        writeln!(
            lines,
            "link set {link} up\n\
             addr add 169.254.1.1/32 dev {link}\naddr add fe80::1/64 dev {link} nodad\n\
             route add {v4} dev {link}\nroute add {v6} dev {link}",
            v4 = pod.v4,
            v6 = pod.v6,
        )?;
    }
    write_sysctls(&node.netns, &[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
    node.netns.ip(&lines)
}
