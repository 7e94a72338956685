//! Counts what passed and what failed, and ends a task with a summary whose last line tells both.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::command::{seconds, stopwatch};

/// The stages of one task, in the order they ran.
#[derive(Default)]
pub(crate) struct Tally {
    stages: Vec<Stage>,
}

/// What came of one test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All of it held.
    Passed,
    /// What could be tried held; the reason tells what could not.
    PassedInPart(String),
    /// Nothing could be tried, for the reason.
    Skipped(String),
    /// It did not hold.
    Failed,
}

/// What a program costs the verifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// The BPF program.
    pub(crate) program: String,
    /// How many instructions the verifier looked at.
    pub(crate) instructions: u32,
    /// How many it may.
    pub(crate) budget: u32,
}

/// What came of one stage: a program of tests, or a step that passes or fails as a whole.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Stage {
    /// How the summary calls it.
    pub(crate) name: String,
    /// How many tests passed, in whole or in part.
    pub(crate) passed: usize,
    /// Each failure, by name or reason; there are as many as failed.
    pub(crate) failures: Vec<String>,
    /// How long it took.
    pub(crate) took: Duration,
    /// Why nothing was tried, if so.
    pub(crate) skipped: Option<String>,
    /// The release of the kernel, where that decides what passes.
    pub(crate) kernel: Option<String>,
    /// Each test by name, as far as the output told.
    pub(crate) tests: Vec<(String, Outcome)>,
    /// What the kernel's verifier told.
    pub(crate) costs: Vec<Cost>,
}

impl Tally {
    /// Does `work`, which passes or fails as one test called `name`; later stages run in any case.
    pub(crate) fn step(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> bool {
        println!("\n=== {name}");
        let elapsed = stopwatch();
        let outcome = work();
        let mut stage = Stage { name: name.to_owned(), took: elapsed(), ..Stage::default() };
        match outcome {
            Ok(()) => stage.passed = 1,
            Err(error) => {
                println!("xtask: {error:#}");
                stage.failures.push(format!("{error:#}"));
            }
        }
        let passed = stage.failures.is_empty();
        self.stages.push(stage);
        passed
    }

    /// Notes that `name` was not tried.
    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        self.stages.push(Stage {
            name: name.to_owned(),
            skipped: Some(reason.to_owned()),
            ..Stage::default()
        });
    }

    /// Adds a stage that counted its own tests.
    pub(crate) fn add(&mut self, stage: Stage) {
        self.stages.push(stage);
    }

    /// Prints the summary; the exit code fails if anything did, or if nothing was tried.
    pub(crate) fn finish(&self) -> ExitCode {
        println!("\n=== summary");
        for stage in &self.stages {
            match &stage.skipped {
                Some(reason) => println!("{:<36} skipped: {reason}", stage.name),
                // A crate without tests of its own.
                None if stage.passed == 0 && stage.failures.is_empty() => {}
                None => println!(
                    "{:<36} {} passed, {} failed ({})",
                    stage.name,
                    stage.passed,
                    stage.failures.len(),
                    seconds(stage.took)
                ),
            }
        }
        for stage in &self.stages {
            for (reason, tests) in stage.skips() {
                println!("skipped {}: {tests}: {reason}", stage.name);
            }
        }
        for stage in &self.stages {
            for failure in &stage.failures {
                println!("FAILED {}: {failure}", stage.name);
            }
        }
        let (passed, failed) = self.totals();
        println!("{passed} passed, {failed} failed");
        if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// The stages so far.
    pub(crate) fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// How many passed, and how many failed.
    pub(crate) fn totals(&self) -> (usize, usize) {
        let passed = self.stages.iter().map(|stage| stage.passed).sum();
        let failed = self.stages.iter().map(|stage| stage.failures.len()).sum();
        (passed, failed)
    }
}

impl Stage {
    /// Each reason for which tests were skipped, with what it concerns.
    fn skips(&self) -> BTreeMap<&str, String> {
        let mut skips: BTreeMap<&str, (Vec<&str>, usize)> = BTreeMap::new();
        for (test, outcome) in &self.tests {
            match outcome {
                Outcome::Skipped(reason) => skips.entry(reason).or_default().0.push(test),
                Outcome::PassedInPart(reason) => skips.entry(reason).or_default().1 += 1,
                Outcome::Passed | Outcome::Failed => {}
            }
        }
        let told = |(whole, parts): (Vec<&str>, usize)| {
            let parts = (parts > 0).then(|| format!("part of {parts} tests"));
            whole.into_iter().map(str::to_owned).chain(parts).collect::<Vec<_>>().join(", ")
        };
        skips.into_iter().map(|(reason, tests)| (reason, told(tests))).collect()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn steps_and_tests_count_alike() {
        let mut tally = Tally::default();
        assert!(tally.step("good", || Ok(())));
        assert!(!tally.step("bad", || bail!("reason")));
        tally.skip("absent", "not installed");
        tally.add(Stage {
            name: "e2e".into(),
            passed: 5,
            failures: vec!["one".into()],
            ..Stage::default()
        });
        assert_eq!(tally.totals(), (6, 2));
    }

    #[test]
    fn skips_are_told_once_for_each_reason() {
        let stage = Stage {
            tests: vec![
                ("a".into(), Outcome::Passed),
                ("b".into(), Outcome::Skipped("no root".into())),
                ("c".into(), Outcome::PassedInPart("old kernel".into())),
                ("d".into(), Outcome::PassedInPart("old kernel".into())),
            ],
            ..Stage::default()
        };
        let want = [("no root", "b".to_owned()), ("old kernel", "part of 2 tests".to_owned())];
        assert_eq!(stage.skips(), BTreeMap::from(want));
    }

    #[test]
    fn nothing_tried_is_a_failure() {
        assert_eq!(format!("{:?}", Tally::default().finish()), format!("{:?}", ExitCode::FAILURE));
    }
}
