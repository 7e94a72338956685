//! Builds each stage once, runs the node, and takes it down. Nothing here is per connection.

mod failure;

use std::{io::Write as _, path::Path, sync::Arc, time::Duration};

use culvert_capture::{
    BpfLog, CaptureError, HostError, Node, NodeOptions, Pod, ProbeCgroup, Steering, WhenDown,
};
use culvert_carry::Timeouts;
use culvert_observe::{BpfOutcomes, Connections, Kinds, Observe};
use culvert_sys::{
    cgroup::{self, Hierarchy},
    netns::Netns,
};
use culvert_tls::{Authority, Certificates};
use prometheus_client::registry::Registry;
use tokio::{
    runtime::{Builder, Runtime},
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

pub use self::failure::RunError;
use crate::{
    admin::{Endpoints, View},
    config::{self, Config, args::CleanupArgs},
    context::NodeContext,
    enroll::{Enrolment, Marks},
    logging,
    pods::PodsFile,
    readiness::Readiness,
    state::MeshFile,
    tasks::Tasks,
};

/// Where cgroup2 is mounted when it is nowhere.
const CGROUP_FALLBACK: &str = "/run/culvert/cgroup2";
/// The mark of the proxy's sockets where Istio's iptables rules steer.
const REDIRECT_MARK: u32 = 0x539;
/// The ports that Istio's iptables rules redirect to.
const REDIRECT_PORTS: &[u16] = &[15001, 15006];
/// Connections shown by the admin endpoints; more are carried, but not listed.
const SHOWN: usize = 100_000;
/// Of the data path's tasks, when it ends without a drain.
const AT_ONCE: Duration = Duration::ZERO;

/// Runs the node until it is told to stop.
pub fn run(config: Config) -> Result<(), RunError> {
    logging::init(config.log_format, &config.log_filter)?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), ?config, "culvert starts");
    let open_files = culvert_sys::limits::raise_open_files();
    tracing::debug!(?open_files, "raised the limit of open files");
    let data = Builder::new_multi_thread()
        .worker_threads(config.threads)
        .thread_name("culvert-data")
        .enable_all()
        .build()
        .map_err(RunError::Runtime)?;
    let control = Builder::new_current_thread().enable_all().build().map_err(RunError::Runtime)?;
    control.block_on(node(&config, &control, &data))
}

/// Removes what a node that is not running has left.
pub fn cleanup(args: &CleanupArgs) -> Result<(), RunError> {
    if !config::is_node_name(&args.node) {
        return Err(config::ConfigError::Node { node: args.node.clone() }.into());
    }
    logging::init(config::LogFormat::Plain, "warn")?;
    let pods = culvert_capture::cleanup(&args.bpffs, &args.node)?;
    Hierarchy::find(Path::new(CGROUP_FALLBACK))?.remove_own(&cgroup_name(&args.node))?;
    let line = format!("removed node {} with {pods} enrolled pods\n", args.node);
    std::io::stdout().write_all(line.as_bytes()).map_err(RunError::Output)
}

