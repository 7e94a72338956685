//! Opening the way to a destination: decide, dial, and decide again where an endpoint cannot be reached.
//!
//! Nothing of what the application sends is read before a way is open, so that another endpoint can be tried without
//! its noticing. What is then carried, and the record of it, is the direction's.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use culvert_carry::{
    dial::Leg,
    hbone::{
        Connect, OpenError, Tunnel,
        client::{self, ConnectError, Established},
        headers::{BAGGAGE, FORWARDED_NETWORK, Forwarded, TRACEPARENT, TraceParent},
    },
};
use culvert_mesh::{
    Identity,
    route::{self, DoubleHboneRoute, HboneRoute, Hop, Place, Request, Route},
    service::Service,
    workload::Workload,
};
use culvert_observe::{Connection, Direction, Flow, Party, Protocol, SecurityPolicy, Tracked};
use culvert_tls::{Certificates, Credential};
use http::{HeaderMap, HeaderValue, header::FORWARDED, uri::Authority};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::{net::TcpStream, time::Instant};

use super::failure::{Failure, Refused};
use crate::{
    context::{NodeContext, PeerKey, PodContext, Within},
    names::NameError,
    outlook::Counted,
};

/// Endpoints that one connection tries.
const ATTEMPTS: usize = 3;
/// After this no further endpoint is tried; the one that is being tried has its own deadlines.
const RETRY_WITHIN: Duration = Duration::from_secs(12);
/// Connections through a gateway to one service port, among which streams are spread: the gateway chooses an endpoint for
/// each.
const LANES: u8 = 4;

/// An open way to the destination, and what is known of it.
pub(super) struct Way {
    pub(super) flow: Flow,
    pub(super) far: Far,
    pub(super) guards: Guards,
}

/// What the application's bytes go to.
pub(super) enum Far {
    Plain(TcpStream),
    Tunnel(Tunnel),
}

/// What is held for as long as the connection lasts.
pub(super) struct Guards {
    _shown: Tracked,
    _counted: Option<Counted>,
}

/// Why there is no way.
pub(super) enum NoWay {
    /// The mesh has none.
    Refused(Refused),
    /// The one that was tried last failed.
    Failed { flow: Box<Flow>, failure: Failure },
}

/// Opens a way from the pod's workload `source` to `dst`, for the application at `peer`.
pub(super) async fn open(
    ctx: &Arc<PodContext>,
    source: &Arc<Workload>,
    peer: SocketAddr,
    dst: SocketAddr,
) -> Result<Way, NoWay> {
    let started = Instant::now();
    let mut failed: Vec<Arc<str>> = Vec::new();
    let mut last = None;
    loop {
        let request = || Request { source, dst, failed: &failed, outlook: &*ctx.outlook };
        let route = route::route(&ctx.node.state.load(), &request(), &mut rand::rng());
        let found = located(&ctx.node, route, &request()).await;
        let route = match found {
            Ok(route) => route,
            Err((endpoint, error)) => {
                last = Some(NoWay::Refused(Refused::Name(error)));
                // A waypoint that cannot be found is not gone around, but another of its endpoints may do.
                let Some(uid) = endpoint.filter(|uid| !failed.contains(uid)) else { break };
                ctx.outlook.failed(&uid);
                failed.push(uid);
                if failed.len() >= ATTEMPTS || started.elapsed() >= RETRY_WITHIN {
                    break;
                }
                continue;
            }
        };
        let endpoint = route.endpoint().map(|endpoint| Arc::clone(&endpoint.uid));
        // A workload that was asked for by its own address has no other in its place.
        let again = endpoint.as_ref().is_some_and(|uid| failed.contains(uid));
        let plan = match Plan::new(source, route) {
            Ok(plan) if !again => plan,
            Ok(_) => return Err(last.unwrap_or(NoWay::Refused(Refused::NoOther))),
            Err(refused) => return Err(last.unwrap_or(NoWay::Refused(refused))),
        };
        let guards = Guards {
            _shown: ctx.node.connections.track(plan.shown(peer, dst)),
            _counted: endpoint.as_ref().map(|uid| ctx.outlook.count(uid)),
        };
        let failure = match plan.open(ctx, source, peer).await {
            Ok(far) => {
                if let Some(uid) = &endpoint {
                    ctx.outlook.reached(uid);
                }
                return Ok(Way { flow: plan.flow, far, guards });
            }
            Err(failure) => failure,
        };
        let to_blame = endpoint.filter(|_| failure.is_the_endpoints(plan.hop()));
        last = Some(NoWay::Failed { flow: Box::new(plan.flow), failure });
        let Some(uid) = to_blame else { break };
        ctx.outlook.failed(&uid);
        failed.push(uid);
        if failed.len() >= ATTEMPTS || started.elapsed() >= RETRY_WITHIN {
            break;
        }
    }
    Err(last.unwrap_or(NoWay::Refused(Refused::NoOther)))
}

