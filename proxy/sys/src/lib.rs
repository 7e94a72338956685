//! The unsafe fence: the few kernel interfaces that no maintained crate wraps, as small safe functions.
//!
//! Mechanism only: nothing here knows a pod, a mark or the mesh. Each function takes and returns owned or borrowed
//! descriptors, so that no caller can hold a stale one. Every other crate of the proxy forbids `unsafe`.

pub mod bpf;
pub mod caps;
pub mod cgroup;
pub mod chain;
pub mod container;
pub mod datagram;
pub mod handoff;
pub mod interfaces;
pub mod limits;
pub mod netns;
pub mod seqpacket;
pub mod socket;