async fn node(config: &Config, control: &Runtime, data: &Runtime) -> Result<(), RunError> {
    culvert_capture::check_capabilities().map_err(CaptureError::from)?;
    // Everything that can be wrong without touching the kernel comes first.
    let mut pods = PodsFile::open(config.pods.clone())?;
    let (mesh_file, state) = MeshFile::open(config.mesh.clone())?;
    let authority = Authority::load(&config.ca_dir)?.with_ttl(config.secret_ttl);
    let endpoints = Endpoints::bind(config).await?;

    let (control_tasks, data_tasks) =
        (Tasks::new(control.handle().clone()), Tasks::new(data.handle().clone()));
    let mut registry = Registry::default();
    let readiness = Readiness::default();
    let starting = readiness.latch("workload proxy manager");
    let quit = CancellationToken::new();
    let mut stop = Stop::new(quit.clone());
    let certificates = Arc::new(Certificates::new(authority));
    let home = Netns::current().map_err(HostError::from).map_err(CaptureError::from)?;
    let context = Arc::new(NodeContext {
        home,
        state: state.clone(),
        certificates: Arc::clone(&certificates),
        observe: Observe::register(&mut registry, env!("CARGO_PKG_VERSION")),
        connections: Connections::new(SHOWN),
        timeouts: Timeouts::default(),
        network: config.network.clone(),
        cluster_id: config.cluster_id.clone(),
        proxy_ports: proxy_ports(config.steering),
    });

    let hierarchy = Hierarchy::find(Path::new(CGROUP_FALLBACK))?;
    let cgroup = hierarchy.enter_own(&cgroup_name(&config.node))?;
    let options = node_options(config, &hierarchy, &cgroup);
    let start = data_tasks.blocking(move || Node::start(&options)).await;
    let node = match start.map_err(RunError::Thread)? {
        Ok(node) => node,
        Err(error) => {
            leave(cgroup);
            return Err(error.into());
        }
    };
    let is_new = node.is_new();
    if let Some(logs) = node.take_logs() {
        data_tasks.spawn(logs.run());
    }
    let node = Arc::new(node);
    register_outcomes(&mut registry, &node);
    register_upkeep(&mut registry, &node);
    let mut enrolment = Enrolment::new(
        Arc::clone(&node),
        Arc::clone(&context),
        marks(config.steering),
        config.drain,
        data_tasks.clone(),
    );
    let started = tokio::select! {
        started = enrolment.start(&mut pods) => started.map(|()| Start::Done),
        () = stop.told() => Ok(Start::Stopped),
    };
    if !matches!(started, Ok(Start::Done)) {
        enrolment.drain(AT_ONCE).await;
        data_tasks.drain(AT_ONCE).await;
        // A start that comes to nothing leaves the node as it was found.
        let remove = is_new || config.ephemeral;
        let down = take_down(node, enrolment.release(), cgroup, remove, &data_tasks).await;
        let Err(error) = started else { return down };
        if let Err(down) = down {
            tracing::error!(error = crate::error::chain(&down), "node not taken down");
        }
        return Err(error.into());
    }

    let view = View {
        readiness: readiness.clone(),
        observe: context.observe.clone(),
        connections: context.connections.clone(),
        registry: Arc::new(registry),
        quit: quit.clone(),
    };
    endpoints.serve(view, &control_tasks, &data_tasks);
    control_tasks.spawn(mesh_file.run(state));
    control_tasks.spawn(certificates.run());

    let latch = || readiness.latch("workload proxy manager");
    tokio::select! {
        () = enrolment.follow(&mut pods, starting, latch) => {}
        () = stop.told() => {}
    }
    tracing::info!(deadline = ?config.drain, "draining");
    node.open_up();
    let mut again = Stop { quit: CancellationToken::new(), ..stop };
    tokio::select! {
        () = enrolment.drain(config.drain) => {}
        () = again.told() => {
            tracing::warn!("told to stop again: not waiting for connections");
            enrolment.drain(AT_ONCE).await;
        }
    }
    data_tasks.drain(AT_ONCE).await;
    control_tasks.drain(AT_ONCE).await;
    take_down(node, enrolment.release(), cgroup, config.ephemeral, &data_tasks).await
}

/// How a start ended that did not fail.
enum Start {
    Done,
    /// The node was told to stop before.
    Stopped,
}

/// Removes every trace of the node from the kernel, or leaves all of it to hold connections.
async fn take_down(
    node: Arc<Node>,
    pods: Vec<Pod>,
    cgroup: cgroup::Own,
    remove: bool,
    tasks: &Tasks,
) -> Result<(), RunError> {
    if !remove {
        return Ok(());
    }
    // Whoever else held the node has been drained.
    let Some(node) = Arc::into_inner(node) else { return Err(RunError::StillUsed) };
    let dismantle = move || {
        // Of these the namespace is at hand; that of whatever else is pinned must be looked for.
        for pod in pods {
            let id = pod.id();
            if let Err(error) = node.unenroll(pod) {
                let error = crate::error::chain(&error);
                tracing::warn!(error, netns = id, "pod not un-enrolled; trying again");
            }
        }
        node.dismantle()
    };
    let dismantled = tasks.blocking(dismantle).await.map_err(RunError::Thread)?;
    leave(cgroup);
    dismantled.map_err(RunError::Dismantle)
}