/// The route, with an address where it had a host name; else whose name leads nowhere, and why.
async fn located(
    node: &NodeContext,
    route: Route,
    request: &Request<'_>,
) -> Result<Route, (Option<Arc<str>>, NameError)> {
    let Some(name) = route.unresolved() else { return Ok(route) };
    let mut rng = StdRng::from_rng(&mut rand::rng());
    match node.names.resolve(name, request.dst.ip(), &mut rng).await {
        Ok(ip) => Ok(route.resolve(&node.state.load(), request, ip, &mut rng)),
        Err(error) => Err((route.endpoint().map(|endpoint| Arc::clone(&endpoint.uid)), error)),
    }
}

/// One route, ready to be dialled, and the flow that it makes.
struct Plan {
    flow: Flow,
    trace: TraceParent,
    course: Course,
}

enum Course {
    Direct,
    Hbone(Tunnelled),
    Double { outer: Tunnelled, inner: Tunnelled, lane: u8 },
}

/// One tunnel of a course.
#[derive(Clone)]
struct Tunnelled {
    expected: Vec<Identity>,
    authority: Authority,
    service: Option<Arc<Service>>,
    hop: Hop,
}

impl Plan {
    fn new(source: &Arc<Workload>, route: Route) -> Result<Self, Refused> {
        let trace = TraceParent::random(&mut rand::rng());
        match route {
            Route::Refuse(refusal) => Err(Refused::Mesh(refusal)),
            Route::Direct { dst, workload, service } => Ok(Self {
                flow: Flow {
                    dst: address(&dst)?,
                    hbone_authority: None,
                    source: Party { workload: Some(Arc::clone(source)), ..Party::default() },
                    destination: Party { workload, ..Party::default() },
                    service,
                    security: SecurityPolicy::Unknown,
                    trace_id: None,
                },
                course: Course::Direct,
                trace,
            }),
            Route::Hbone(route) => {
                let HboneRoute { gateway, authority, expected, workload, service, hop } = route;
                let service_of = service.clone();
                let flow =
                    flow(source, address(&gateway)?, &authority, workload, service_of, trace);
                let authority = authority.to_string().try_into().map_err(Refused::Authority)?;
                let tunnel = Tunnelled { expected, authority, service, hop };
                Ok(Self { flow, trace, course: Course::Hbone(tunnel) })
            }
            Route::DoubleHbone(route) => {
                let DoubleHboneRoute { gateway, gateway_expected, authority, .. } = route;
                let service = Some(route.service);
                let dst = address(&gateway)?;
                let flow = flow(source, dst, &authority, route.workload, service.clone(), trace);
                let authority: Authority =
                    authority.to_string().try_into().map_err(Refused::Authority)?;
                let tunnel = |expected, hop| Tunnelled {
                    expected,
                    authority: authority.clone(),
                    service: service.clone(),
                    hop,
                };
                let course = Course::Double {
                    outer: tunnel(gateway_expected, Hop::Waypoint),
                    inner: tunnel(route.expected, route.hop),
                    lane: rand::rng().random_range(0..LANES),
                };
                Ok(Self { flow, trace, course })
            }
        }
    }

    fn shown(&self, peer: SocketAddr, dst: SocketAddr) -> Connection {
        Connection {
            direction: Direction::Outbound,
            src: peer,
            original_dst: Some(dst.to_string().into()),
            actual_dst: self.flow.dst,
            protocol: match self.course {
                Course::Direct => Protocol::Tcp,
                Course::Hbone(_) | Course::Double { .. } => Protocol::Hbone,
            },
        }
    }

