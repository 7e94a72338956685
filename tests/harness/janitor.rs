//! Removes what earlier runs left behind: only things named after a process that no longer exists.
//!
//! Names start with `cv<pid>x`, see `topology`. Processes are known from the `*.pid` files that `process` writes.

use std::{fs, path::Path, process::Command, sync::Once};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{cgroup, netns, process};

/// Sweeps when first called in this process.
pub(crate) fn sweep_once() {
    static SWEPT: Once = Once::new();
    SWEPT.call_once(|| {
        sweep_folders();
        sweep_namespaces();
        sweep_cgroups();
    });
}

fn sweep_folders() {
    for folder in entries(&std::env::temp_dir()) {
        if !is_stale(&folder) {
            continue;
        }
        let folder = std::env::temp_dir().join(folder);
        for node in ["a", "b"] {
            let dir = folder.join(node);
            for file in entries(&dir) {
                let file = dir.join(file);
                if file.extension().is_some_and(|extension| extension == "pid") {
                    stop_recorded(&file);
                }
            }
        }
        if let Err(error) = fs::remove_dir_all(&folder) {
            eprintln!("janitor: remove {}: {error}", folder.display());
        }
    }
}

fn stop_recorded(pid_file: &Path) {
    let Ok(record) = fs::read_to_string(pid_file) else { return };
    if let Some(pid) = process::still_running(&record)
        && kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()
    {
        eprintln!("janitor: ended process {pid} of a run that is gone");
    }
}

fn sweep_namespaces() {
    for name in entries(Path::new("/run/netns")).into_iter().filter(|name| is_stale(name)) {
        if name.ends_with("-a") || name.ends_with("-b") {
            clean_node(&name);
        }
        netns::delete(&name);
    }
}

/// Pins of a killed culvert; when there is no binary there can be no pins either.
fn clean_node(node: &str) {
    if let Ok(binary) = crate::culvert::binary()
        && let Err(error) = Command::new(binary).args(["cleanup", "--node", node]).output()
    {
        eprintln!("janitor: clean up node {node}: {error}");
    }
}

fn sweep_cgroups() {
    let Some(parent) = cgroup::own() else { return };
    for name in entries(&parent) {
        if name.strip_prefix(cgroup::PREFIX).is_some_and(is_stale) {
            cgroup::remove(&name);
        }
    }
}

fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn is_stale(name: &str) -> bool {
    owner(name).is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

fn owner(name: &str) -> Option<u32> {
    name.strip_prefix("cv")?.split_once('x')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_harness_have_an_owner() {
        assert_eq!(owner("cv123x4-a"), Some(123));
        assert_eq!(owner("cv123x4-AbCdEf"), Some(123));
        assert_eq!(owner("cv-x4"), None);
        assert_eq!(owner("calico"), None);
    }

    #[test]
    fn things_of_a_living_process_are_kept() {
        assert!(!is_stale(&format!("cv{}x0-a", std::process::id())));
    }
}
