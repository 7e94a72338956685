//! What the tests happen in: namespaces, cgroups, and the state that must be as it was.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use aya::maps::{HashMap, LpmTrie, Map, MapData};
use culvert_abi::{Addr, Exclusion, PodAddr, maps};
use culvert_capture::{
    BpfLog, CaptureError, Captured, GuardHost, Listener, Node, NodeOptions, Pod, ProbeCgroup, Role,
    Seat, Settings, WhenDown, cleanup,
};
use culvert_sys::{
    bpf::{self, LinkIds, LinkTarget},
    cgroup::Hierarchy,
    chain::{self, Hook},
    netns::Netns,
};
use tokio::runtime::Runtime;

use crate::app::App;

pub(crate) const BPFFS: &str = "/sys/fs/bpf";
pub(crate) const POD_V4: &str = "10.91.0.5";
pub(crate) const POD_V6: &str = "fd91::5";
pub(crate) const OUTSIDE_V4: &str = "10.91.0.1";
pub(crate) const OUTSIDE_V6: &str = "fd91::1";
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// A held connection completes at its next SYN: 1, 3 or 7 s after the first.
pub(crate) const LATER: Duration = Duration::from_secs(20);

/// The tests move this process between cgroups, which only one can do at a time.
static TURN: Mutex<()> = Mutex::new(());

/// A pod and the outside, an application, and this process in a cgroup of its own.
pub(crate) struct World {
    pub(crate) app: App,
    pub(crate) pod: Namespace,
    pub(crate) outside: Namespace,
    pub(crate) name: String,
    pub(crate) runtime: Runtime,
    own: OwnCgroup,
    _turn: MutexGuard<'static, ()>,
}

