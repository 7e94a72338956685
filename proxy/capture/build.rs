//! Embeds the BPF objects: those that `cargo xtask build-ebpf` has just made, else the reference ones in
//! `bpf-fixtures/objects`, whichever were built from the sources as they are now. Compiles nothing.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

#[path = "../../ebpf/hash_sources.rs"]
mod hash_sources;

use hash_sources::{HASH_FILE, SOURCES, source_hash};

const OBJECTS: [&str; 3] = ["node.o", "exempt.o", "pod.o"];

fn main() {
    if let Err(reason) = embed() {
        println!("cargo::error={reason}");
    }
}

fn embed() -> Result<(), String> {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(variable("OUT_DIR")?);
    let root = manifest.join("../..");
    let fresh = fresh_dir(&out);
    let reference = root.join("bpf-fixtures/objects");

    println!("cargo::rerun-if-env-changed=CULVERT_BPF_DIR");
    println!("cargo::rerun-if-changed={}", root.join("ebpf/hash_sources.rs").display());
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let dirs = || fresh.iter().chain([&reference]);
    // A missing file would count as changed in every build. Objects that appear later differ only with the sources.
    for file in dirs().map(|dir| dir.join(HASH_FILE)).filter(|file| file.exists()) {
        println!("cargo::rerun-if-changed={}", file.display());
    }

    let hash = source_hash(&root).map_err(|e| format!("read the BPF sources: {e}"))?;
    let dir = dirs()
        .find(|dir| built_from(dir, &hash))
        .ok_or("BPF sources changed and nothing was rebuilt; run: cargo xtask build-ebpf")?;
    for object in OBJECTS {
        copy(&dir.join(object), &out.join(object))
            .map_err(|e| format!("copy {}: {e}", dir.join(object).display()))?;
    }
    Ok(())
}

fn variable(name: &str) -> Result<String, String> {
    #[expect(clippy::disallowed_methods, reason = "cargo speaks to a build script by environment")]
    env::var(name).map_err(|e| format!("read {name}: {e}"))
}

/// Where `cargo xtask build-ebpf` puts its objects: `CULVERT_BPF_DIR`, else `culvert-bpf` in the target directory, which
/// is the ancestor of `OUT_DIR` that cargo has marked with `CACHEDIR.TAG`.
fn fresh_dir(out: &Path) -> Option<PathBuf> {
    if let Ok(dir) = variable("CULVERT_BPF_DIR") {
        return Some(dir.into());
    }
    let target = out.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file())?;
    Some(target.join("culvert-bpf"))
}

fn built_from(dir: &Path, hash: &str) -> bool {
    fs::read_to_string(dir.join(HASH_FILE)).is_ok_and(|recorded| recorded.trim() == hash)
}

/// A copy that leaves the file alone when it is the same, so that nothing is recompiled for it.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let bytes = fs::read(from)?;
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(to, bytes)
}
