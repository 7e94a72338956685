//! From a pod to the mesh: capture → identify → decide → carry → observe, on one screen.

mod failure;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use culvert_capture::{Addresses, Captured};
use culvert_carry::{
    copy,
    dial::Leg,
    hbone::{
        Connect, Tunnel, client,
        headers::{BAGGAGE, Forwarded, TRACEPARENT, TraceParent},
    },
};
use culvert_mesh::{
    route::{self, HboneRoute, Place, Route},
    service::Service,
    workload::Workload,
};
use culvert_observe::{
    Connection, Denial, Direction, Flow, FlowRecord, Party, Pending, Protocol, SecurityPolicy,
};
use http::{HeaderMap, header::FORWARDED};
use tokio::net::TcpStream;

use crate::{
    context::{PeerKey, PodContext},
    flow::{Metered, end, refuse},
};
use failure::{Foreign, HboneFailure, NotCarried};

/// How often, and how far apart, the pod's addresses are looked at before a connection counts as foreign.
const NEWS_TRIES: u32 = 20;
const NEWS_PERIOD: Duration = Duration::from_millis(50);

/// Carries one captured connection from start to end.
pub(crate) async fn carry(ctx: Arc<PodContext>, captured: Captured) {
    let Captured { stream, peer, orig_dst } = captured;
    let node = &ctx.node;
    let _socket = node.observe.socket(Direction::Outbound);
    let record = node.observe.begin(Direction::Outbound, peer, orig_dst);

    // The listener proves whose connection it is only if the pod itself made it.
    if !is_own(&ctx.addresses, peer.ip()).await {
        return refuse(record, &stream, Denial::ForeignOutbound, &Foreign { peer });
    }
    let source = match node.state.identify(&ctx.pod).await {
        Ok(source) => source,
        Err(error) => return refuse(record, &stream, Denial::UnknownWorkload, &error),
    };
    let request = route::Request::new(&source, orig_dst);
    let route = route::route(&node.state.load(), &request, &mut rand::rng());
    match route {
        Route::Refuse(refusal) => refuse(record, &stream, Denial::NoRoute, &refusal),
        Route::DoubleHbone(route) => {
            let network = Arc::clone(&route.workload.network);
            refuse(record, &stream, Denial::NoRoute, &NotCarried::Network(network));
        }
        Route::Direct { dst: Place::Name { host, .. }, .. } => {
            refuse(record, &stream, Denial::NoRoute, &NotCarried::Name(host));
        }
        Route::Direct { dst: Place::Address(dst), workload, service } => {
            let destination = Party { identity: None, workload };
            let flow = Flow {
                dst,
                hbone_authority: None,
                source: Party { identity: None, workload: Some(source) },
                destination,
                service,
                security: SecurityPolicy::Unknown,
            };
            let shown = Connection {
                direction: Direction::Outbound,
                src: peer,
                original_dst: Some(orig_dst.to_string().into()),
                actual_dst: dst,
                protocol: Protocol::Tcp,
            };
            direct(&ctx, stream, shown, record.open(flow)).await;
        }
        Route::Hbone(route) => {
            let gateway = match &route.gateway {
                Place::Address(gateway) => *gateway,
                Place::Name { host, .. } => {
                    let unknown = NotCarried::Name(Arc::clone(host));
                    return refuse(record, &stream, Denial::NoRoute, &unknown);
                }
            };
            let shown = Connection {
                direction: Direction::Outbound,
                src: peer,
                original_dst: Some(orig_dst.to_string().into()),
                actual_dst: gateway,
                protocol: Protocol::Hbone,
            };
            hbone(&ctx, stream, shown, &source, route, record).await;
        }
    }
}

/// Whether the pod has the address. One that it has only just got may be used before the kernel's news of it is read.
async fn is_own(addresses: &Addresses, ip: IpAddr) -> bool {
    for _ in 0..NEWS_TRIES {
        if addresses.owns(ip) {
            return true;
        }
        tokio::time::sleep(NEWS_PERIOD).await;
    }
    addresses.owns(ip)
}