impl World {
    /// `None`, and a printed reason, where the machine does not allow it.
    pub(crate) fn new(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            let required = env("CULVERT_REQUIRE").unwrap_or_default();
            assert!(
                !required.split(',').any(|name| name == "netns"),
                "netns is required: run as root"
            );
            println!("skipped: network namespaces need root");
            return None;
        }
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("cap{}-{test}", std::process::id());
        // Before this process moves: the application stays where we were.
        let app = App::start();
        let pod = Namespace::new(&format!("{name}-pod"));
        let outside = Namespace::new(&format!("{name}-out"));
        for command in [
            format!("ip -n {pod} link add eth0 type veth peer name pod netns {outside}"),
            format!("ip -n {pod} link set eth0 up"),
            format!("ip -n {outside} link set pod up"),
            format!("ip -n {pod} addr add {POD_V4}/24 dev eth0"),
            format!("ip -n {pod} addr add {POD_V6}/64 dev eth0 nodad"),
            format!("ip -n {outside} addr add {OUTSIDE_V4}/24 dev pod"),
            format!("ip -n {outside} addr add {OUTSIDE_V6}/64 dev pod nodad"),
            format!("ip -n {pod} route add default via {OUTSIDE_V4}"),
            format!("ip -n {pod} -6 route add default via {OUTSIDE_V6}"),
        ] {
            run(&command);
        }
        // Link-local addresses are proved unique, which changes the state that tests compare.
        for netns in [&pod, &outside] {
            eventually("addresses are usable", || {
                !output(&format!("ip -n {netns} -6 addr show")).contains("tentative")
            });
        }
        let runtime = Runtime::new().unwrap();
        let own = OwnCgroup::enter(&name);
        Some(Self { app, pod, outside, name, runtime, own, _turn: turn })
    }

    pub(crate) fn options(&self) -> NodeOptions {
        NodeOptions {
            cgroup_root: self.own.root.clone(),
            own_cgroup: self.own.path.clone(),
            when_down: WhenDown::Hold,
            probes: ProbeCgroup::Off,
            guard_host: GuardHost::Off,
            log: BpfLog::Off,
        }
    }

    pub(crate) fn seat(&self) -> Seat {
        Seat::take(Path::new(BPFFS), &self.name).unwrap()
    }

    pub(crate) fn start(&self) -> Node {
        self.start_as(&self.options())
    }

    pub(crate) fn start_as(&self, options: &NodeOptions) -> Node {
        let _entered = self.runtime.enter();
        Node::start(options, Some(self.seat())).unwrap()
    }

    pub(crate) fn enroll(&self, node: &Node) -> Pod {
        self.try_enroll(node, &self.pod.netns()).unwrap()
    }

    pub(crate) fn enroll_with(&self, node: &Node, settings: &Settings) -> Pod {
        let _entered = self.runtime.enter();
        node.enroll(&self.pod.netns(), settings).unwrap()
    }

    pub(crate) fn try_enroll(&self, node: &Node, netns: &Netns) -> Result<Pod, CaptureError> {
        let _entered = self.runtime.enter();
        node.enroll(netns, &Settings::default())
    }

    /// The next connection at the listener of `role` and of `dst`'s family.
    pub(crate) fn accept(&self, listeners: &[Listener], role: Role, dst: &str) -> Captured {
        let v6 = dst.starts_with('[');
        let accepts = listeners
            .iter()
            .filter(|listener| listener.role() == role)
            .map(|listener| Box::pin(listener.accept()))
            .collect::<Vec<_>>();
        let mut accepts = accepts.into_iter();
        let mut accept = if v6 { accepts.nth(1) } else { accepts.next() }.unwrap();
        self.runtime
            .block_on(async { tokio::time::timeout(LATER, &mut accept).await })
            .unwrap_or_else(|_| panic!("nothing for {dst} came to {role:?}"))
            .unwrap()
    }

    pub(crate) fn write(&self, mut captured: Captured, bytes: &[u8]) {
        use tokio::io::AsyncWriteExt as _;
        self.runtime.block_on(captured.stream.write_all(bytes)).unwrap();
    }

    pub(crate) fn state(&self) -> String {
        state(&self.pod.netns())
    }

    /// The pod's addresses, as its programs know them.
    pub(crate) fn addresses(&self, pod: u32) -> Vec<IpAddr> {
        let keys =
            self.map::<PodAddr, u8>(maps::ADDRS).keys().map(Result::unwrap).collect::<Vec<_>>();
        let own = keys.iter().filter(|key| key.pod == pod);
        own.map(|key| IpAddr::from(key.addr.0).to_canonical()).collect()
    }

    /// Whose pod kubelet is taken to probe at the address.
    pub(crate) fn holder(&self, ip: &str) -> Option<u32> {
        let ip: Ipv4Addr = ip.parse().unwrap();
        let key = Addr(ip.to_ipv6_mapped().octets());
        self.map::<Addr, culvert_abi::Pod>(maps::PODS_BY_ADDR).get(&key, 0).ok().map(|pod| pod.id)
    }

    pub(crate) fn map<K: aya::Pod, V: aya::Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        self.open(name).try_into().unwrap()
    }

    fn open(&self, name: &str) -> Map {
        let path = self.version().join("maps").join(name);
        Map::from_map_data(MapData::from_pin(path).unwrap()).unwrap()
    }

    /// What the maps hold of the pod's settings: the pod if it has any, how many exclusions, and how many networks.
    pub(crate) fn settings(&self, pod: u32) -> (Option<u32>, usize, usize) {
        let settings = self.map::<u32, culvert_abi::Settings>(maps::SETTINGS);
        let exclusions = self.map::<Exclusion, u8>(maps::EXCLUSIONS);
        let networks: LpmTrie<MapData, PodAddr, u8> =
            self.open(maps::EXCLUDED_CIDRS).try_into().unwrap();
        (
            settings.get(&pod, 0).ok().map(|_| pod),
            exclusions.keys().filter(|key| key.as_ref().unwrap().pod == pod).count(),
            networks.keys().filter(|key| key.as_ref().unwrap().data().pod == pod).count(),
        )
    }

    /// Takes the pod's `sk_lookup` program away, as `bpftool link detach` does.
    pub(crate) fn detach_lookup(&self, pod: u32) {
        let link = bpf::open_pin(&self.lookup(pod)).unwrap();
        bpf::link_detach(link.as_fd()).unwrap();
    }

    /// Takes a tcx link of the pod's away, as `bpftool link detach` does.
    pub(crate) fn detach_link(&self, pod: u32, interface: &str, program: &str) {
        let index = self.pod.netns().run(|| nix::net::if_::if_nametoindex(interface));
        let pin = format!("pods/{pod}/tc/{}-{program}", index.unwrap().unwrap());
        let link = bpf::open_pin(&self.version().join(pin)).unwrap();
        bpf::link_detach(link.as_fd()).unwrap();
    }

    pub(crate) fn has_lookup(&self, pod: u32) -> bool {
        bpf::open_pin(&self.lookup(pod))
            .is_ok_and(|link| bpf::link_target(link.as_fd()).unwrap() == LinkTarget::Netns(pod))
    }

    fn lookup(&self, pod: u32) -> PathBuf {
        self.version().join("pods").join(pod.to_string()).join("pick_listener")
    }

    pub(crate) fn version(&self) -> PathBuf {
        let version = format!("v{}", culvert_abi::ABI_VERSION);
        Path::new(BPFFS).join("culvert").join(&self.name).join(version)
    }

    pub(crate) fn pins(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        collect(&Path::new(BPFFS).join("culvert").join(&self.name), &mut found);
        found.sort();
        found
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Err(error) = cleanup(Path::new(BPFFS), &self.name) {
            println!("cleanup: {error}");
        }
    }
}

