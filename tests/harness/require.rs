//! What a scenario needs from the machine, and what happens where it is missing.
//!
//! A skip prints its reason. It is a failure where `CULVERT_REQUIRE`, a comma-separated list, names the capability.

use std::{fs, path::Path, process::Command, sync::OnceLock};

use nix::{
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
};

/// Network namespaces, bpffs and a culvert binary: what every scenario needs.
#[must_use]
pub fn mesh() -> bool {
    judge("netns", missing_for_mesh())
}

/// Network namespaces and a mounted bpffs.
#[must_use]
pub fn netns() -> bool {
    judge("netns", missing_for_netns())
}

/// Why a mesh cannot run here; `None` when it can.
pub fn missing_for_mesh() -> Option<String> {
    missing_for_netns().or_else(|| crate::culvert::binary().err().map(|error| format!("{error:#}")))
}

/// Network namespaces and what loading BPF objects needs beyond them; `missing` says what is not there.
#[must_use]
pub fn bpf(missing: impl FnOnce() -> Option<String>) -> bool {
    judge("bpf", missing_for_netns().or_else(missing))
}

/// A program that answers `probe` with success; `tools` is the capability's name.
#[must_use]
pub fn tool(program: &str, probe: &[&str]) -> bool {
    let reason = match Command::new(program).args(probe).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!(
            "{program} {}: {}",
            probe.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )),
        Err(error) => Some(format!("{program}: {error}")),
    };
    judge("tools", reason)
}

/// Whether long scenarios run too; says so where they do not.
#[must_use]
pub fn full() -> bool {
    let full = is_full();
    if !full {
        eprintln!("skipped: long scenarios run where CULVERT_FULL is 1");
    }
    full
}

/// How often to do what is worth repeating: `usual`, or `thorough` times where long scenarios run.
pub fn rounds(usual: usize, thorough: usize) -> usize {
    if is_full() { thorough } else { usual }
}

fn is_full() -> bool {
    std::env::var("CULVERT_FULL").is_ok_and(|value| value == "1")
}

fn judge(capability: &str, missing: Option<String>) -> bool {
    let Some(reason) = missing else { return true };
    let required = std::env::var("CULVERT_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == capability),
        "CULVERT_REQUIRE names {capability}, but {reason}"
    );
    eprintln!("skipped: {reason}");
    false
}

fn missing_for_netns() -> Option<String> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    REASON.get_or_init(try_netns).clone()
}

fn try_netns() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("network namespaces need root".to_owned());
    }
    if let Err(error) = Command::new("ip").arg("-V").output() {
        return Some(format!("ip of iproute2 does not run: {error}"));
    }
    mount_bpffs().err()
}

/// Mounts bpffs where culvert looks for it, unless it is there.
fn mount_bpffs() -> Result<(), String> {
    let path = Path::new("/sys/fs/bpf");
    // Scenarios run in several processes; a second mount would hide the pins made under the first.
    let lock = fs::File::open("/sys/fs").map_err(|e| format!("open /sys/fs: {e}"))?;
    let _held = Flock::lock(lock, FlockArg::LockExclusive)
        .map_err(|(_, e)| format!("lock /sys/fs: {e}"))?;
    let mounts =
        fs::read_to_string("/proc/self/mounts").map_err(|e| format!("read mounts: {e}"))?;
    if mounts.lines().any(|line| line.split(' ').nth(1) == path.to_str()) {
        return Ok(());
    }
    mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), None::<&str>)
        .map_err(|e| format!("bpffs cannot be mounted at {}: {e}", path.display()))
}
