//! Which pods of the node are to be enrolled: where they come from, and how an agent hands them to proxies.
//!
//! What enrolment does in a pod's network namespace is left to `culvert-capture`; who carries its connections, to the binary.

#![forbid(unsafe_code)]

pub mod discovery;
pub mod kubernetes;
pub mod pods;
pub mod zds;