/// A network namespace under `/run/netns`, removed in the end.
#[derive(Clone)]
pub(crate) struct Namespace(std::sync::Arc<Mounted>);

struct Mounted(String);

impl Namespace {
    pub(crate) fn new(name: &str) -> Self {
        run(&format!("ip netns add {name}"));
        let made = Self(std::sync::Arc::new(Mounted(name.to_owned())));
        run(&format!("ip -n {name} link set lo up"));
        made
    }

    pub(crate) fn netns(&self) -> Netns {
        Netns::open(&Path::new("/run/netns").join(&self.0.0)).unwrap()
    }
}

impl std::fmt::Display for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.0)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run(&format!("ip netns del {}", self.0));
    }
}

/// A cgroup that holds this process while it plays the proxy.
pub(crate) struct OwnCgroup {
    root: PathBuf,
    home: PathBuf,
    pub(crate) path: PathBuf,
}

impl OwnCgroup {
    pub(crate) fn enter(name: &str) -> Self {
        let hierarchy = Hierarchy::find(Path::new("/sys/fs/cgroup/unified")).unwrap();
        let home = hierarchy.own().unwrap();
        let path = hierarchy.root().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("cgroup.procs"), "0").unwrap();
        Self { root: hierarchy.root().to_owned(), home, path }
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        fs::write(self.home.join("cgroup.procs"), "0").unwrap();
        // A thread that was joined may still be on its way out, and counts as a member until then.
        eventually_ok("its cgroup is empty", || fs::remove_dir(&self.path));
    }
}

/// Everything that enrolment changes in a namespace, as text.
pub(crate) fn state(netns: &Netns) -> String {
    netns
        .run(|| {
            let mut all = String::new();
            for command in [
                "ip rule",
                "ip -6 rule",
                "ip route show table all",
                "ip -6 route show table all",
                "tc qdisc show",
                "tc filter show dev lo ingress",
                "tc filter show dev eth0 ingress",
                "tc filter show dev eth0 egress",
            ] {
                all = all + "# " + command + "\n" + &output(command);
            }
            for (interface, hook) in
                [("lo", Hook::Ingress), ("eth0", Hook::Ingress), ("eth0", Hook::Egress)]
            {
                let links = links(interface, hook).len();
                writeln!(all, "# tcx {interface} {hook:?}: {links}").unwrap();
            }
            for sysctl in [
                "ipv4/tcp_fwmark_accept",
                "ipv4/fwmark_reflect",
                "ipv6/fwmark_reflect",
                "ipv4/conf/lo/accept_local",
                "ipv4/conf/eth0/accept_local",
                "ipv4/conf/all/accept_local",
            ] {
                let value = fs::read_to_string(Path::new("/proc/sys/net").join(sysctl)).unwrap();
                all = all + "# " + sysctl + "\n" + &value;
            }
            all
        })
        .unwrap()
}

/// The tcx links of an interface of this thread's namespace; none before Linux 6.6.
pub(crate) fn links(interface: &str, hook: Hook) -> Vec<LinkIds> {
    let index = nix::net::if_::if_nametoindex(interface);
    index.map(|index| chain::attached(index, hook).unwrap_or_default()).unwrap_or_default()
}

/// Whether the kernel has tcx links (Linux 6.6).
pub(crate) fn have_tcx() -> bool {
    chain::attached(1, Hook::Ingress).is_ok()
}

/// Program numbers and tags differ from load to load.
pub(crate) fn without_ids(state: String) -> String {
    state
        .lines()
        .map(|line| line.split(" id ").next().unwrap_or(line))
        .collect::<Vec<_>>()
        .join("\n")
}

fn collect(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        collect(&path, found);
        found.push(path);
    }
}

pub(crate) fn run(command: &str) {
    output(command);
}

pub(crate) fn output(command: &str) -> String {
    let mut words = command.split(' ');
    let done = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(done.status.success(), "{command}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

#[track_caller]
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    eventually_ok(what, || if holds() { Ok(()) } else { Err("not yet") });
}

#[track_caller]
pub(crate) fn eventually_ok<T, E: std::fmt::Display>(
    what: &str,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> T {
    let (_never, pause) = mpsc::channel::<()>();
    let mut last = String::new();
    for _ in 0..500 {
        match attempt() {
            Ok(done) => return done,
            Err(e) => last = e.to_string(),
        }
        // Nothing is ever sent: this is a pause between two looks.
        assert!(pause.recv_timeout(Duration::from_millis(20)).is_err());
    }
    panic!("in vain: {what}: {last}");
}

pub(crate) fn env(name: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "how the test run speaks to its tests")]
    std::env::var(name).ok()
}
