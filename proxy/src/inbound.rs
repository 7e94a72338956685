//! From the mesh, or from plaintext clients, to a pod: capture → identify → decide → deliver → observe.

mod claims;
mod ending;
mod failure;
mod handover;
mod permit;

use std::{net::SocketAddr, sync::Arc};

use culvert_capture::Captured;
use culvert_carry::{
    copy,
    dial::Leg,
    hbone::{
        headers::{BAGGAGE, Forwarded, TraceParent},
        server::{self, Incoming, Phase, Secured},
    },
};
use culvert_mesh::{
    Identity,
    inbound::{Target, attribute, target},
    policy,
    reason::ResponseFlag,
    workload::Workload,
};
use culvert_observe::{Connection, Denial, Direction, Flow, Party, Protocol, SecurityPolicy};
use http::{HeaderMap, Method, StatusCode};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    context::PodContext,
    flow::{Metered, end, refuse, reset},
};
use claims::Told;
use ending::Ending;
use failure::{Handshake, Looped, NotConnect, Overloaded, Revoked, Undeliverable, Withdrawn};
use handover::Handover;
use permit::Permit;

/// Serves one HBONE connection and every CONNECT on it.
pub(crate) async fn hbone(ctx: Arc<PodContext>, captured: Captured) {
    let Captured { stream, peer, orig_dst } = captured;
    let node = &ctx.node;
    let _socket = node.observe.socket(Direction::Inbound);
    // The connection itself leaves a record only if it is refused; each CONNECT on it has its own.
    let record = || node.observe.begin(Direction::Inbound, peer, orig_dst);

    let Ok(unproved) = ctx.handshakes.try_acquire() else {
        return refuse(record(), &stream, Denial::Overload, &Overloaded);
    };
    let local = match node.state.identify(&ctx.pod).await {
        Ok(local) => local,
        Err(error) => return refuse(record(), &stream, Denial::UnknownWorkload, &error),
    };
    let credential = match node.certificates.fetch(&local.identity).await {
        Ok(credential) => credential,
        Err(error) => return refuse(record(), &stream, Denial::NoCertificate, &error),
    };
    let secured = server::handshake(stream, credential.server_config(), &node.timeouts).await;
    let secured = match secured {
        Ok(secured) => secured,
        Err(error) => return record().refuse(Denial::Handshake, &Handshake::from(error)),
    };
    drop(unproved);
    let (own, identity) = (orig_dst, identity(&secured));
    let revoked = CancellationToken::new();
    let ending = Ending {
        pod: ctx.phase.subscribe(),
        lifetime: credential.inbound_lifetime(secured.peer_certificates()),
        revoked: revoked.clone(),
        grace: node.timeouts.close,
    };
    let tunnel = Arc::new(TunnelEnds { peer, own, identity, revoked });
    let (phase, phases) = watch::channel(Phase::Serving);
    let handler = {
        let ctx = Arc::clone(&ctx);
        move |incoming| request(Arc::clone(&ctx), Arc::clone(&tunnel), incoming)
    };
    // Boxed: one a connection, and far larger than what leads here.
    let serving = Box::pin(async {
        tokio::select! {
            served = secured.serve(phases, &node.timeouts, handler) => served,
            never = ending.tell(&phase) => match never {},
        }
    });
    if let Err(error) = serving.await {
        let error = crate::error::chain(&error);
        tracing::debug!(%peer, error, "HBONE connection ended");
    }
}

