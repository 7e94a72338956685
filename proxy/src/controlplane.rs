//! Runs the control plane: its listeners, its endpoints, and its end.

use std::{io::Write as _, sync::Arc};

use culvert_controlplane::{
    CallerOptions, ControlPlane, ControlPlaneError, MeshConfig, Options, Rotated, Source,
    TokenRules,
};
use http::{Method, StatusCode};
use prometheus_client::{encoding::text, registry::Registry};
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

use crate::{
    admin::{
        self, OPENMETRICS,
        http::{Reply, Route},
    },
    app::{RunError, stop::Stop},
    config::args::{ControlPlaneArgs, RotateRootArgs},
    logging, pods,
    tasks::Tasks,
};

/// What a control plane is called in a cluster, and by whoever tries it.
const NAMES: [&str; 5] = [
    "istiod.istio-system.svc",
    "culvert-controlplane.culvert-system.svc",
    "localhost",
    "127.0.0.1",
    "::1",
];

/// Runs a control plane until it is told to stop.
pub fn run(args: ControlPlaneArgs) -> Result<(), RunError> {
    logging::init(args.log_format, &args.log_filter)?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "control plane starts");
    let open_files = culvert_sys::limits::raise_open_files();
    tracing::debug!(?open_files, "raised the limit of open files");
    let runtime = Builder::new_multi_thread()
        .thread_name("culvert-control")
        .enable_all()
        .build()
        .map_err(RunError::Runtime)?;
    runtime.block_on(serve(args))
}

async fn serve(args: ControlPlaneArgs) -> Result<(), RunError> {
    let mut stop = Stop::new(CancellationToken::new());
    let stats = admin::stats_address(args.stats_port);
    let stats = admin::bind(stats, "metrics", "--stats-port").await?;
    // Before the mesh is read: a port that is taken should not take as long to be noticed.
    let listener = admin::bind(args.listen, "nodes", "--listen").await?;
    let drain = args.drain;
    let mut registry = Registry::default();
    let source = match &args.config {
        Some(path) => Source::Files(path.clone()),
        None => Source::Kubernetes(pods::cluster().await?),
    };
    let opened = Box::pin(ControlPlane::open(options(args, source), &mut registry));
    let control_plane = tokio::select! {
        opened = opened => opened?,
        // A cluster may be long in coming.
        () = stop.told() => return Ok(()),
    };
    let tasks = Tasks::new(Handle::current());
    let registry = Arc::new(registry);
    admin::http::serve(stats, &tasks, move |route| answer(route, &registry));
    Box::pin(control_plane.run(listener, stop.told())).await;
    tasks.drain(drain).await;
    Ok(())
}

fn options(args: ControlPlaneArgs, source: Source) -> Options {
    let mut names: Vec<String> = NAMES.map(str::to_owned).to_vec();
    let ip = args.listen.ip();
    names.extend((!ip.is_unspecified()).then(|| ip.to_string()));
    names.extend(args.names);
    let tokens = args.token_keys.map(|keys| TokenRules {
        keys,
        issuer: args.token_issuer,
        audience: args.token_audience,
    });
    Options {
        source,
        mesh: MeshConfig {
            cluster_id: args.cluster_id,
            trust_domain: args.trust_domain,
            domain: args.domain,
            network: args.network,
            root_namespace: args.root_namespace,
        },
        ca_dir: args.ca_dir,
        names,
        callers: CallerOptions {
            node_tokens: args.node_tokens,
            tokens,
            node_accounts: args.node_accounts,
        },
        node_roots: args.node_roots,
        ttl: args.max_ttl,
        drain: args.drain,
    }
}

fn answer(route: &Route<'_>, registry: &Registry) -> Reply {
    match (route.method, route.path) {
        (&Method::GET, "/metrics") => {
            let mut text = String::new();
            match text::encode(&mut text, registry) {
                Ok(()) => Reply::new(StatusCode::OK, OPENMETRICS, text),
                Err(error) => Reply::text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            }
        }
        // Whoever is answered is answered by a server that knows its mesh.
        (&Method::GET, "/ready") => Reply::text(StatusCode::OK, "ready\n".to_owned()),
        (_, "/metrics" | "/ready") => Reply::method_not_allowed(),
        _ => Reply::not_found(),
    }
}

/// Takes the next step of a change of root, and says what comes after it.
pub fn rotate_root(args: &RotateRootArgs) -> Result<(), RunError> {
    let step = ControlPlane::rotate_root(&args.ca_dir, &args.trust_domain, Some(args.wait))
        .map_err(ControlPlaneError::from)?;
    let wait = humantime::format_duration(args.wait);
    let line = match step {
        Rotated::Prepared => {
            format!("a new root is told to nodes; run this again in {wait} to let it sign\n")
        }
        Rotated::Activated => {
            format!("the new root signs; run this again in {wait} to drop the old one\n")
        }
        Rotated::Finished => "the old root is dropped\n".to_owned(),
    };
    std::io::stdout().write_all(line.as_bytes()).map_err(RunError::Output)
}
