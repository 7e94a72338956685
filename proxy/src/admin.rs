//! The node's HTTP endpoints: admin (loopback), metrics and readiness. They read state and never change traffic, except
//! that `POST /quitquitquit` starts the drain.

mod endpoint;
pub(crate) mod http;

use std::{net::SocketAddr, sync::Arc};

use ::http::{Method, StatusCode};
use culvert_observe::{Connection, Connections, Observe};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub(crate) use self::endpoint::bind;
pub use self::endpoint::{BindError, Endpoint};
use self::{
    endpoint::Socket,
    http::{Reply, Route},
};
use crate::{config::Config, readiness::Readiness, tasks::Tasks};

/// The content type that Prometheus negotiates for OpenMetrics text.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const INDEX: &str = "GET  /connections    open connections, as JSON\n\
                     POST /quitquitquit   drain and stop\n";

/// The listeners, bound but not served yet, so that a port that is taken ends the start before anything is attached. Cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct Endpoints {
    admin: Socket,
    stats: Socket,
    readiness: Socket,
}

/// What the endpoints show.
#[derive(Clone)]
pub struct View {
    /// Answers `/metrics`, with the bytes of open connections as of now.
    pub observe: Observe,
    /// Every metric family.
    pub registry: Arc<Registry>,
    /// Answers `/connections`.
    pub connections: Connections,
    /// Cancelled by `POST /quitquitquit`.
    pub quit: CancellationToken,
}

impl Endpoints {
    /// Those of a process before that has handed them over, as far as they have the ports that are wanted; binds the others.
    pub async fn open(
        config: &Config,
        mut inherited: Vec<(Endpoint, std::net::TcpListener)>,
    ) -> Result<Self, BindError> {
        Ok(Self {
            admin: Socket::open(Endpoint::Admin, config.admin, &mut inherited).await?,
            stats: Socket::open(Endpoint::Stats, config.stats, &mut inherited).await?,
            readiness: Socket::open(Endpoint::Readiness, config.readiness, &mut inherited).await?,
        })
    }

    /// What a process before is to be asked for.
    pub fn wanted(config: &Config) -> Vec<(Endpoint, u16)> {
        vec![
            (Endpoint::Admin, config.admin.port()),
            (Endpoint::Stats, config.stats.port()),
            (Endpoint::Readiness, config.readiness.port()),
        ]
    }

    /// Serves readiness: on the data path's tasks, so that a data path that is stuck fails its probe.
    pub fn serve_readiness(&self, readiness: Readiness, data: &Tasks) {
        http::serve(self.readiness.clone(), data, move |request| ready(request, &readiness));
    }

    /// Serves the others.
    pub fn serve(&self, view: View, control: &Tasks) {
        let View { observe, registry, connections, quit } = view;
        http::serve(self.admin.clone(), control, move |request| {
            admin(request, &connections, &quit)
        });
        http::serve(self.stats.clone(), control, move |request| {
            stats(request, &observe, &registry)
        });
    }

    /// Accepts no more from those that have the ports that a successor wants, and gives them.
    pub(crate) fn lend(&self, wanted: &[(Endpoint, u16)]) -> Vec<(Endpoint, Arc<TcpListener>)> {
        let lent = wanted
            .iter()
            .filter_map(|(endpoint, port)| Some((*endpoint, self.socket(*endpoint).lend(*port)?)));
        lent.collect()
    }

    /// Accepts no more from any of them: a process before that has them, too, does again.
    pub(crate) fn give_up(&self) {
        for socket in [&self.admin, &self.stats, &self.readiness] {
            socket.give_up();
        }
    }

    /// Accepts from all of them again.
    pub(crate) fn take_back(&self) {
        for socket in [&self.admin, &self.stats, &self.readiness] {
            socket.take_back();
        }
    }

    const fn socket(&self, endpoint: Endpoint) -> &Socket {
        match endpoint {
            Endpoint::Admin => &self.admin,
            Endpoint::Stats => &self.stats,
            Endpoint::Readiness => &self.readiness,
        }
    }
}

