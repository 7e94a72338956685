//! One network namespace: its name under `/run/netns`, commands and threads inside it.
//!
//! Leaves what the namespaces are wired to to `topology`.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns};

use crate::{poll, process::finish};

/// A named network namespace, removed when dropped.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Takes charge of a namespace that `ip netns add` has just made.
    pub fn adopt(name: String) -> Self {
        Self { name }
    }

    /// The name that `ip -n` takes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the namespace is mounted: what a pods file names.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Runs `lines` through one `ip -n NAME -batch -`.
    pub fn ip(&self, lines: &str) -> Result<()> {
        ip_batch(Some(&self.name), lines)
    }

    /// Takes its name away before its owner goes, as when a pod is deleted.
    pub fn delete(&self) {
        delete(&self.name);
    }

    /// Sets `net.KEY`, with slashes for dots.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys/net").join(key);
        self.run(|| std::fs::write(&path, value))
            .with_context(|| format!("write {value} to {}", path.display()))
    }

    /// What a program prints that is run inside the namespace and succeeds.
    pub fn output(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let finished = finish(self, Command::new(program).args(arguments), poll::SOON)?;
        ensure!(finished.code == 0, "{program} {arguments:?}: {}", finished.stderr.trim());
        Ok(finished.stdout)
    }

    /// Runs `work` on a thread of its own inside the namespace and returns what it returned.
    ///
    /// # Panics
    /// With the panic of `work`, or when the namespace cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let outcome = thread::scope(|scope| {
            scope
                .spawn(|| {
                    enter(&self.path());
                    work()
                })
                .join()
        });
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Like [`Netns::run`], but returns at once.
    pub fn start<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let path = self.path();
        thread::spawn(move || {
            enter(&path);
            work()
        })
    }
}

fn enter(path: &Path) {
    let file = File::open(path).unwrap_or_else(|e| panic!("open {}: {e}", path.display()));
    // Alone, without a mount namespace: bpffs and cgroup2 must stay in sight.
    setns(file, CloneFlags::CLONE_NEWNET)
        .unwrap_or_else(|e| panic!("enter {}: {e}", path.display()));
}

impl Drop for Netns {
    fn drop(&mut self) {
        if self.path().exists() {
            delete(&self.name);
        }
    }
}

/// Removes the namespace's name; it goes away with the last process in it.
pub(crate) fn delete(name: &str) {
    if let Err(error) = ip_batch(None, &format!("netns del {name}\n")) {
        eprintln!("netns {name} stays behind: {error:#}");
    }
}

/// Runs `lines` through `ip -batch`, in `netns` if there is one.
pub(crate) fn ip_batch(netns: Option<&str>, lines: &str) -> Result<()> {
    let mut command = Command::new("ip");
    if let Some(netns) = netns {
        command.args(["-n", netns]);
    }
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("run ip (is iproute2 installed?)")?;
    child.stdin.take().context("ip has no stdin")?.write_all(lines.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "ip -batch in {}: {}\n{lines}",
        netns.unwrap_or("the host"),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
