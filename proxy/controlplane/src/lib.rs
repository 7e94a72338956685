//! The mesh's own control plane, for where there is no istiod: it tells nodes what the mesh consists of, over delta xDS,
//! and signs the certificates of what runs on them.
//!
//! ```text
//!  files ─ directory ─┬▶ objects ─ translate ─▶ resources ─ store ─▶ xds ─▶ nodes
//!  API ─── cluster ───┘     └────── placements ──────────────────▶ ca ─▶ nodes
//! ```
//!
//! `translate` is pure and as incremental as what changed allows; the store is shared by all connections, and a
//! connection is told what changed since it was told last. Nothing is told to, or signed for, a caller that does not prove
//! who it is.
//!
//! Invariants: a node gets certificates only for accounts that run on it; a policy that cannot be understood never leaves
//! the mesh more open than the last one that could; what a client can make grow is bounded; a mistake in one object
//! changes no other.

#![forbid(unsafe_code)]

mod ca;
mod callers;
mod cluster;
mod directory;
mod documents;
mod feed;
mod listen;
mod metrics;
mod objects;
mod placements;
mod resource;
mod store;
mod translate;
mod world;
mod xds;

#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc, time::Duration};

pub use culvert_tls::Rotated;
use culvert_tls::{Authority, AuthorityError};
use prometheus_client::registry::Registry;
use rustls::ServerConfig;
use tokio::{net::TcpListener, time::Instant};
use tokio_util::sync::CancellationToken;

pub use crate::{
    ca::AuditError,
    callers::{AccountsError, CallerOptions, CallersError, NodesError, TokenRules},
    directory::DirectoryError,
    documents::Problem,
    feed::{FeedError, Source},
    listen::TlsError,
    world::MeshConfig,
};
use crate::{
    ca::{Certificates, Signer},
    callers::Callers,
    feed::Feed,
    listen::{Presented, Services},
    metrics::Metrics,
    placements::Placements,
    store::Store,
    xds::Discovery,
};

/// How often files that are not the mesh's are looked at.
const UPKEEP: Duration = Duration::from_secs(2);
/// The server's own certificate is renewed as often; it lives twice as long.
const RENEWAL: Duration = Duration::from_hours(12);

/// What a control plane is made of.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the objects are that describe the mesh.
    pub source: Source,
    /// What the objects do not say.
    pub mesh: MeshConfig,
    /// The authority's folder; a root is made there if it holds none.
    pub ca_dir: PathBuf,
    /// Host names and addresses that nodes call the server by.
    pub names: Vec<String>,
    /// How callers prove who they are.
    pub callers: CallerOptions,
    /// Roots of client certificates that name a node (`system:node:NAME`).
    pub node_roots: Option<PathBuf>,
    /// The longest life of a certificate.
    pub ttl: Duration,
    /// How long open streams may go on once the server is asked to stop.
    pub drain: Duration,
}

/// Why a control plane does not start.
#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    /// The mesh cannot be served.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// The authority cannot sign.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// Callers cannot be told apart.
    #[error(transparent)]
    Callers(#[from] CallersError),
    /// The authority's record cannot be kept.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// TLS cannot be spoken.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Nobody could prove to be a node.
    #[error(
        "no node can prove who it is; give a file of node tokens, the keys of the tokens' issuer, or the roots of node certificates"
    )]
    NoCallers,
}

/// A control plane that knows its mesh.
pub struct ControlPlane {
    feed: Feed,
    signer: Arc<Signer>,
    callers: Arc<Callers>,
    presented: Arc<Presented>,
    names: Vec<String>,
    tls: Arc<ServerConfig>,
    services: Services,
    draining: CancellationToken,
    drain: Duration,
}

impl ControlPlane {
    /// Reads everything, once. Blocks for as long as files take; waits for a cluster.
    pub async fn open(
        options: Options,
        registry: &mut Registry,
    ) -> Result<Self, ControlPlaneError> {
        let Options { source, mesh, ca_dir, names, callers, node_roots, ttl, drain } = options;
        if callers.node_tokens.is_none() && callers.tokens.is_none() && node_roots.is_none() {
            return Err(ControlPlaneError::NoCallers);
        }
        let metrics = Metrics::register(registry);
        let (store, placements) = (Arc::new(Store::new()), Arc::new(Placements::default()));
        let trust_domain = mesh.trust_domain.clone();
        let feed =
            Feed::open(source, mesh, Arc::clone(&store), Arc::clone(&placements), metrics.clone());
        let feed = feed.await?;
        let signer = Arc::new(Signer::open(&ca_dir, &trust_domain)?);
        let callers = Arc::new(Callers::new(&callers, Arc::clone(&placements))?);
        let presented = Arc::new(Presented::new(signer.current().issue_server(&names)?)?);
        let tls = listen::tls(Arc::clone(&presented), node_roots.as_deref())?;
        let draining = CancellationToken::new();
        let certificates = Certificates::new(
            Arc::clone(&signer),
            Arc::clone(&callers),
            placements,
            trust_domain,
            ttl,
            metrics.clone(),
        )?;
        let discovery = Discovery::new(store, Arc::clone(&callers), metrics, draining.clone());
        let services = Services { discovery, certificates };
        Ok(Self { feed, signer, callers, presented, names, tls, services, draining, drain })
    }

    /// Serves `listener` until `stop` completes and what is open has ended, or its time has.
    pub async fn run(self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let Self { feed, signer, callers, presented, names, tls, services, draining, drain } = self;
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, "serving");
        }
        let upkeep = upkeep(&signer, &callers, &presented, &names);
        let serve = listen::serve(listener, tls, services, draining.clone(), drain);
        tokio::pin!(serve);
        tokio::select! {
            () = stop => {}
            () = feed.run() => {}
            () = upkeep => {}
            () = serve.as_mut() => return,
        }
        draining.cancel();
        serve.await;
    }

    /// Takes the next step of a change of root in `ca_dir`, and tells which one.
    pub fn rotate_root(
        ca_dir: &std::path::Path,
        trust_domain: &str,
        wait: Option<Duration>,
    ) -> Result<Rotated, AuthorityError> {
        Authority::rotate(ca_dir, &format!("culvert root of {trust_domain}"), wait)
    }
}

/// Keeps in step what is not the mesh: root, tokens and the server's own certificate. Never ends.
async fn upkeep(signer: &Signer, callers: &Callers, presented: &Presented, names: &[String]) {
    let mut renewed = Instant::now();
    loop {
        tokio::time::sleep(UPKEEP).await;
        callers.refresh();
        if !signer.refresh() && renewed.elapsed() < RENEWAL {
            continue;
        }
        let issued = signer.current().issue_server(names).map_err(ControlPlaneError::from);
        let fresh = issued.and_then(|issued| Ok(presented.replace(issued)?));
        match fresh {
            Ok(()) => renewed = Instant::now(),
            Err(error) => {
                let error = culvert_mesh::error::chain(&error);
                tracing::error!(error, "the server's certificate is not renewed");
            }
        }
    }
}
