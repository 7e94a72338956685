//! The node's HTTP endpoints: admin (loopback), metrics and readiness. They read state and never change traffic, except
//! that `POST /quitquitquit` starts the drain.

pub(crate) mod http;

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use ::http::{Method, StatusCode};
use culvert_observe::{Connection, Connections, Observe};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::http::{Reply, Route};
use crate::{config::Config, readiness::Readiness, tasks::Tasks};

/// The content type that Prometheus negotiates for OpenMetrics text.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const INDEX: &str = "GET  /connections    open connections, as JSON\n\
                     POST /quitquitquit   drain and stop\n";

/// A port that could not be had.
#[derive(Debug, thiserror::Error)]
#[error("listen on {addr} for {what}: set {flag} to another port, or stop what holds it")]
pub struct BindError {
    addr: SocketAddr,
    what: &'static str,
    flag: &'static str,
    source: io::Error,
}

/// The listeners, bound but not served yet, so that a port that is taken ends the start before anything is attached.
#[derive(Debug)]
pub struct Endpoints {
    admin: TcpListener,
    stats: TcpListener,
    readiness: TcpListener,
}

/// What the endpoints show.
#[derive(Clone)]
pub struct View {
    /// Answers `/healthz/ready`.
    pub readiness: Readiness,
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
    /// Binds all three.
    pub async fn bind(config: &Config) -> Result<Self, BindError> {
        Ok(Self {
            admin: bind(config.admin, "admin", "--admin-port").await?,
            stats: bind(config.stats, "metrics", "--stats-port").await?,
            readiness: bind(config.readiness, "readiness", "--readiness-port").await?,
        })
    }

    /// Serves: readiness on the data path's tasks, so that a data path that is stuck fails its probe.
    pub fn serve(self, view: View, control: &Tasks, data: &Tasks) {
        let View { readiness, observe, registry, connections, quit } = view;
        http::serve(self.admin, control, move |request| admin(request, &connections, &quit));
        http::serve(self.stats, control, move |request| stats(request, &observe, &registry));
        http::serve(self.readiness, data, move |request| ready(request, &readiness));
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

pub(crate) async fn bind(
    addr: SocketAddr,
    what: &'static str,
    flag: &'static str,
) -> Result<TcpListener, BindError> {
    let bound = match TcpListener::bind(addr).await {
        // A node without IPv6 has no [::], but it has 0.0.0.0.
        Err(e) if addr.is_ipv6() && e.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, addr.port())).await
        }
        other => other,
    };
    bound.map_err(|source| BindError { addr, what, flag, source })
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

    #[tokio::test]
    async fn a_taken_port_names_the_flag() {
        let holder = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = holder.local_addr().unwrap();
        let error = bind(addr, "admin", "--admin-port").await.unwrap_err();
        assert!(error.to_string().contains("--admin-port"), "{error}");
    }
}
