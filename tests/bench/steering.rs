//! The steering alone: a pod's connections end in its own namespace, at a process that stands in for the proxy.
//!
//! That process is this program again, in a cgroup of its own: sockets of the process that steers are never captured,
//! so the client cannot be part of it. It serves the references too, so that all differ in the steering only.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use culvert_capture::{
    BpfLog, GuardHost, Listener, Node, NodeOptions, ProbeCgroup, Role, Seat, Settings, WhenDown,
};
use culvert_sys::{cgroup::Hierarchy, netns::Netns};
use culvert_tests::{netns, poll, process::Process, topology::Topology};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cpu::Pins,
    load::{Target, Transfer},
    pairs::{self, each},
    redirect,
    report::{Better, Quantity, Report},
    serve::{self, CHUNK, Cpus, Server},
    sizes::Sizes,
    stats::Bound,
};

/// Where the stand-in listens where no BPF steers.
const PLAIN: u16 = redirect::OUTBOUND;

/// A virtual address, as of a service: nobody has it.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 96, 0, 10), 80);

const LOOPBACK: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, PLAIN);

/// What the stand-in serves.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// The node name to hold.
    node: String,
    /// Name of the cgroup to make and enter.
    cgroup: String,
    /// The namespace to capture.
    captured: PathBuf,
    /// The namespace that iptables capture, and that is listened in as the proxy does it there.
    redirected: PathBuf,
    /// The namespace that nothing captures.
    bare: PathBuf,
}

/// Measures round trips and bulk over loopback, REDIRECT and BPF.
pub(crate) fn measure(report: &mut Report, sizes: &Sizes) -> Result<()> {
    let topology = Topology::build()?;
    let Topology { a1, a2, x, .. } = &topology;
    redirect::install(&a2.netns)?;
    let _stand_in = StandIn::start(&topology)?;

    let (together, apart) = (Pins::together()?, Pins::apart()?);
    let round_trip = |netns: &netns::Netns, to: (Ipv4Addr, u16), size, count| {
        let target = Target { from: netns, cpu: together.client, to: SocketAddr::from(to) };
        target.round_trip(size, count)
    };
    let bulk = |netns: &netns::Netns, to: (Ipv4Addr, u16), cpu| {
        let target = Target { from: netns, cpu, to: SocketAddr::from(to) };
        target.bulk(1, sizes.bulk)
    };
    let arranged = "One process serves both sides. Round trips, and bulk on one CPU: client and server on the last CPU. \
                    Bulk on two CPUs: the client on the first, the server on the last. One CPU shows what a byte costs; \
                    on two the sides overlap, and the rate jumps between levels from sample to sample.";

    let references = [
        ("loopback of the same pod", &a1.netns, LOOPBACK, Some(Bound::AtMost(1.05)), None),
        (
            "loopback of a pod that is not captured",
            &x.netns,
            LOOPBACK,
            Some(Bound::AtMost(1.05)),
            None,
        ),
        ("REDIRECT of a like pod", &a2.netns, ELSEWHERE, None, Some(Bound::AtLeast(1.5))),
    ];
    for (name, netns, to, round_trips_bound, bulk_bound) in references {
        report.section(&format!("Steering alone, against {name}"), arranged, name, "eBPF");
        for (name, size, count) in [
            ("RTT 64 B, p50", 64, 4 * sizes.round_trips),
            ("RTT 16 KiB, p50", 16 << 10, 4 * sizes.round_trips),
        ] {
            let pairs = pairs::take(
                sizes.pairs,
                || round_trip(netns, to, size, count),
                || round_trip(&a1.netns, ELSEWHERE, size, count),
            )?;
            let quantity = Quantity { name, unit: "µs", better: Better::Less };
            report.row(quantity, &pairs, round_trips_bound);
        }
        for (name, cpu) in [
            ("bulk, 1 stream, two CPUs", apart.client),
            ("bulk, 1 stream, one CPU", together.client),
        ] {
            let pairs = pairs::take(
                sizes.pairs,
                || bulk(netns, to, cpu),
                || bulk(&a1.netns, ELSEWHERE, cpu),
            )?;
            let quantity = Quantity { name, unit: "Gbit/s", better: Better::More };
            report.row(quantity, &each(&pairs, Transfer::gbits), bulk_bound);
        }
    }
    Ok(())
}

