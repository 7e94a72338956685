//! The harness: a two-node network in namespaces, the culvert processes on it, the apps in its pods, scripted
//! peers, and taps on its wires.
//!
//! It asserts nothing about culvert; scenarios do. Everything it makes has a name of its own and is removed when
//! its owner is dropped, also by a panic; what a killed run leaves is removed by the next one. Namespaces are
//! entered by setns alone, on threads of their own, never with `ip netns exec`, which hides bpffs.

#![forbid(unsafe_code)]
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "the harness waits and dials as a program outside the mesh does, and fails by panicking"
)]

pub mod apps;
pub mod ca;
pub mod cgroup;
pub mod chart;
pub mod client;
pub mod container;
pub mod control_plane;
pub mod culvert;
pub mod dns;
pub mod flow_log;
mod frame;
pub mod hbone;
pub mod http;
pub mod inspect;
mod janitor;
pub mod load;
pub mod mesh_file;
pub mod metrics;
pub mod netns;
pub mod payload;
pub mod plane;
pub mod poll;
pub mod process;
pub mod require;
pub mod tap;
mod tls_records;
pub mod topology;
