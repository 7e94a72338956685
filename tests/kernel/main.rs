//! Runs the BPF objects on this kernel: the verifier's cost, recorded packets, and live sockets.
//!
//! Needs root, and the objects in `CULVERT_BPF_DIR` (default: where `build-ebpf` puts them); without them every test
//! prints why and is skipped, or fails where `CULVERT_REQUIRE` names `bpf`.

#![cfg(test)]

mod budget;
mod cgroup;
mod fixture;
mod lookups;
mod netns;
mod node_end;
mod objects;
mod outcomes;
mod packets;
mod settings;
mod sockets;
mod steering;
mod test_run;
mod tun;