fn admin(route: &Route<'_>, connections: &Connections, quit: &CancellationToken) -> Reply {
    match (route.method, route.path) {
        (&Method::GET, "/") => Reply::text(StatusCode::OK, INDEX.to_owned()),
        (&Method::GET, "/connections") => {
            let list: Value = connections.dump().iter().map(connection).collect();
            Reply::new(StatusCode::OK, "application/json", format!("{list:#}\n"))
        }
        (&Method::POST, "/quitquitquit") => {
            quit.cancel();
            Reply::text(StatusCode::OK, "shutdown now\n".to_owned())
        }
        (_, "/" | "/connections" | "/quitquitquit") => Reply::method_not_allowed(),
        _ => Reply::not_found(),
    }
}

/// As `istioctl ztunnel-config connections` reads them, with the direction beside.
fn connection(connection: &Connection) -> Value {
    json!({
        "direction": connection.direction.as_str(),
        "src": connection.src.to_string(),
        "originalDst": connection.original_dst,
        "actualDst": connection.actual_dst.to_string(),
        "protocol": connection.protocol.as_str(),
    })
}

fn stats(route: &Route<'_>, observe: &Observe, registry: &Registry) -> Reply {
    match (route.method, route.path) {
        (&Method::GET, "/metrics" | "/stats/prometheus") => match observe.encode(registry) {
            Ok(text) => Reply::new(StatusCode::OK, OPENMETRICS, text),
            Err(e) => Reply::text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
        },
        (_, "/metrics" | "/stats/prometheus") => Reply::method_not_allowed(),
        _ => Reply::not_found(),
    }
}

fn ready(route: &Route<'_>, readiness: &Readiness) -> Reply {
    match (route.method, route.path) {
        (&Method::GET, "/healthz/ready") => {
            let pending = readiness.pending();
            if pending.is_empty() {
                Reply::text(StatusCode::OK, "ready\n".to_owned())
            } else {
                let text = format!("not ready, pending: {}\n", pending.join(", "));
                Reply::text(StatusCode::INTERNAL_SERVER_ERROR, text)
            }
        }
        (_, "/healthz/ready") => Reply::method_not_allowed(),
        _ => Reply::not_found(),
    }
}

/// Where an endpoint that everybody may read listens.
pub(crate) fn stats_address(port: u16) -> SocketAddr {
    SocketAddr::from(([0_u16; 8], port))
}

#[cfg(test)]
mod tests {
    use culvert_observe::{Direction, Protocol};

    use super::*;

    #[track_caller]
    fn check(reply: &Reply, status: StatusCode, body: &str) {
        assert_eq!((reply.status, reply.body.as_str()), (status, body));
    }

    #[test]
    fn readiness_names_what_is_pending() {
        let readiness = Readiness::default();
        let latch = readiness.latch("state");
        let route = Route { method: &Method::GET, path: "/healthz/ready" };
        check(
            &ready(&route, &readiness),
            StatusCode::INTERNAL_SERVER_ERROR,
            "not ready, pending: state\n",
        );
        drop(latch);
        check(&ready(&route, &readiness), StatusCode::OK, "ready\n");
    }

    #[test]
    fn only_a_post_quits() {
        let (connections, quit) = (Connections::new(1), CancellationToken::new());
        let get = Route { method: &Method::GET, path: "/quitquitquit" };
        assert_eq!(admin(&get, &connections, &quit).status, StatusCode::METHOD_NOT_ALLOWED);
        assert!(!quit.is_cancelled());
        let post = Route { method: &Method::POST, path: "/quitquitquit" };
        check(&admin(&post, &connections, &quit), StatusCode::OK, "shutdown now\n");
        assert!(quit.is_cancelled());
    }

    #[test]
    fn open_connections_are_listed_until_they_end() {
        let (connections, quit) = (Connections::new(1), CancellationToken::new());
        let tracked = connections.track(Connection {
            direction: Direction::Outbound,
            src: ([10, 0, 0, 1], 40000).into(),
            original_dst: Some("10.96.0.1:80".into()),
            actual_dst: ([10, 0, 0, 2], 15008).into(),
            protocol: Protocol::Hbone,
        });
        let route = Route { method: &Method::GET, path: "/connections" };
        let list = || {
            let reply = admin(&route, &connections, &quit);
            serde_json::from_str::<Value>(&reply.body).unwrap()
        };
        assert_eq!(
            list(),
            json!([{
                "direction": "outbound",
                "src": "10.0.0.1:40000",
                "originalDst": "10.96.0.1:80",
                "actualDst": "10.0.0.2:15008",
                "protocol": "HBONE",
            }])
        );
        drop(tracked);
        assert_eq!(list(), json!([]));
    }
}