/// Plaintext, to whatever is not of the mesh.
async fn direct(ctx: &PodContext, app: TcpStream, connection: Connection, record: FlowRecord) {
    let dst = connection.actual_dst;
    let _shown = ctx.node.connections.track(connection);
    match ctx.dialer.dial(dst, Leg::Passthrough).await {
        Ok(stream) => {
            let meter = Metered::outbound(&record);
            end(record, copy::plain(app, stream, &meter, &ctx.node.timeouts).await.outcome);
        }
        Err(error) => {
            crate::flow::reset(&app);
            record.fail(failure::of_dial(&error), &error);
        }
    }
}

/// Through a tunnel, under the pod's own certificate.
async fn hbone(
    ctx: &PodContext,
    app: TcpStream,
    connection: Connection,
    source: &Arc<Workload>,
    route: HboneRoute,
    record: Pending,
) {
    let (peer, gateway) = (connection.src, connection.actual_dst);
    let _shown = ctx.node.connections.track(connection);
    let record = record.open(Flow {
        dst: gateway,
        hbone_authority: Some(route.authority.to_string().into()),
        source: Party {
            identity: Some(source.identity.clone()),
            workload: Some(Arc::clone(source)),
        },
        destination: Party {
            identity: Some(route.workload.identity.clone()),
            workload: Some(Arc::clone(&route.workload)),
        },
        service: route.service.clone(),
        security: SecurityPolicy::MutualTls,
    });
    // Boxed, so that the room for opening is given back while the connection lasts.
    match Box::pin(tunnel(ctx, peer, source, gateway, route)).await {
        Ok(tunnel) => {
            let meter = Metered::outbound(&record);
            end(record, copy::tunnel(app, tunnel, &meter, &ctx.node.timeouts).await.outcome);
        }
        Err(failure) => {
            crate::flow::reset(&app);
            record.fail(failure.flag(), &failure);
        }
    }
}

async fn tunnel(
    ctx: &PodContext,
    peer: SocketAddr,
    source: &Workload,
    gateway: SocketAddr,
    route: HboneRoute,
) -> Result<Tunnel, HboneFailure> {
    let node = &ctx.node;
    let credential = node.certificates.fetch(&source.identity).await?;
    let key = PeerKey { source: source.identity.clone(), expected: route.expected, gateway };
    let request = Connect {
        authority: route.authority.to_string().try_into()?,
        headers: headers(ctx, peer, source, route.service.as_deref()),
    };
    let (dialer, timeouts) = (ctx.dialer.clone(), node.timeouts);
    let expected = key.expected.clone();
    let certificates = Arc::clone(&node.certificates);
    let connect = move || async move {
        let tcp = dialer.dial(gateway, Leg::Hbone).await?;
        let config = credential.client_config(&expected);
        // Boxed: few connections need one of their own, and each would carry the room for it.
        let established = Box::pin(client::connect(tcp, config, &timeouts)).await?;
        let lifetime = credential.outbound_lifetime(established.peer_certificates());
        let (ended, superseded) = (lifetime.ended(), certificates.superseded(&credential));
        let retire = async move {
            tokio::select! {
                () = ended => {}
                () = superseded => {}
            }
        };
        let cut = async move {
            lifetime.revoked().await;
            tracing::warn!(%gateway, "peer certificate revoked by CRL; its connection is cut");
        };
        Ok(established.until(retire, cut))
    };
    Ok(ctx.pool.open(key, connect, request).await?)
}

fn headers(
    ctx: &PodContext,
    peer: SocketAddr,
    source: &Workload,
    service: Option<&Service>,
) -> HeaderMap {
    let host = service.map(|service| service.key.hostname.to_string()).unwrap_or_default();
    let forwarded = Forwarded { client: Some(peer), host };
    [
        (BAGGAGE, ctx.node.baggage(source).to_value()),
        (FORWARDED, forwarded.to_value()),
        (TRACEPARENT, TraceParent::random(&mut rand::rng()).to_value()),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}
