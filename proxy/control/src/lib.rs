//! Feeds: what the node learns of the mesh from a control plane, and the certificates it gets from an authority.
//!
//! [`xds`] keeps the mesh's records in step with a control plane over the incremental discovery protocol; [`convert`]
//! makes records of what came, purely; [`ca`] has certificates signed. All of them reach their [`Server`] in the same
//! way. Where records go, and when certificates are asked for, is left to the caller; no data path waits for anything
//! here but a look-up on demand, which has a deadline.
//!
//! Invariants: nothing is sent or believed before TLS has proved the server; roots and tokens are read again for each
//! connection; what a server sends is converted wholly or refused by name; what it can make grow is bounded; the state
//! it gave outlives the connection to it.

#![forbid(unsafe_code)]

pub mod ca;
pub mod convert;
pub mod server;
pub mod xds;

pub use server::Server;

#[cfg(test)]
mod testing;
