//! The access log: one event a flow end, under the target `access`.
//!
//! Names and order of the fields are those of the reference proxy, since people and tools parse the lines. Fields of
//! which nothing is known are left out, identities are shown only where TLS proved them. Formatting is the subscriber's.

use std::net::SocketAddr;

use culvert_mesh::{Identity, reason::ResponseFlag};
use tracing::{Level, event};

use crate::flow::{Direction, FlowRecord, Party, SecurityPolicy};

/// The target of every event here.
const TARGET: &str = "access";

macro_rules! flow_event {
    ($level:expr, $record:expr, $message:literal, $($field:tt)*) => {{
        let (record, flow) = ($record, &$record.flow);
        let mutual = flow.security == SecurityPolicy::MutualTls;
        let (source, destination) = (Side::of(&flow.source, mutual), Side::of(&flow.destination, mutual));
        event!(
            target: TARGET,
            $level,
            src.addr = %record.src,
            src.workload = source.workload,
            src.namespace = source.namespace,
            src.identity = source.identity,
            src.cluster = source.cluster,
            dst.addr = %flow.dst,
            dst.hbone_addr = flow.hbone_authority.as_deref().map(tracing::field::display),
            dst.service = flow.service.as_ref().map(|service| &*service.key.hostname),
            dst.workload = destination.workload,
            dst.namespace = destination.namespace,
            dst.identity = destination.identity,
            dst.cluster = destination.cluster,
            direction = record.direction.as_str(),
            $($field)*
            trace_id = flow.trace_id.map(|id| tracing::field::display(format!("{id:032x}"))),
            $message
        );
    }};
}

/// A flow's two ends are known.
pub(crate) fn opened(record: &FlowRecord) {
    flow_event!(Level::DEBUG, record, "connection opened",);
}

/// A flow has ended, with `error` if it did not end well; what has no flag, as a reset by an application, is no fault.
pub(crate) fn closed(record: &FlowRecord, flag: ResponseFlag, error: Option<&str>) {
    let (sent, received) = record.sent_and_received();
    let duration = format!("{}ms", record.elapsed().as_millis());
    let duration = duration.as_str();
    match (flag, error) {
        // No field comes of an error that is not there.
        (_, None) | (ResponseFlag::None, _) => flow_event!(
            Level::INFO,
            record,
            "connection complete",
            bytes_sent = sent,
            bytes_recv = received,
            duration,
            error,
        ),
        (_, Some(error)) => flow_event!(
            Level::ERROR,
            record,
            "connection complete",
            bytes_sent = sent,
            bytes_recv = received,
            duration,
            error,
        ),
    }
}

/// A connection was refused before anything was known of it but its addresses.
pub(crate) fn denied(direction: Direction, src: SocketAddr, dst: SocketAddr, error: &str) {
    event!(
        target: TARGET, Level::WARN,
        src.addr = %src, dst.addr = %dst, direction = direction.as_str(), error, "connection failed"
    );
}

/// One end of a flow, as the log shows it.
struct Side<'a> {
    workload: Option<&'a str>,
    namespace: Option<&'a str>,
    identity: Option<&'a str>,
    cluster: Option<&'a str>,
}

impl<'a> Side<'a> {
    fn of(party: &'a Party, mutual: bool) -> Self {
        let workload = party.workload.as_deref();
        Self {
            workload: workload.map(|workload| &*workload.name).filter(|name| !name.is_empty()),
            namespace: workload.map(|workload| workload.identity.namespace()),
            identity: party.identity.as_ref().filter(|_| mutual).map(Identity::uri),
            cluster: workload
                .map(|workload| &*workload.cluster_id)
                .filter(|cluster| !cluster.is_empty()),
        }
    }
}

#[cfg(test)]
mod tests;
