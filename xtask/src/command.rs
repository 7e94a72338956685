//! Running other programs: what runs is printed, how long it takes is shown, and a failure names the command line.

#![expect(
    clippy::disallowed_types,
    reason = "elapsed wall time of child processes; no runtime here to pause"
)]

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, bail};

use crate::workspace;

/// How often a step that is still running says so.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// A step shorter than this is not worth a line about its duration.
const WORTH_TELLING: Duration = Duration::from_secs(2);

/// How long output may still arrive after its program ended; a process it left behind can hold the pipe for ever.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// `cargo SUBCOMMAND` in the workspace, without what `cargo run` set for this process.
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut command = Command::new("cargo");
    command.arg(subcommand).current_dir(workspace::root());
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        }) {
            command.env_remove(name);
        }
    }
    command
}

/// `program` with root's rights: directly, or through `sudo` with the variables of `set`.
pub(crate) fn as_root(program: impl AsRef<OsStr>, set: &[(&str, &OsStr)]) -> Result<Command> {
    if is_root() {
        let mut command = Command::new(program);
        command.envs(set.iter().copied());
        return Ok(command);
    }
    if find("sudo").is_none() {
        bail!("{} needs root, and there is no sudo", program.as_ref().display());
    }
    let mut command = Command::new("sudo");
    command.arg("env");
    for (name, value) in set {
        let mut pair = OsStr::new(name).to_owned();
        pair.push("=");
        pair.push(value);
        command.arg(pair);
    }
    command.arg(program);
    Ok(command)
}

/// Does this process run as root?
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Where `program` is on `PATH`.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    // Debian's root tools are outside a plain user's PATH.
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Runs `command` to its end with our output as its own; fails unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = announce(command);
    let mut child = spawn(command, &line)?;
    let started = Instant::now();
    let (ended, waiting) = mpsc::channel::<()>();
    let status = thread::scope(|scope| {
        let line = &line;
        scope.spawn(move || {
            while waiting.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                still_running(line, started);
            }
        });
        let status = child.wait();
        drop(ended);
        status
    });
    tell_duration(started);
    check(status.with_context(|| format!("wait for `{line}`"))?, &line)
}

/// The standard output of `command`, which is a question too quick to announce; fails unless it succeeds.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let output = read_bytes(command)?;
    String::from_utf8(output).with_context(|| format!("the output of `{}`", shown(command)))
}

/// Like [`read`], for what is not text.
pub(crate) fn read_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let line = shown(command);
    let output = command
        .stderr(Stdio::inherit())
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start `{line}`"))?;
    check(output.status, &line)?;
    Ok(output.stdout)
}

/// The standard output of `command` when it can be run and succeeds: a probe, so whatever it complains of is dropped.
pub(crate) fn probe(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs `command`, hands each line of its output to `on_line`, and kills it once it has run for `limit`.
///
/// `None` when it had to be killed.
pub(crate) fn follow(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<Option<ExitStatus>> {
    let line = announce(command);
    let mut child = spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()), &line)?;
    let started = Instant::now();
    let mut said = Instant::now();
    let (sender, lines) = mpsc::channel();
    forward(child.stdout.take(), sender.clone());
    forward(child.stderr.take(), sender);
    let status = loop {
        let open = match lines.recv_timeout(Duration::from_secs(1)) {
            Ok(text) => {
                said = Instant::now();
                on_line(&text);
                true
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        };
        let ended = if open { child.try_wait() } else { child.wait().map(Some) };
        if let Some(status) = ended.with_context(|| format!("wait for `{line}`"))? {
            break Some(status);
        }
        if started.elapsed() > limit {
            println!("killed after {}: {line}", seconds(limit));
            child.kill().with_context(|| format!("kill `{line}`"))?;
            child.wait().with_context(|| format!("wait for `{line}`"))?;
            break None;
        }
        if said.elapsed() > HEARTBEAT {
            said = Instant::now();
            still_running(&line, started);
        }
    };
    let last = Instant::now();
    while last.elapsed() < LAST_WORDS
        && let Ok(text) = lines.recv_timeout(LAST_WORDS)
    {
        on_line(&text);
    }
    tell_duration(started);
    Ok(status)
}

/// Prints `command` as it is about to run, and returns what was printed.
pub(crate) fn announce(command: &Command) -> String {
    let line = shown(command);
    println!("$ {line}");
    line
}

/// `command` as one could type it: folder, variables, program, arguments.
fn shown(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value
            && name != "PATH"
        {
            words.push(format!("{}={}", name.display(), quoted(value)));
        }
    }
    words.push(quoted(command.get_program()));
    words.extend(command.get_args().map(quoted));
    match command.get_current_dir() {
        Some(folder) if folder != workspace::root() => {
            format!("cd {} && {}", folder.display(), words.join(" "))
        }
        _ => words.join(" "),
    }
}

