//! Compiles the definitions under `proto/` in Rust alone, so that a build needs no `protoc`.

use std::error::Error;
use std::path::Path;

const FILES: [&str; 6] = [
    "envoy/config/core/v3/base.proto",
    "envoy/service/discovery/v3/discovery.proto",
    "istio/authorization.proto",
    "istio/ca.proto",
    "istio/workload.proto",
    "istio/zds.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let definitions = protox::compile(FILES, [root])?;
    // Connecting is left to the caller: identities, roots and tokens change while the process runs.
    tonic_prost_build::configure().build_transport(false).compile_fds(definitions)?;
    Ok(())
}
