//! Identify and decide: who the ends of a connection are, where it goes, and whether it may.
//!
//! Everything here is a function of a [`Snapshot`] and what was asked: no I/O, no clock, no task,
//! no log, and no randomness but the caller's. Moving bytes and proving identities is left to the
//! other stages. What is not certain is refused; a workload of the mesh is never reached in
//! plaintext, and the tests of `route` say so for every pair of records they know. Decisions are
//! tested as tables, branch by branch.
#![forbid(unsafe_code)]

mod blocks;
pub mod endpoints;
pub mod error;
pub mod file;
pub mod identity;
pub mod inbound;
pub mod policy;
mod pool;
pub mod ports;
pub mod reason;
pub mod route;
pub mod service;
pub mod snapshot;
pub mod workload;

pub use endpoints::{Endpoint, Endpoints};
pub use identity::{Identity, IdentityError, PodRef};
pub use pool::Pool;
pub use ports::Ports;
pub use reason::ResponseFlag;
pub use service::Service;
pub use snapshot::{Origin, Snapshot, Update};
pub use workload::Workload;