/// `word` for a shell.
pub(crate) fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    if word.contains('\x1f') {
        format!("$'{}'", word.replace('\x1f', "\\x1f"))
    } else if word.is_empty()
        || word.contains(|c: char| c.is_whitespace() || "\"'$&|;<>(){}*?".contains(c))
    {
        format!("'{word}'")
    } else {
        word.into_owned()
    }
}

fn spawn(command: &mut Command, line: &str) -> Result<Child> {
    command.stdin(Stdio::null()).spawn().with_context(|| format!("start `{line}`"))
}

fn check(status: ExitStatus, line: &str) -> Result<()> {
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Sends each line of `source` until it ends or nobody listens any more.
fn forward(source: Option<impl Read + Send + 'static>, lines: mpsc::Sender<String>) {
    let Some(source) = source else { return };
    thread::spawn(move || {
        for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
            if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
}

fn still_running(line: &str, started: Instant) {
    println!(
        "... {} so far: {}",
        seconds(started.elapsed()),
        line.chars().take(100).collect::<String>()
    );
}

fn tell_duration(started: Instant) {
    let elapsed = started.elapsed();
    if elapsed > WORTH_TELLING {
        println!("  took {}", seconds(elapsed));
    }
}

/// `elapsed` for people.
pub(crate) fn seconds(elapsed: Duration) -> String {
    format!("{:.1} s", elapsed.as_secs_f64())
}

/// A clock that starts now, for the summary of a stage.
pub(crate) fn stopwatch() -> impl Fn() -> Duration {
    let started = Instant::now();
    move || started.elapsed()
}

/// The folder where cargo installs programs.
pub(crate) fn cargo_bin() -> PathBuf {
    cargo_home().join("bin")
}

/// `CARGO_HOME`, or its default.
pub(crate) fn cargo_home() -> PathBuf {
    env::var_os("CARGO_HOME").map_or_else(
        || env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from).join(".cargo"),
        PathBuf::from,
    )
}

/// `PATH` with `folder` before all others.
pub(crate) fn path_with(folder: &Path) -> std::ffi::OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths([folder.to_owned()].into_iter().chain(env::split_paths(&path))).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let mut command = Command::new("cargo");
        command
            .args(["build", "two words"])
            .env("FLAGS", "-a\x1f-b")
            .env("PATH", "/long")
            .env_remove("GONE");
        assert_eq!(shown(&command), r"FLAGS=$'-a\x1f-b' cargo build 'two words'");
    }

    #[test]
    fn output_of_both_streams_is_followed_to_the_end() {
        let mut seen = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let status =
            follow(&mut command, Duration::from_secs(20), |line| seen.push(line.to_owned()))
                .unwrap();
        seen.sort();
        assert_eq!(
            (status.and_then(|status| status.code()), seen),
            (Some(3), vec!["err".into(), "out".into()])
        );
    }

    #[test]
    fn a_program_past_its_limit_is_killed() {
        let mut command = Command::new("sleep");
        command.arg("60");
        assert_eq!(follow(&mut command, Duration::ZERO, |_| ()).unwrap(), None);
    }

    #[test]
    fn a_pipe_that_a_left_behind_process_holds_does_not_delay_the_end() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 6 & echo done"]);
        let elapsed = stopwatch();
        assert!(follow(&mut command, Duration::from_mins(1), |_| ()).unwrap().is_some());
        assert!(elapsed() < Duration::from_secs(5), "took {}", seconds(elapsed()));
    }
}
