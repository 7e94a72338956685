//! culvert, the node dataplane of an ambient mesh.
//!
//! A connection of an enrolled pod is *captured* by BPF programs, *identified* by the listener that accepted it,
//! *decided* upon from one snapshot of the mesh, *carried* in plaintext or over HBONE, *delivered* to the application at
//! its other end and *observed* in one record. Each stage is a crate; this one wires them: [`app`] builds them once,
//! [`enroll`] brings pods in and out, `outbound` and `inbound` are the two directions,
//! and `dns` answers pods that ask for names.
//!
//! Invariants: only [`config`] reads the environment; only [`tasks`] spawns; per-connection code lives in `outbound` and
//! `inbound` alone.

#![forbid(unsafe_code)]

pub mod config;

pub mod app;
mod context;
pub mod controlplane;
mod demand;
mod dns;
pub mod enroll;
mod flow;
mod handover;
mod inbound;
mod names;
mod outbound;
mod outlook;
mod pods;
mod revocations;
mod state;
mod watch;

pub mod admin;
pub mod logging;
pub mod readiness;
pub mod tasks;

pub use culvert_mesh::error;
pub use handover::HandoverError;
pub use pods::{PodsFileError, SourceError};
pub use revocations::RevocationFileError;
pub use state::MeshFileError;
