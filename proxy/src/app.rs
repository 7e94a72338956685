//! Builds each stage once, runs the node, and takes it down. Nothing here is per connection.

mod agent;
mod ending;
mod failure;
mod feeds;
mod metrics;
mod options;
mod rewriters;
pub(crate) mod stop;
mod takeover;

use std::{io::Write as _, path::Path, sync::Arc};

use culvert_capture::{CaptureError, HostError, Node};
use culvert_carry::Timeouts;
use culvert_observe::{Connections, Dns, Observe};
use culvert_sys::{cgroup::Hierarchy, container, netns::Netns};
use culvert_tls::Certificates;
use prometheus_client::registry::Registry;
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

pub use self::{agent::agent, failure::RunError};
use self::{
    ending::{Running, leave},
    feeds::{Feeds, Signer},
    options::{marks, node_options, proxy_ports, tls_profile},
    stop::Stop,
    takeover::Place,
};
use crate::{
    admin::View,
    config::{self, Config, args::CleanupArgs},
    context::NodeContext,
    enroll::{Enrolment, Succession},
    handover::{self, Host},
    logging,
    names::Names,
    pods::{Policy, Sources},
    readiness::Readiness,
    revocations::RevocationFile,
    tasks::Tasks,
};

/// Where cgroup2 is mounted when it is nowhere.
const CGROUP_FALLBACK: &str = "/run/culvert/cgroup2";
/// Connections shown by the admin endpoints; more are carried, but not listed.
const SHOWN: usize = 100_000;
/// What other processes of the node may want at one time.
const COMMANDS: usize = 8;
/// Runs the node until it is told to stop.
pub fn run(config: Config) -> Result<(), RunError> {
    logging::init(config.log_format, &config.log_filter)?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), ?config, "culvert starts");
    unmask();
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
    unmask();
    let pods = culvert_capture::cleanup(&args.bpffs, &args.node)?;
    let hierarchy = Hierarchy::find(Path::new(CGROUP_FALLBACK))?;
    for seat in culvert_capture::SEATS {
        hierarchy.remove_own(&cgroup_name(&args.node, seat))?;
    }
    handover::remove_sockets(&args.node)?;
    let line = format!("removed node {} with {pods} enrolled pods\n", args.node);
    std::io::stdout().write_all(line.as_bytes()).map_err(RunError::Output)
}

/// Undoes what a container runtime keeps from the node's proxy. What cannot be undone shows itself where it is needed.
fn unmask() {
    match container::unmask_sysctls() {
        Ok(false) => {}
        Ok(true) => tracing::debug!("made /proc/sys of this container writable"),
        Err(error) => tracing::warn!(%error, "/proc/sys of this container cannot be written"),
    }
}

