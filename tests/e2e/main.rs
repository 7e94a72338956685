//! Scenarios: the culvert binary on two nodes, real sockets in four pods, and what a user would see.
//!
//! Each scenario builds its own network, so that they run side by side in any order. They need root, and say so
//! where they are skipped.

#![cfg(test)]
#![forbid(unsafe_code)]

mod addresses;
mod agents;
mod bad_input;
mod bench;
mod bulk;
mod captured;
mod certificates;
mod containers;
mod control;
mod dns;
mod endings;
mod endpoints;
mod enrolment;
mod files;
mod foreign;
mod guarantees;
mod handover;
mod hostile;
mod links;
mod neighbours;
mod network;
mod networks;
mod peers;
mod plaintext;
mod plane;
mod policy;
mod probes;
mod restart;
mod settings;
mod survival;
mod talk;
mod tcp_traps;
mod third_party;
mod virtuals;
mod when_down;
