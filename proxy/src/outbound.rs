//! From a pod to the mesh: capture → identify → decide → carry → observe, on one screen.

mod failure;
mod open;

use std::{net::IpAddr, sync::Arc, time::Duration};

use culvert_capture::{Addresses, Captured};
use culvert_carry::copy;
use culvert_observe::{Denial, Direction};

use crate::{
    context::PodContext,
    flow::{Metered, end, refuse, reset},
};
use failure::Foreign;
use open::{Far, NoWay, Way};

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
    if let Err(error) = node.state.prepare(&source, orig_dst.ip()).await {
        return refuse(record, &stream, Denial::NoRoute, &error);
    }
    // Boxed, so that the room for opening is given back while the connection lasts.
    let opened = Box::pin(open::open(&ctx, &source, peer, orig_dst)).await;
    drop(source);
    let (flow, far, _guards) = match opened {
        Ok(Way { flow, far, guards }) => (flow, far, guards),
        Err(NoWay::Refused(refused)) => {
            return refuse(record, &stream, Denial::NoRoute, &refused);
        }
        Err(NoWay::Failed { flow, failure }) => {
            reset(&stream);
            return record.open(*flow).fail(failure.flag(), &failure);
        }
    };
    let record = record.open(flow);
    let meter = Metered::outbound(&record);
    let ended = match far {
        Far::Plain(far) => copy::plain(stream, far, &meter, &node.timeouts).await,
        Far::Tunnel(far) => copy::tunnel(stream, far, &meter, &node.timeouts).await,
    };
    end(record, ended.outcome);
}

/// The connection if the pod itself has made it; else it is refused.
pub(crate) async fn of_pod(ctx: &PodContext, captured: Captured) -> Option<Captured> {
    let Captured { stream, peer, orig_dst } = &captured;
    if is_own(&ctx.addresses, peer.ip()).await {
        return Some(captured);
    }
    let record = ctx.node.observe.begin(Direction::Outbound, *peer, *orig_dst);
    refuse(record, stream, Denial::ForeignOutbound, &Foreign { peer: *peer });
    None
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
