//! `culvert agent`: hands this node's pods to proxies that are processes of their own, ours or others'.

use std::{fs, os::fd::AsFd as _, sync::Arc};

use culvert_agent::zds::{self, AddError, Server};
use futures::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::runtime::Builder;
use tokio_util::sync::CancellationToken;

use super::{failure::RunError, stop::Stop};
use crate::{
    config::{ConfigError, PodSources, args::AgentArgs, is_node_name},
    error::chain,
    logging,
    pods::{PodEvent, PodSource as _, PodSpec, Policy, Sources},
};

/// A pod that a proxy was asked to enrol, and what came of it.
type Adding = BoxFuture<'static, (Arc<str>, Result<(), AddError>)>;

/// Runs the agent until it is told to stop. Proxies keep their pods then.
pub fn agent(args: AgentArgs) -> Result<(), RunError> {
    if !is_node_name(&args.node) {
        return Err(ConfigError::Node { node: args.node }.into());
    }
    logging::init(args.log_format, &args.log_filter)?;
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(RunError::Runtime)?
        .block_on(serve(args))
}

async fn serve(args: AgentArgs) -> Result<(), RunError> {
    let wanted = PodSources::from(args.sources);
    if wanted.is_empty() {
        return Err(ConfigError::NoPods.into());
    }
    let mut stop = Stop::new(CancellationToken::new());
    // What annotations mean is for the proxy to decide, which has the pods.
    let mut sources = Sources::open(&wanted, &args.node, &Policy::default()).await?;
    if let Some(folder) = args.listen.parent() {
        fs::create_dir_all(folder).map_err(RunError::Folder)?;
    }
    let server = Server::bind(&args.listen)?;
    let pods = server.pods();
    tracing::info!(socket = %args.listen.display(), "serving proxies");
    let mut adding: FuturesUnordered<Adding> = FuturesUnordered::new();
    let mut removing: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
    let serving = server.run();
    tokio::pin!(serving);
    loop {
        tokio::select! {
            () = stop.told() => return Ok(()),
            () = &mut serving => return Ok(()),
            event = sources.next() => match event {
                PodEvent::Added(spec) => match offered(spec) {
                    Ok(pod) => {
                        tracing::info!(pod = %pod.uid, "pod offered to proxies");
                        let pods = pods.clone();
                        adding.push(Box::pin(async move {
                            let uid = Arc::clone(&pod.uid);
                            (uid, pods.add(pod).await)
                        }));
                    }
                    Err((uid, error)) => {
                        tracing::error!(pod = %uid, error, "pod not offered to proxies");
                        sources.settled(&uid, Err(&error));
                    }
                },
                PodEvent::Removed(uid) => {
                    let pods = pods.clone();
                    tracing::info!(pod = %uid, "pod withdrawn from proxies");
                    removing.push(Box::pin(async move { pods.remove(&uid).await }));
                }
                PodEvent::Synced => tracing::info!("every pod was told"),
            },
            Some((uid, added)) = adding.next(), if !adding.is_empty() => match added {
                Ok(()) => sources.settled(&uid, Ok(())),
                Err(AddError::Removed) => {}
                Err(error @ AddError::Refused { .. }) => {
                    tracing::warn!(pod = %uid, error = chain(&error), "pod not enrolled yet");
                    sources.settled(&uid, Err(&error.to_string()));
                    let pods = pods.clone();
                    adding.push(Box::pin(async move {
                        let added = pods.enrolled(&uid).await;
                        (uid, added)
                    }));
                }
            },
            Some(()) = removing.next(), if !removing.is_empty() => {}
        }
    }
}

/// The pod as proxies are told of it.
fn offered(spec: PodSpec) -> Result<zds::Pod, (Arc<str>, String)> {
    let opened = spec.netns.open().map_err(|error| chain(&error));
    let netns = opened
        .and_then(|netns| netns.as_fd().try_clone_to_owned().map_err(|error| error.to_string()));
    match netns {
        Ok(netns) => Ok(zds::Pod { uid: spec.uid, pod: spec.pod, netns: Some(Arc::new(netns)) }),
        Err(error) => Err((spec.uid, error)),
    }
}
