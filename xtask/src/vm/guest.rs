//! Boots an image, and makes stages of what its tests print.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::fetch::Unpacked;
use crate::command::{self, stopwatch};
use crate::tally::Stage;
use crate::test::libtest::Counts;

/// How the line before a program's output starts; its name follows.
pub(super) const BEGIN: &str = "guest: begin ";
/// How the line after a program's output starts; its exit code follows.
pub(super) const END: &str = "guest: end ";

/// How long the guest's own switch waits longer than ours.
const GRACE: Duration = Duration::from_secs(20);

/// Without KVM, which is not everywhere. The CPU has CX16, without which Linux 7 allocates no socket storage from BPF.
const MACHINE: [&str; 20] = [
    "-accel",
    "tcg",
    "-cpu",
    "qemu64",
    "-smp",
    "1",
    "-m",
    "1024",
    "-nodefaults",
    "-no-reboot",
    "-display",
    "none",
    "-vga",
    "none",
    "-nic",
    "none",
    "-monitor",
    "none",
    "-parallel",
    "none",
];

/// Runs the image to its end, or for `limit`; a stage for each of `programs`.
pub(super) fn run(
    name: &str,
    kernel: &Unpacked,
    image: &Path,
    programs: &[&str],
    limit: Duration,
) -> Vec<Stage> {
    let console = image.with_file_name("console.log");
    let mut output = Output::new(name, &kernel.release);
    let mut guest = Command::new("qemu-system-x86_64");
    let mut file = OsString::from("file:");
    file.push(&console);
    guest
        .args(MACHINE)
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(image)
        .arg("-append")
        .arg(format!("console=ttyS0 quiet panic=-1 GUEST_LIMIT={}", (limit + GRACE).as_secs()))
        .arg("-serial")
        .arg(file)
        .args(["-serial", "stdio"]);
    let ended = command::follow(&mut guest, limit, |line| {
        let line = line.trim_end_matches('\r');
        println!("[{name}] {line}");
        output.read(line);
    });
    let stages = output.into_stages(programs, ended);
    if stages.iter().any(|stage| !stage.failures.is_empty()) {
        let log = fs::read(&console).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        println!("[{name}] last lines of {}:", console.display());
        for line in lines.iter().skip(lines.len().saturating_sub(20)) {
            println!("[{name}] {line}");
        }
    }
    stages
}

/// What a guest has printed so far.
struct Output {
    name: String,
    kernel: String,
    done: Vec<Stage>,
    current: Option<Running>,
}

/// The program that prints now.
struct Running {
    stage: String,
    counts: Counts,
    elapsed: Box<dyn Fn() -> Duration>,
}

impl Output {
    fn new(name: &str, kernel: &str) -> Self {
        let (name, kernel) = (name.to_owned(), kernel.to_owned());
        Self { name, kernel, done: Vec::new(), current: None }
    }

    fn read(&mut self, line: &str) {
        if let Some(program) = line.strip_prefix(BEGIN) {
            self.finish(Err(anyhow!("the next program began before this one ended")));
            let stage = self.stage_name(program);
            self.current =
                Some(Running { stage, counts: Counts::default(), elapsed: Box::new(stopwatch()) });
        } else if let Some(code) = line.strip_prefix(END) {
            let status = code.trim().parse().map(|code: i32| ExitStatus::from_raw(code << 8));
            self.finish(status.map(Some).map_err(Into::into));
        } else if let Some(running) = &mut self.current {
            running.counts.read(line);
        }
    }

    fn finish(&mut self, ended: Result<Option<ExitStatus>>) {
        if let Some(Running { stage, counts, elapsed }) = self.current.take() {
            let mut stage = counts.into_stage(stage, elapsed(), ended);
            stage.kernel = Some(self.kernel.clone());
            self.done.push(stage);
        }
    }

    /// Given how the emulator `ended`; each of `programs` has a stage, whether it ran or not.
    fn into_stages(mut self, programs: &[&str], ended: Result<Option<ExitStatus>>) -> Vec<Stage> {
        let trouble = match &ended {
            Ok(Some(status)) if status.success() => "the guest switched itself off".to_owned(),
            Ok(Some(status)) => format!("the emulator ended with {status}"),
            Ok(None) => "the guest was killed at its time limit".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        self.finish(match ended {
            Ok(None) => Ok(None),
            _ => Err(anyhow!("{trouble} before its end")),
        });
        for program in programs {
            let name = self.stage_name(program);
            if !self.done.iter().any(|stage| stage.name == name) {
                let failures = vec![format!("did not run: {trouble}")];
                self.done.push(Stage { name, failures, ..Stage::default() });
            }
        }
        self.done
    }

    fn stage_name(&self, program: &str) -> String {
        format!("Linux {}: {program}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(text: &str, ended: Option<i32>) -> Vec<(String, usize, Vec<String>)> {
        let mut output = Output::new("6.1", "6.1.0-57-cloud-amd64");
        text.lines().for_each(|line| output.read(line));
        output
            .into_stages(&["kernel", "e2e"], Ok(ended.map(ExitStatus::from_raw)))
            .into_iter()
            .map(|stage| (stage.name, stage.passed, stage.failures))
            .collect()
    }

    #[test]
    fn each_program_is_a_stage_of_the_kernel() {
        let text = "guest: begin kernel\ntest a ... ok\ntest result: ok. 1 passed; 0 failed;\n\
            guest: end 0\nguest: begin e2e\ntest b ... FAILED\n\
            test result: FAILED. 0 passed; 1 failed;\nguest: end 101\n";
        assert_eq!(
            stages(text, Some(0)),
            [
                ("Linux 6.1: kernel".into(), 1, vec![]),
                ("Linux 6.1: e2e".into(), 0, vec!["b".into()])
            ]
        );
    }

    #[test]
    fn a_guest_that_stops_in_a_program_fails_in_it_and_in_those_that_did_not_run() {
        for ended in [None, Some(0)] {
            let stages = stages("guest: begin kernel\ntest a ... ok\n", ended);
            let failures: Vec<_> = stages.iter().map(|(_, _, failures)| failures.len()).collect();
            assert_eq!(failures, [1, 1], "{ended:?}");
        }
    }
}