/// Serves one plaintext connection to the pod.
pub(crate) async fn plaintext(ctx: Arc<PodContext>, captured: Captured) {
    let Captured { stream, peer, orig_dst } = captured;
    let node = &ctx.node;
    let _socket = node.observe.socket(Direction::Inbound);
    let record = node.observe.begin(Direction::Inbound, peer, orig_dst);

    // Our own delivery came back: its exemption is missing, and delivering again would loop for ever.
    if Looped::is(&stream, ctx.dialer.delivery_mark) {
        return refuse(record, &stream, Denial::SelfCall, &Looped);
    }
    if node.proxy_ports.contains(&orig_dst.port()) {
        return refuse(
            record,
            &stream,
            Denial::SelfCall,
            &Undeliverable::ProxyPort(orig_dst.port()),
        );
    }
    let local = match node.state.identify(&ctx.pod).await {
        Ok(local) => local,
        Err(error) => return refuse(record, &stream, Denial::UnknownWorkload, &error),
    };
    let (source, service) = {
        let snapshot = node.state.load();
        let source = snapshot.find_by_address(&node.network, &peer.ip()).cloned();
        let service = attribute(&snapshot, &local, orig_dst.port(), None).cloned();
        (source, service)
    };
    let record = record.open(Flow {
        dst: orig_dst,
        hbone_authority: None,
        source: Party { workload: source, ..Party::default() },
        destination: Party {
            identity: Some(local.identity.clone()),
            workload: Some(Arc::clone(&local)),
            claims: None,
        },
        service,
        security: SecurityPolicy::Unknown,
        trace_id: None,
    });
    let _shown = node.connections.track(Connection {
        direction: Direction::Inbound,
        src: peer,
        original_dst: None,
        actual_dst: orig_dst,
        protocol: Protocol::Tcp,
    });
    let connection =
        policy::Connection { source: peer.ip(), identity: None, destination: orig_dst };
    let mut permit = match Permit::check(&node.state, &ctx.pod, connection) {
        Ok(permit) => permit,
        Err(denied) => {
            reset(&stream);
            return record.fail(ResponseFlag::Deny, &denied);
        }
    };
    let app = match ctx.dialer.dial(orig_dst, Leg::Delivery { client: peer.ip() }).await {
        Ok(app) => app,
        Err(error) => {
            reset(&stream);
            return record.fail(ResponseFlag::Connect, &error);
        }
    };
    let meter = Metered::inbound(&record);
    tokio::select! {
        // A withdrawn permit comes first: a busy connection must not outlive it.
        biased;
        denied = permit.withdrawn() => record.fail(ResponseFlag::Deny, &denied),
        ended = copy::plain(app, stream, &meter, &node.timeouts) => end(record, ended.outcome),
    }
}

/// Both ends of an HBONE connection.
struct TunnelEnds {
    peer: SocketAddr,
    own: SocketAddr,
    identity: Option<Identity>,
    /// Fires when the peer's certificate is revoked.
    revoked: CancellationToken,
}

fn identity(secured: &Secured) -> Option<Identity> {
    culvert_tls::peer_identity(secured.peer_certificates())
}

