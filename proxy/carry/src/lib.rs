//! Carry and deliver: every dial, HBONE tunnels over pooled HTTP/2 connections, and the copying of bytes.
//!
//! It carries what it is told to carry: who may talk to whom, where a connection goes and which certificate proves it
//! is decided before, by `culvert-mesh` and `culvert-tls`, and what is recorded about it afterwards is
//! `culvert-observe`'s.
//!
//! Invariants:
//! - Every await on a peer has a deadline from [`Timeouts`], or ends with the connection's keepalive.
//! - No direction of a connection buffers more than its window ([`hbone`]) or one buffer ([`copy`]).
//! - Every task belongs to a [`hbone::Pool`] or to a [`hbone::server::Secured::serve`] call, and ends with it.
//! - A connection that ends other than by both sides' end of stream is seen as a reset by both applications.
#![forbid(unsafe_code)]

mod buffer;
pub mod copy;
pub mod dial;
pub mod hbone;
pub mod proxy_protocol;
#[cfg(test)]
mod testing;
mod timeouts;

pub use timeouts::Timeouts;
