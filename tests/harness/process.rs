//! A child process: its output in a file, its end by pid, its pid on disk for the janitor.

use std::{
    fs::{self, File},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{netns::Netns, poll};

/// A running program, killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pid_file: PathBuf,
    log: PathBuf,
}

impl Process {
    /// Starts `command` in `netns`; standard output and error are appended to `dir/name.log`.
    pub fn spawn(netns: &Netns, dir: &Path, name: &str, command: &mut Command) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let output = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("open {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = netns.run(|| command.spawn()).with_context(|| format!("start {command:?}"))?;
        let pid_file = dir.join(format!("{name}-{}.pid", child.id()));
        fs::write(&pid_file, record(child.id()))
            .with_context(|| format!("write {}", pid_file.display()))?;
        Ok(Self { child, pid_file, log })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has printed, and its predecessors under the same name.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).context("pid out of range")?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("send {signal} to {pid}"))
    }

    /// How it ended; `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits for its end; `None` when `limit` has passed.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        poll::within(limit, || self.ended())
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        if self.child.kill().and_then(|()| self.child.wait()).is_err() {
            eprintln!("process {} could not be ended", self.child.id());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
        }
        if let Err(error) = fs::remove_file(&self.pid_file) {
            eprintln!("remove {}: {error}", self.pid_file.display());
        }
    }
}

/// What a program did that ran to its end.
#[derive(Debug)]
pub struct Finished {
    /// Exit code; 128 + signal when a signal ended it.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs `command` in `netns` and waits for its end, which must come within `limit`.
pub fn finish(netns: &Netns, command: &mut Command, limit: Duration) -> Result<Finished> {
    let mut child = netns
        .run(|| command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn())
        .with_context(|| format!("start {command:?}"))?;
    if poll::within(limit, || child.try_wait().ok().flatten()).is_none() {
        child.kill()?;
        let output = child.wait_with_output()?;
        anyhow::bail!(
            "{command:?} still ran after {limit:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let output = child.wait_with_output()?;
    Ok(Finished {
        code: output
            .status
            .code()
            .or_else(|| output.status.signal().map(|signal| 128 + signal))
            .unwrap_or(-1),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Pid and start time, because pids are reused.
fn record(pid: u32) -> String {
    format!("{pid} {}", start_time(pid).unwrap_or_default())
}

/// The pid in `record` if that very process still runs.
pub(crate) fn still_running(record: &str) -> Option<i32> {
    let (pid, start) = record.trim().split_once(' ')?;
    let pid: u32 = pid.parse().ok()?;
    (start_time(pid)? == start).then_some(i32::try_from(pid).ok()?)
}

/// Field 22 of `/proc/PID/stat`, counted after the command in parentheses, which may hold spaces.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_names_one_process_only() {
        let own = std::process::id();
        assert_eq!(still_running(&record(own)), i32::try_from(own).ok());
        assert_eq!(still_running(&format!("{own} 1")), None);
    }
}