/// Serves one CONNECT.
async fn request(ctx: Arc<PodContext>, tunnel: Arc<TunnelEnds>, incoming: Incoming) {
    let node = &ctx.node;
    let Incoming { method, authority, headers, mut respond } = incoming;
    let forwarded = Forwarded::parse(&headers);
    let trace = TraceParent::parse(&headers);
    let told = Told::read(&headers, tunnel.identity.as_ref(), &node.network);
    // Up to 64 KiB of the peer's, which must not be held for as long as the tunnel lasts.
    drop(headers);
    let record = node.observe.begin(Direction::Inbound, tunnel.peer, tunnel.own);

    let Some(authority) = authority.filter(|_| method == Method::CONNECT) else {
        respond.refuse(StatusCode::BAD_REQUEST);
        return record.refuse(Denial::BadRequest, &NotConnect { method });
    };
    let local = match node.state.identify(&ctx.pod).await {
        Ok(local) => local,
        Err(error) => {
            respond.refuse(StatusCode::SERVICE_UNAVAILABLE);
            return record.refuse(Denial::UnknownWorkload, &error);
        }
    };
    let found = {
        let snapshot = node.state.load();
        target(&snapshot, &local, tunnel.own, &authority, node.proxy_ports).map(|found| {
            let hint = Some(forwarded.host.as_str()).filter(|host| !host.is_empty());
            let hinted = attribute(&snapshot, &local, found.app.port(), hint).cloned();
            let source = source(&ctx, &snapshot, &tunnel).filter(|_| !told.is_foreign);
            let handover = Handover::new(&local, &tunnel, &authority, &found);
            (Target { service: hinted.or(found.service), app: found.app }, source, handover)
        })
    };
    let (Target { app, service }, source, handover) = match found {
        Ok((_, _, Err(error))) => {
            respond.refuse(StatusCode::SERVICE_UNAVAILABLE);
            return record.refuse(Denial::NoRoute, &error);
        }
        Ok((target, source, Ok(handover))) => (target, source, handover),
        Err(refusal) => {
            let status = StatusCode::from_u16(refusal.status());
            respond.refuse(status.unwrap_or(StatusCode::BAD_REQUEST));
            return record.refuse(Denial::WrongDestination, &refusal);
        }
    };
    let record = record.open(Flow {
        dst: tunnel.own,
        hbone_authority: Some(authority.into()),
        source: Party {
            identity: tunnel.identity.clone(),
            claims: told.claims.filter(|_| source.is_none()),
            workload: source,
        },
        destination: Party {
            identity: Some(local.identity.clone()),
            workload: Some(Arc::clone(&local)),
            claims: None,
        },
        service,
        security: SecurityPolicy::MutualTls,
        trace_id: trace.map(|trace| trace.trace_id),
    });
    let _shown = node.connections.track(Connection {
        direction: Direction::Inbound,
        src: tunnel.peer,
        original_dst: (!forwarded.host.is_empty()).then(|| forwarded.host.into()),
        actual_dst: app,
        protocol: Protocol::Hbone,
    });
    let connection = policy::Connection {
        source: tunnel.peer.ip(),
        identity: tunnel.identity.clone(),
        destination: app,
    };
    let mut permit = match Permit::check(&node.state, &ctx.pod, connection) {
        Ok(permit) => permit,
        Err(denied) => {
            respond.refuse(StatusCode::UNAUTHORIZED);
            return record.fail(ResponseFlag::Deny, &denied);
        }
    };
    let dialled = tokio::select! {
        dialled = handover.deliver(&ctx, app, tunnel.peer.ip()) => dialled,
        denied = permit.withdrawn() => {
            respond.refuse(StatusCode::UNAUTHORIZED);
            return record.fail(ResponseFlag::Deny, &denied);
        }
        () = respond.withdrawn() => return record.fail(ResponseFlag::Connect, &Withdrawn),
        () = tunnel.revoked.cancelled() => {
            return record.fail(ResponseFlag::CertRevoked, &Revoked);
        }
    };
    let app = match dialled {
        Ok(app) => app,
        Err(error) => {
            respond.refuse(StatusCode::SERVICE_UNAVAILABLE);
            return record.fail(ResponseFlag::Connect, &error);
        }
    };
    let stream = match respond.accept(response_headers(&ctx, &local)) {
        Ok(stream) => stream,
        Err(error) => {
            reset(&app);
            return record.fail(ResponseFlag::H2HandshakeFailure, &error);
        }
    };
    let meter = Metered::inbound(&record);
    tokio::select! {
        biased;
        () = tunnel.revoked.cancelled() => record.fail(ResponseFlag::CertRevoked, &Revoked),
        denied = permit.withdrawn() => record.fail(ResponseFlag::Deny, &denied),
        ended = copy::tunnel(app, stream, &meter, &node.timeouts) => end(record, ended.outcome),
    }
}

/// The peer's workload, for records only: the address says which of those that share its identity it is.
fn source(
    ctx: &PodContext,
    snapshot: &culvert_mesh::Snapshot,
    tunnel: &TunnelEnds,
) -> Option<Arc<Workload>> {
    let found = snapshot.find_by_address(&ctx.node.network, &tunnel.peer.ip())?;
    (Some(&found.identity) == tunnel.identity.as_ref()).then(|| Arc::clone(found))
}

fn response_headers(ctx: &PodContext, local: &Workload) -> HeaderMap {
    let baggage = ctx.node.baggage(local).to_value();
    baggage.into_iter().map(|value| (BAGGAGE, value)).collect()
}
