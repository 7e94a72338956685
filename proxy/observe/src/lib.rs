//! Observe: what became of each connection, for the access log, the metrics and the connection table.
//!
//! [`Observe::begin`] opens a record when a connection is accepted; the record ends when it is dropped, so that opening,
//! closing and refusing leave exactly one trace each, whichever way the flow's task ends. Nothing here waits on I/O,
//! fails a flow or steers it; writing log lines out is the subscriber's, serving the exposition the binary's.
//!
//! Cost of a flow: its label set is looked up when it opens and when it closes; a chunk of its bytes costs one
//! uncontended atomic addition.

#![forbid(unsafe_code)]

mod access_log;
mod bpf;
mod claims;
mod connections;
mod denial;
mod flow;
mod kinds;
mod log_line;
mod metrics;
mod sharded;
#[cfg(test)]
mod testing;
mod transferred;

pub use bpf::{BpfOutcomes, ReadOutcomes};
pub use claims::Claims;
pub use connections::{Connection, Connections, Protocol, Tracked};
pub use denial::Denial;
pub use flow::{Direction, Flow, FlowRecord, Observe, OpenSocket, Party, Pending, SecurityPolicy};
pub use kinds::{Kinds, ReadKinds};
pub use log_line::LogLine;
pub use metrics::dns::{Dns, DnsQuestion};
pub use transferred::Transferred;
