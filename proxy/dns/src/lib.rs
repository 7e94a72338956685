//! Names for pods: the mesh's services by their addresses in it, everything else by the name server that was asked.
//!
//! A [`Server`] takes what a pod asks any name server, decides with [`resolve`] who answers, and answers as the server that
//! was asked. What the mesh does not know goes to that very server, from the pod's own network namespace and unchanged, so
//! that a pod's own name servers, search domains and policies stay its own. How questions are captured is left to others,
//! and so are sockets' namespaces, records and counters, which come from a [`Host`].

#![forbid(unsafe_code)]

mod cache;
mod forward;
mod host;
pub mod resolve;
mod server;
mod stream;
#[cfg(test)]
mod testing;
mod wire;

pub use hickory_proto::rr::RecordType;
pub use host::{Asked, Datagram, Event, Face, Host, Loss};
pub use resolve::{SearchPath, Zone};
pub use server::Server;
pub use wire::Transport;