    async fn open(
        &self,
        ctx: &Arc<PodContext>,
        source: &Arc<Workload>,
        peer: SocketAddr,
    ) -> Result<Far, Failure> {
        let gateway = self.flow.dst;
        match &self.course {
            Course::Direct => Ok(Far::Plain(ctx.dialer.dial(gateway, Leg::Passthrough).await?)),
            Course::Hbone(tunnel) => {
                let credential = ctx.node.certificates.fetch(&source.identity).await?;
                let request = request(ctx, peer, source, tunnel, self.trace);
                Ok(Far::Tunnel(through(ctx, credential, tunnel, gateway, request).await?))
            }
            Course::Double { outer, inner, lane } => {
                let credential = ctx.node.certificates.fetch(&source.identity).await?;
                let mut within = request(ctx, peer, source, inner, self.trace);
                if let Ok(network) = HeaderValue::try_from(&ctx.node.network) {
                    within.headers.insert(FORWARDED_NETWORK, network);
                }
                let key = PeerKey {
                    source: source.identity.clone(),
                    expected: inner.expected.clone(),
                    gateway,
                    within: Some(Within {
                        gateway: outer.expected.clone(),
                        authority: outer.authority.clone(),
                        lane: *lane,
                    }),
                };
                let outer_request = request(ctx, peer, source, outer, self.trace);
                let (ctx, outer, timeouts) = (Arc::clone(ctx), outer.clone(), ctx.node.timeouts);
                let expected = inner.expected.clone();
                let pool = Arc::clone(&ctx);
                let connect = move || async move {
                    let opened =
                        through(&ctx, Arc::clone(&credential), &outer, gateway, outer_request);
                    let tunnel = Box::pin(opened)
                        .await
                        .map_err(|error| ConnectError::Gateway(Box::new(error)))?;
                    let config = credential.client_config(&expected);
                    let established =
                        Box::pin(client::connect_through(tunnel, config, &timeouts)).await?;
                    Ok(bounded(established, &credential, &ctx.node.certificates, gateway))
                };
                Ok(Far::Tunnel(pool.pool.open(key, connect, within).await?))
            }
        }
    }

    /// What the endpoint is, for a failure to be judged by.
    fn hop(&self) -> Hop {
        match &self.course {
            Course::Direct => Hop::Workload,
            Course::Hbone(tunnel) | Course::Double { inner: tunnel, .. } => tunnel.hop,
        }
    }
}

/// Opens a tunnel over TCP.
async fn through(
    ctx: &PodContext,
    credential: Arc<Credential>,
    tunnel: &Tunnelled,
    gateway: SocketAddr,
    request: Connect,
) -> Result<Tunnel, OpenError> {
    let key = PeerKey {
        source: credential.identity().clone(),
        expected: tunnel.expected.clone(),
        gateway,
        within: None,
    };
    let (dialer, timeouts) = (ctx.dialer.clone(), ctx.node.timeouts);
    let (expected, certificates) = (key.expected.clone(), Arc::clone(&ctx.node.certificates));
    let connect = move || async move {
        let tcp = dialer.dial(gateway, Leg::Hbone).await?;
        let config = credential.client_config(&expected);
        // Boxed: few connections need one of their own, and each would carry the room for it.
        let established = Box::pin(client::connect(tcp, config, &timeouts)).await?;
        Ok(bounded(established, &credential, &certificates, gateway))
    };
    ctx.pool.open(key, connect, request).await
}

/// Lets the connection last as long as both ends' certificates do.
fn bounded(
    established: Established,
    credential: &Credential,
    certificates: &Certificates,
    gateway: SocketAddr,
) -> Established {
    let lifetime = credential.outbound_lifetime(established.peer_certificates());
    let (ended, superseded) = (lifetime.ended(), certificates.superseded(credential));
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
    established.until(retire, cut)
}

fn flow(
    source: &Arc<Workload>,
    gateway: SocketAddr,
    authority: &Place,
    workload: Arc<Workload>,
    service: Option<Arc<Service>>,
    trace: TraceParent,
) -> Flow {
    Flow {
        dst: gateway,
        hbone_authority: Some(authority.to_string().into()),
        source: Party {
            identity: Some(source.identity.clone()),
            workload: Some(Arc::clone(source)),
            claims: None,
        },
        destination: Party {
            identity: Some(workload.identity.clone()),
            workload: Some(workload),
            claims: None,
        },
        service,
        security: SecurityPolicy::MutualTls,
        trace_id: Some(trace.trace_id),
    }
}

fn address(place: &Place) -> Result<SocketAddr, Refused> {
    match place {
        Place::Address(address) => Ok(*address),
        Place::Name { host, .. } => Err(Refused::Unresolved(Arc::clone(host))),
    }
}

fn request(
    ctx: &PodContext,
    peer: SocketAddr,
    source: &Workload,
    tunnel: &Tunnelled,
    trace: TraceParent,
) -> Connect {
    let host = tunnel.service.as_ref().map(|service| service.key.hostname.to_string());
    let forwarded = Forwarded { client: Some(peer), host: host.unwrap_or_default() };
    let headers: HeaderMap = [
        (BAGGAGE, ctx.node.baggage(source).to_value()),
        (FORWARDED, forwarded.to_value()),
        (TRACEPARENT, trace.to_value()),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect();
    Connect { authority: tunnel.authority.clone(), headers }
}