/// The running stand-in; dropping it ends it and takes its capture away.
struct StandIn {
    process: Process,
    cgroup: String,
}

impl StandIn {
    fn start(topology: &Topology) -> Result<Self> {
        let Topology { a1, a2, x, a, .. } = topology;
        let mut command = Command::new(std::env::current_exe().context("find this program")?);
        command.args(["serve", &a.name, &a.name]);
        command.args([a1, a2, x].map(|pod| pod.netns.path()));
        let process = Process::spawn(&a.netns, &a.dir, "stand-in", &mut command)?;
        let mut stand_in = Self { process, cgroup: a.name.clone() };
        let ready = poll::within(Duration::from_secs(30), || {
            let ended = stand_in.process.ended().is_some();
            (ended || stand_in.process.log().contains(READY)).then_some(!ended)
        });
        if ready != Some(true) {
            bail!("the stand-in for the proxy does not start: {}", stand_in.process.log());
        }
        Ok(stand_in)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if let Err(error) = self.process.signal(Signal::SIGTERM) {
            eprintln!("{error:#}");
        }
        match self.process.wait(Duration::from_secs(10)) {
            Some(status) if status.success() => {}
            ended => {
                eprintln!("the stand-in: {ended:?}: {}", self.process.log());
                self.process.kill();
            }
        }
        let removed = hierarchy().and_then(|hierarchy| Ok(hierarchy.remove_own(&self.cgroup)?));
        if let Err(error) = removed {
            eprintln!("{error:#}");
        }
    }
}

/// What the stand-in prints once everything is captured.
const READY: &str = "ready";

/// The stand-in: captures, serves until SIGTERM, and leaves nothing behind.
pub(crate) fn serve(options: &Serve) -> Result<()> {
    let hierarchy = hierarchy()?;
    let own_cgroup = hierarchy.enter_own(&options.cgroup)?;
    let pins = Pins::apart()?;
    let cpus = Cpus::ByKind { echo: Pins::together()?.server, sink: pins.server };
    let plain = [plain(&options.captured, cpus)?, plain(&options.bare, cpus)?];

    let node_options = NodeOptions {
        cgroup_root: hierarchy.root().to_owned(),
        own_cgroup: own_cgroup.path().to_owned(),
        when_down: WhenDown::Hold,
        probes: ProbeCgroup::Off,
        guard_host: GuardHost::Off,
        log: BpfLog::Off,
    };
    let redirect = Node::start(&node_options, None)?;
    let seat = Seat::take(Path::new("/sys/fs/bpf"), &options.node)?;
    let ebpf = Node::start(&node_options, Some(seat))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let mut end = signal(SignalKind::terminate())?;
        let captured = outbound(&ebpf, &options.captured)?;
        let redirected = outbound(&redirect, &options.redirected)?;
        println!("{READY}");
        tokio::select! {
            outcome = accept(&captured, cpus) => outcome,
            outcome = accept(&redirected, cpus) => outcome,
            _ = end.recv() => Ok(()),
        }
    });
    drop(plain);
    ebpf.dismantle()?;
    outcome
}

/// Captures the pod; of its listeners only the one for its own IPv4 connections is of use here.
fn outbound(node: &Node, netns: &Path) -> Result<Listener> {
    let mut pod = node.enroll(&Netns::open(netns)?, &Settings::default())?;
    let mut listeners = pod.take_listeners().into_iter();
    listeners.find(|listener| listener.role() == Role::Outbound).context("no outbound listener")
}

async fn accept(listener: &Listener, cpus: Cpus) -> Result<()> {
    loop {
        let stream = listener.accept().await?.stream.into_std()?;
        stream.set_nonblocking(false)?;
        thread::spawn(move || {
            if let Err(error) = serve::serve(stream, &mut vec![0; CHUNK], cpus) {
                eprintln!("a captured connection ended early: {error:#}");
            }
        });
    }
}

fn plain(netns: &Path, cpus: Cpus) -> Result<Server> {
    let listener = Netns::open(netns)?
        .run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PLAIN)))?
        .with_context(|| format!("listen in {}", netns.display()))?;
    Ok(Server::start(listener, cpus))
}

fn hierarchy() -> Result<Hierarchy> {
    Ok(Hierarchy::find(Path::new("/sys/fs/cgroup"))?)
}
