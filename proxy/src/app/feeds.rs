//! What tells the node of the mesh, and who signs for it: built from the configuration, run until the node ends.

use culvert_control::{
    ca::CaClient,
    xds::{Client, Sink},
};
use culvert_mesh::{Identity, Snapshot, Update};
use culvert_tls::{Authority, AuthorityError, Issuer, Issuing};
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::{
    config::{
        Config,
        control::{Ca, Xds},
    },
    demand::Demand,
    readiness::{Latch, Readiness},
    state::{MeshFile, MeshFileError, State},
    tasks::Tasks,
};

/// Larger batches of updates are applied on a thread that may block.
const INLINE: usize = 256;

/// The mesh file and the control plane, whichever there are.
pub(super) struct Feeds {
    mesh_file: Option<MeshFile>,
    client: Option<(Client, Latch)>,
}

/// Fires once the state is the whole mesh for the first time.
pub(super) struct Synced(Option<watch::Receiver<bool>>);

impl Feeds {
    /// Reads the mesh file, if there is one, for the first time. Nothing is connected to yet.
    pub(super) fn open(
        config: &Config,
        registry: &mut Registry,
        readiness: &Readiness,
    ) -> Result<(Self, State), MeshFileError> {
        let (mesh_file, state) = match &config.control.mesh {
            Some(path) => {
                let (file, state) = MeshFile::open(path.clone())?;
                (Some(file), state)
            }
            None => (None, State::new(Snapshot::default())),
        };
        let client = config.control.xds.clone().map(|Xds { server, node, mode }| {
            (Client::new(server, node, mode, registry), readiness.latch("state manager"))
        });
        let demand = client.as_ref().and_then(|(client, _)| client.on_demand());
        let demand = demand.map(|on_demand| Demand::new(on_demand, config));
        Ok((Self { mesh_file, client }, state.with_demand(demand)))
    }

    /// Keeps `state` in step with the mesh file and the control plane from now on.
    pub(super) fn spawn(self, state: &State, control: &Tasks, data: &Tasks) -> Synced {
        if let Some(file) = self.mesh_file {
            control.spawn(file.run(state.clone()));
        }
        let Some((client, latch)) = self.client else { return Synced(None) };
        let synced = client.synced();
        let mut first = client.synced();
        control.spawn(async move {
            // The client, which has the other end, does not end before the node.
            let _ended = first.wait_for(|synced| *synced).await;
            drop(latch);
        });
        control.spawn(client.run(Feed { state: state.clone(), tasks: data.clone() }));
        Synced(Some(synced))
    }
}

impl Synced {
    /// Waits until the control plane has told everything once; at once without one. A node that does not know the mesh
    /// would carry in plaintext what belongs into it.
    pub(super) async fn wait(self) {
        let Some(mut synced) = self.0 else { return };
        if !*synced.borrow() {
            tracing::info!("waiting for the control plane");
        }
        if synced.wait_for(|synced| *synced).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Takes the control plane's records into the state.
struct Feed {
    state: State,
    tasks: Tasks,
}

impl Sink for Feed {
    async fn apply<U>(&mut self, mut updates: U) -> Option<U>
    where
        U: Iterator<Item = Update> + Send + 'static,
    {
        if updates.size_hint().1.is_some_and(|most| most <= INLINE) {
            self.state.apply(&mut updates);
            return Some(updates);
        }
        let state = self.state.clone();
        let applied = self.tasks.blocking(move || {
            state.apply(&mut updates);
            updates
        });
        match applied.await {
            Ok(updates) => Some(updates),
            Err(error) => {
                tracing::error!(%error, "records of the control plane not applied");
                None
            }
        }
    }
}

/// Who signs for this node's pods.
pub(super) enum Signer {
    Embedded(Box<Authority>),
    Remote(Box<CaClient>),
}

impl Signer {
    pub(super) fn open(config: &Config) -> Result<Self, AuthorityError> {
        Ok(match &config.control.ca {
            Ca::Dir(dir) => {
                Self::Embedded(Box::new(Authority::load(dir)?.with_ttl(config.secret_ttl)))
            }
            Ca::Server(server) => {
                Self::Remote(Box::new(CaClient::new((**server).clone(), config.secret_ttl)))
            }
        })
    }
}

impl Issuer for Signer {
    fn issue<'a>(&'a self, identity: &'a Identity) -> Issuing<'a> {
        match self {
            Self::Embedded(authority) => Issuer::issue(&**authority, identity),
            Self::Remote(client) => client.issue(identity),
        }
    }
}
