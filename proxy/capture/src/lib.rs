//! Capture: loads, attaches and pins the BPF programs, prepares each pod's network namespace, and opens the listeners
//! on which captured connections arrive as [`Captured`].
//!
//! Never decides what may connect to what: that is `mesh`, and the binary passes values between the two.
//!
//! Invariants: a pod is either enrolled whole or not touched; no established flow depends on an entry of a BPF map; no
//! foreign qdisc, filter, rule or route is ever removed; setting the thread's network namespace never spans an await.
//!
//! Failure mode: when the process is gone, pinned programs stay and hold new connections until a successor enrols the
//! pod again. Only [`Node::unenroll`] and [`cleanup`] take them away.

#![forbid(unsafe_code)]

mod attach;
mod cleanup;
mod counts;
mod dns;
mod enrolment;
mod error;
mod exclusions;
mod filters;
mod hooks;
mod interfaces;
mod listeners;
mod load;
mod logs;
mod maps;
mod node;
mod node_end;
mod object;
mod pins;
mod pod;
mod probes;
mod removal;
mod rewriters;
mod routing;
mod rtnl;
mod seat;
mod settings;
mod sysctls;
mod tcx;
mod upkeep;

pub use cleanup::cleanup;
pub use dns::{Dns, DnsSocket, Query};
pub use error::{CaptureError, HostError, Remedy};
pub use listeners::{Captured, Listener, Role};
pub use load::check_capabilities;
pub use logs::BpfLogs;
pub use node::{BpfLog, GuardHost, Node, NodeOptions, WhenDown};
pub use pod::{Addresses, Pod, PodCapture, Watch};
pub use probes::ProbeCgroup;
pub use seat::{Elder, SEATS, Seat};
pub use settings::{MAX_ENTRIES, Settings, SettingsError};
