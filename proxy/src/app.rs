//! Builds each stage once, runs the node, and takes it down. Nothing here is per connection.

mod ending;
mod failure;
mod metrics;
mod options;
pub(crate) mod stop;

use std::{io::Write as _, path::Path, sync::Arc, time::Duration};

use culvert_capture::{CaptureError, HostError, Node};
use culvert_carry::Timeouts;
use culvert_observe::{Connections, Observe};
use culvert_sys::{cgroup::Hierarchy, netns::Netns};
use culvert_tls::{Authority, Certificates};
use prometheus_client::registry::Registry;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

pub use self::failure::RunError;
use self::{
    ending::{leave, take_down},
    options::{marks, node_options, proxy_ports, tls_profile},
    stop::Stop,
};
use crate::{
    admin::{Endpoints, View},
    config::{self, Config, args::CleanupArgs},
    context::NodeContext,
    enroll::Enrolment,
    logging,
    pods::{PodsFile, Policy},
    readiness::Readiness,
    revocations::RevocationFile,
    state::MeshFile,
    tasks::Tasks,
};

/// Where cgroup2 is mounted when it is nowhere.
const CGROUP_FALLBACK: &str = "/run/culvert/cgroup2";
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
    let policy = Policy::new(config.dns_capture, config.allow_pod_bypass);
    let mut pods = PodsFile::open(config.pods.clone(), policy.clone())?;
    let (mesh_file, state) = MeshFile::open(config.mesh.clone())?;
    let authority = Authority::load(&config.ca_dir)?.with_ttl(config.secret_ttl);
    let (revocation_file, revocations) =
        config.crl.clone().map(RevocationFile::open).transpose()?.unzip();
    let endpoints = Endpoints::bind(config).await?;

    let (control_tasks, data_tasks) =
        (Tasks::new(control.handle().clone()), Tasks::new(data.handle().clone()));
    let mut registry = Registry::default();
    policy.register(&mut registry);
    let readiness = Readiness::default();
    let starting = readiness.latch("workload proxy manager");
    let quit = CancellationToken::new();
    let mut stop = Stop::new(quit.clone());
    let profile = tls_profile(config, revocations);
    let certificates = Arc::new(Certificates::new(authority).with_profile(profile));
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
    metrics::register(&mut registry, &node);
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
    if let Some(file) = revocation_file {
        control_tasks.spawn(file.run());
    }

    let latch = || readiness.latch("workload proxy manager");
    tokio::select! {
        () = enrolment.follow(&mut pods, starting, latch) => {}
        () = stop.told() => {}
    }
    tracing::info!(deadline = ?config.drain, "draining");
    node.open_up();
    let mut again = stop.again();
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

fn cgroup_name(node: &str) -> String {
    format!("culvert-{node}")
}