/// Gives the cgroup up. What may still be attached to it serves no process but this one.
fn leave(cgroup: cgroup::Own) {
    if let Err(error) = cgroup.leave() {
        tracing::warn!(error = crate::error::chain(&error), "cgroup not removed");
    }
}

fn cgroup_name(node: &str) -> String {
    format!("culvert-{node}")
}

fn node_options(config: &Config, hierarchy: &Hierarchy, cgroup: &cgroup::Own) -> NodeOptions {
    let steering = match config.steering {
        config::Steering::Ebpf => Steering::Ebpf,
        config::Steering::Redirect => Steering::Redirect,
    };
    NodeOptions {
        name: config.node.clone(),
        bpffs: config.bpffs.clone(),
        cgroup_root: hierarchy.root().to_owned(),
        own_cgroup: cgroup.path().to_owned(),
        steering,
        when_down: match config.when_down {
            config::WhenDown::Hold => WhenDown::Hold,
            config::WhenDown::Refuse => WhenDown::Refuse,
            config::WhenDown::Open => WhenDown::Open,
        },
        probes: match &config.probe_cgroup {
            config::ProbeCgroup::Off => ProbeCgroup::Off,
            config::ProbeCgroup::Auto => ProbeCgroup::Auto,
            config::ProbeCgroup::At(path) => ProbeCgroup::At(path.clone()),
        },
        log: if config.bpf_log { BpfLog::On } else { BpfLog::Off },
    }
}

/// Sockets are known by their cgroup with our own steering, by their mark with Istio's.
fn marks(steering: config::Steering) -> Marks {
    match steering {
        config::Steering::Ebpf => Marks { proxy: None, delivery: Some(culvert_abi::MARK_DELIVERY) },
        config::Steering::Redirect => {
            Marks { proxy: Some(REDIRECT_MARK), delivery: Some(REDIRECT_MARK) }
        }
    }
}

fn proxy_ports(steering: config::Steering) -> &'static [u16] {
    match steering {
        config::Steering::Ebpf => &[],
        config::Steering::Redirect => REDIRECT_PORTS,
    }
}

fn register_outcomes(registry: &mut Registry, node: &Arc<Node>) {
    let node = Arc::downgrade(node);
    let read = move || {
        let Some(node) = node.upgrade() else { return Vec::new() };
        node.outcomes().unwrap_or_else(|error| {
            tracing::warn!(error = crate::error::chain(&error), "BPF counters not read");
            Vec::new()
        })
    };
    registry.register_collector(Box::new(BpfOutcomes::new(read)));
}

fn register_upkeep(registry: &mut Registry, node: &Arc<Node>) {
    let read = |kinds: fn(&Node) -> Vec<(&'static str, u64)>| {
        let node = Arc::downgrade(node);
        move || node.upgrade().map(|node| kinds(&node)).unwrap_or_default()
    };
    registry.register_collector(Box::new(Kinds::new(
        "culvert_steering_repairs",
        "What was put back that somebody had removed or changed in a pod.",
        read(Node::repairs),
    )));
    registry.register_collector(Box::new(Kinds::new(
        "culvert_steering_failures",
        "What could not be kept up in a pod.",
        read(Node::failures),
    )));
}

/// What tells the node to stop. Once it is made, a signal no more ends the process, and none is missed.
struct Stop {
    signals: Option<(Signal, Signal)>,
    quit: CancellationToken,
}

impl Stop {
    fn new(quit: CancellationToken) -> Self {
        let signals = signal(SignalKind::terminate())
            .and_then(|term| Ok((term, signal(SignalKind::interrupt())?)))
            .inspect_err(|error| {
                tracing::error!(%error, "no signal handlers; stop with POST /quitquitquit");
            });
        Self { signals: signals.ok(), quit }
    }

    /// Fires at SIGTERM, SIGINT, or when `quit` is cancelled.
    async fn told(&mut self) {
        let Some((term, int)) = &mut self.signals else { return self.quit.cancelled().await };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            () = self.quit.cancelled() => {}
        }
    }
}
