//! Runs tests on older and newer kernels than this machine's: Debian's packages, booted under an emulated CPU.
//!
//! Nothing is installed, and no KVM is needed. Kernels and images stay in `target/vm`, one folder each; removing a
//! folder fetches its kernel anew.

mod cpio;
mod fetch;
mod guest;
mod image;
mod modules;
mod sources;

use std::collections::VecDeque;
use std::fs;
use std::iter;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::command::quoted;
use crate::tally::Stage;
use crate::workspace;

/// A kernel to run tests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// This machine's.
    Native,
    /// The oldest that is supported.
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12's.
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13's.
    #[value(name = "6.12")]
    V6_12,
    /// The newest that Debian has; asked for at each run.
    Newest,
    /// All of these.
    All,
}

impl Kernel {
    /// Every kernel but this machine's.
    pub(crate) const GUESTS: [Self; 4] = [Self::V5_10, Self::V6_1, Self::V6_12, Self::Newest];

    /// As the command line and the summary call it.
    fn name(self) -> &'static str {
        self.series().unwrap_or("newest")
    }

    /// How its release starts; `None` is any.
    fn series(self) -> Option<&'static str> {
        match self {
            Self::V5_10 => Some("5.10"),
            Self::V6_1 => Some("6.1"),
            Self::V6_12 => Some("6.12"),
            Self::Newest | Self::Native | Self::All => None,
        }
    }

    /// How many tests run at once. 5.10 tells pods apart by their addresses, which every test's network has alike.
    fn tests_at_once(self) -> usize {
        if self == Self::V5_10 { 1 } else { 2 }
    }

    /// Debian's suites that have it, those with short lists first.
    fn suites(self) -> &'static [&'static str] {
        match self {
            Self::V5_10 => &["bullseye-security", "bullseye"],
            Self::V6_1 => &["bookworm-security", "bookworm"],
            Self::V6_12 => &["trixie-security", "trixie"],
            Self::Newest | Self::Native | Self::All => &["sid"],
        }
    }
}

/// A test program, and which of its tests to run in a guest.
pub(crate) struct Suite<'a> {
    /// How summaries call it; the file's name in the guest is its last word.
    pub(crate) name: &'a str,
    /// The program.
    pub(crate) program: &'a Path,
    /// The folder it runs in.
    pub(crate) folder: &'a Path,
    /// The tests.
    pub(crate) tests: Tests<'a>,
}

/// Which tests of a program to run.
#[derive(Clone, Copy)]
pub(crate) enum Tests<'a> {
    /// All.
    All,
    /// Those that have this in their names.
    Like(&'a str),
    /// These, by their full names.
    Named(&'a [&'a str]),
}

/// How many guests run at once: each has one CPU and waits much, so that three on two cores still save a quarter.
const AT_ONCE: usize = 3;

/// How much longer than on a machine a wait may take in an emulated one.
const PATIENCE: &str = "4";

/// What a test may not skip for want of in a guest, which has no tools of third parties.
const REQUIRED: &str = "bpf,netns";

/// Runs `suites` on each of `kernels`; what cannot be fetched, built or booted is a failure.
pub(crate) fn run(
    kernels: &[Kernel],
    suites: &[Suite<'_>],
    culvert: &Path,
    limit: Duration,
) -> Vec<Stage> {
    let queue = Mutex::new(kernels.iter().copied().enumerate().collect::<VecDeque<_>>());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(kernels.len()) {
            scope.spawn(|| {
                while let Some((place, kernel)) = next() {
                    let stages = run_one(kernel, suites, culvert, limit).unwrap_or_else(|error| {
                        println!("[{}] {error:#}", kernel.name());
                        vec![Stage {
                            name: format!("Linux {}", kernel.name()),
                            failures: vec![format!("{error:#}")],
                            ..Stage::default()
                        }]
                    });
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((place, stages));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(place, _)| *place);
    done.into_iter().flat_map(|(_, stages)| stages).collect()
}

fn run_one(
    kernel: Kernel,
    suites: &[Suite<'_>],
    culvert: &Path,
    limit: Duration,
) -> Result<Vec<Stage>> {
    ensure!(cfg!(target_arch = "x86_64"), "other kernels are booted on x86_64 only");
    let folder = workspace::target().join("vm").join(kernel.name());
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let unpacked = fetch::fetch(kernel, &folder)?;
    let mut programs: Vec<(&str, &Path)> =
        suites.iter().map(|suite| (file_name(suite), suite.program)).collect();
    programs.push(("culvert", culvert));
    let file = folder.join("image");
    image::build(&file, &unpacked, &programs, &script(suites, kernel.tests_at_once()))?;
    println!("[{}] booting Linux {}", kernel.name(), unpacked.release);
    let names: Vec<_> = suites.iter().map(|suite| suite.name).collect();
    Ok(guest::run(kernel.name(), &unpacked, &file, &names, limit))
}

/// A file's name for the program: "e2e" of "culvert-tests, test e2e".
fn file_name<'a>(suite: &Suite<'a>) -> &'a str {
    suite.name.rsplit(' ').next().unwrap_or(suite.name)
}

/// The shell commands that run `suites`, each between two lines that tell so.
fn script(suites: &[Suite<'_>], at_once: usize) -> String {
    let (programs, objects) = (image::PROGRAMS, image::OBJECTS);
    let settings = format!(
        "export CULVERT_REQUIRE={REQUIRED} CULVERT_PATIENCE={PATIENCE}\n\
         export CULVERT_BPF_DIR={objects} CULVERT_BIN={programs}/culvert\n"
    );
    let run = |suite: &Suite<'_>| {
        let tests = match suite.tests {
            Tests::All => String::new(),
            Tests::Like(part) => format!(" {}", quoted(part.as_ref())),
            Tests::Named(names) => format!(" --exact {}", names.join(" ")),
        };
        format!(
            "echo {begin}\nmkdir -p {folder}\ncd {folder}\n\
             {programs}/{program} --show-output --test-threads {at_once}{tests}\n\
             echo {end}$?\n",
            begin = quoted(format!("{}{}", guest::BEGIN, suite.name).as_ref()),
            folder = quoted(suite.folder.as_os_str()),
            program = file_name(suite),
            end = quoted(guest::END.as_ref()),
        )
    };
    iter::once(settings).chain(suites.iter().map(run)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_runs_each_program_between_two_lines() {
        let suite = |name, tests| Suite {
            name,
            program: Path::new("/build/deps/any-1"),
            folder: Path::new("/a b"),
            tests,
        };
        let script = script(
            &[
                suite("culvert-tests, test kernel", Tests::All),
                suite("culvert-tests, test e2e", Tests::Named(&["a::b", "c"])),
            ],
            2,
        );
        let kernel = "echo 'guest: begin culvert-tests, test kernel'\nmkdir -p '/a b'\ncd '/a b'\n\
            /programs/kernel --show-output --test-threads 2\necho 'guest: end '$?\n";
        assert!(script.contains(kernel), "{script}");
        assert!(script.contains("/programs/e2e --show-output --test-threads 2 --exact a::b c\n"));
    }

    #[test]
    fn every_guest_is_called_what_the_command_line_calls_it() {
        for kernel in Kernel::GUESTS {
            let value = kernel.to_possible_value().unwrap();
            assert_eq!(value.get_name(), kernel.name());
        }
    }
}