async fn node(config: &Config, control: &Runtime, data: &Runtime) -> Result<(), RunError> {
    culvert_capture::check_capabilities().map_err(CaptureError::from)?;
    // Everything that can be wrong without touching the kernel comes first.
    let policy = Policy::new(config.dns_capture, config.allow_pod_bypass);
    let mut pods = Sources::open(&config.pods, &config.node, &policy).await?;
    let mut registry = Registry::default();
    policy.register(&mut registry);
    let readiness = Readiness::default();
    let (feeds, state) = Feeds::open(config, &mut registry, &readiness)?;
    let signer = Signer::open(config)?;
    let (revocation_file, revocations) =
        config.crl.clone().map(RevocationFile::open).transpose()?.unzip();

    let (control_tasks, data_tasks) =
        (Tasks::new(control.handle().clone()), Tasks::new(data.handle().clone()));
    let starting = readiness.latch("workload proxy manager");
    let quit = CancellationToken::new();
    let mut stop = Stop::new(quit.clone());
    let home = Netns::current().map_err(HostError::from).map_err(CaptureError::from)?;
    let mut place = tokio::select! {
        place = Box::pin(Place::take(config, &home)) => place?,
        () = stop.told() => return Ok(()),
    };
    // A probe for this process must not be answered for another.
    place.endpoints.serve_readiness(readiness.clone(), &data_tasks);
    let profile = tls_profile(config, revocations);
    let certificates = Arc::new(Certificates::new(signer).with_profile(profile));
    let context = Arc::new(NodeContext {
        home,
        state: state.clone(),
        certificates: Arc::clone(&certificates),
        observe: Observe::register(&mut registry, env!("CARGO_PKG_VERSION")),
        connections: Connections::new(SHOWN),
        timeouts: Timeouts::default(),
        network: config.network.clone(),
        cluster_id: config.cluster_id.clone(),
        zone: config.zone.clone(),
        dns: Dns::register(&mut registry),
        names: Names::of_machine(),
        proxy_ports: proxy_ports(config.steering),
    });

    let (commands, commanded) = mpsc::channel(COMMANDS);
    let endpoints = place.endpoints.clone();
    if let Some(control) = place.control.take() {
        let netns = context.home.inode();
        let host = Host {
            netns,
            endpoints: endpoints.clone(),
            commands: commands.clone(),
            quit: quit.clone(),
        };
        control.serve(host, &control_tasks);
    }
    // The elder, if there is one, goes on meanwhile.
    let synced = feeds.spawn(&state, &control_tasks, &data_tasks);
    tokio::select! {
        () = synced.wait() => {}
        () = stop.told() => {
            place.leave();
            return Ok(());
        }
    }
    let own = Hierarchy::find(Path::new(CGROUP_FALLBACK)).and_then(|hierarchy| {
        let cgroup = hierarchy.enter_own(&cgroup_name(&config.node, place.number()))?;
        Ok((hierarchy, cgroup))
    });
    let (hierarchy, cgroup) = match own {
        Ok(own) => own,
        Err(error) => {
            place.leave();
            return Err(error.into());
        }
    };
    let options = node_options(config, &hierarchy, &cgroup);
    let taken = tokio::select! {
        taken = place.predecessor.take() => taken.map(|()| Start::Done),
        () = stop.told() => Ok(Start::Stopped),
    };
    if !matches!(taken, Ok(Start::Done)) {
        place.leave();
        leave(cgroup);
        return taken.map(drop).map_err(RunError::from);
    }
    let Place { seat, predecessor, .. } = place;
    let succession = Succession::new(commanded, predecessor.gone());
    let elder_gone = predecessor.gone();
    let reports = predecessor.watch(commands, &control_tasks);
    let start = data_tasks.blocking(move || Node::start(&options, seat)).await;
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
    metrics::register(&mut registry, &node);
    let enrolment = Enrolment::new(
        Arc::clone(&node),
        Arc::clone(&context),
        marks(config.steering),
        config.drain,
        data_tasks.clone(),
        succession,
    );
    let mut running = Running {
        node,
        enrolment,
        cgroup,
        endpoints,
        elder_gone,
        reports,
        data_tasks,
        control_tasks,
    };
    let started = tokio::select! {
        started = Box::pin(running.enrolment.start(&mut pods)) => started.map(|()| Start::Done),
        () = stop.told() => Ok(Start::Stopped),
    };
    if !matches!(started, Ok(Start::Done)) {
        // A start that comes to nothing leaves the node as it was found.
        let down = Box::pin(running.abandon(is_new || config.ephemeral)).await;
        let Err(error) = started else { return down };
        if let Err(down) = down {
            tracing::error!(error = crate::error::chain(&down), "node not taken down");
        }
        return Err(error.into());
    }

    let view = View {
        observe: context.observe.clone(),
        connections: context.connections.clone(),
        registry: Arc::new(registry),
        quit: quit.clone(),
    };
    running.endpoints.serve(view, &running.control_tasks);
    running.control_tasks.spawn(certificates.run());
    if let Some(file) = revocation_file {
        running.control_tasks.spawn(file.run());
    }
    running.report_readiness(readiness.clone());
    let look = rewriters::watch(Arc::clone(&running.node), running.data_tasks.clone());
    running.data_tasks.spawn(look);

    let latch = || readiness.latch("workload proxy manager");
    tokio::select! {
        () = Box::pin(running.enrolment.follow(&mut pods, starting, latch)) => {}
        () = stop.told() => {}
    }
    Box::pin(running.end(config.drain, config.ephemeral, stop.again())).await
}

/// How a start ended that did not fail.
enum Start {
    Done,
    /// The node was told to stop before.
    Stopped,
}

fn cgroup_name(node: &str, seat: u8) -> String {
    format!("culvert-{node}.{seat}")
}
