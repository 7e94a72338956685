//! Reads what Rust's test programs print: which tests failed, and how many passed.

use std::process::ExitStatus;
use std::time::Duration;

use anyhow::Result;

use crate::tally::{Cost, Outcome, Stage};

/// How many lines of a failed test's own words the summary repeats; its panic comes last.
const LAST_WORDS: usize = 12;

/// What a program's output has told so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    passed: usize,
    failed: usize,
    tests: Vec<(String, Outcome)>,
    costs: Vec<Cost>,
    /// Tests that have no result yet, as far as the output shows.
    slow: Vec<String>,
    /// The test whose own words follow, under `--show-output`.
    speaker: Option<String>,
    /// What failed tests said last, with their names.
    said: Vec<(String, Vec<String>)>,
    results: usize,
}

impl Counts {
    /// Takes notice of one line.
    pub(crate) fn read(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            self.results += 1;
            self.passed += count_of(result, "passed");
            self.failed += count_of(result, "failed");
            self.speaker = None;
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some((name, outcome)) = test.rsplit_once(" ... ") {
                self.slow.retain(|slow| slow != name);
                match outcome {
                    "ok" => self.tests.push((name.to_owned(), Outcome::Passed)),
                    _ if outcome.starts_with("FAILED") => {
                        self.tests.push((name.to_owned(), Outcome::Failed));
                    }
                    // The last words of a program that ran its tests one by one.
                    "" => self.slow.push(name.to_owned()),
                    _ => {}
                }
            } else if let Some((name, _)) = test.split_once(" has been running for over ") {
                self.slow.push(name.to_owned());
            }
        } else if let Some(name) = line.strip_prefix("---- ") {
            self.speaker = name.strip_suffix(" stdout ----").map(str::to_owned);
            self.said.extend(self.speaker.clone().map(|speaker| (speaker, Vec::new())));
        } else if line == "successes:" || line == "failures:" {
            self.speaker = None;
        } else if let Some(speaker) = &self.speaker {
            if let Some((_, words)) = self.said.last_mut()
                && !line.is_empty()
            {
                words.push(line.to_owned());
            }
            self.costs.extend(cost(line));
            let said = line
                .strip_prefix("skipped: ")
                .map(|reason| Outcome::Skipped(reason.to_owned()))
                .or_else(|| {
                    let reason = line.strip_prefix("skipped in part: ")?;
                    Some(Outcome::PassedInPart(reason.to_owned()))
                });
            if let Some(said) = said
                && let Some((_, outcome @ Outcome::Passed)) =
                    self.tests.iter_mut().find(|(name, _)| name == speaker)
            {
                *outcome = said;
            }
        }
    }

    /// The stage's line of the summary, given how the program `ended`: `None` is a program killed at its limit.
    pub(crate) fn into_stage(
        self,
        name: String,
        took: Duration,
        ended: Result<Option<ExitStatus>>,
    ) -> Stage {
        let named = |wanted: fn(&Outcome) -> bool| {
            self.tests.iter().filter(move |(_, outcome)| wanted(outcome)).map(|(name, _)| name)
        };
        let skipped = named(|outcome| matches!(outcome, Outcome::Skipped(_))).count();
        // A program that died has counted nothing.
        let passed = self.passed.max(named(|outcome| *outcome == Outcome::Passed).count());
        let mut failures: Vec<_> = named(|outcome| *outcome == Outcome::Failed)
            .map(|name| {
                let said = self.said.iter().filter(|(speaker, _)| speaker == name);
                let words: Vec<_> = said.flat_map(|(_, words)| words.as_slice()).collect();
                let last = words.len().saturating_sub(LAST_WORDS);
                words.iter().skip(last).fold(name.clone(), |text, word| text + "\n    " + word)
            })
            .collect();
        // Without names, as under `--quiet`, the number is still right.
        failures
            .extend((failures.len()..self.failed).map(|_| "a test that is named above".to_owned()));
        match ended {
            Err(error) => failures.push(format!("{error:#}")),
            Ok(None) if self.slow.is_empty() => failures.push("killed at its time limit".into()),
            Ok(None) => {
                failures.push(format!("killed at its time limit, in {}", self.slow.join(", ")));
            }
            Ok(Some(status)) if !status.success() && !self.slow.is_empty() => {
                failures
                    .push(format!("the program ended with {status}, in {}", self.slow.join(", ")));
            }
            Ok(Some(status)) if !status.success() && failures.is_empty() => {
                failures.push(format!("the program ended with {status}"));
            }
            Ok(Some(status)) if !status.success() && self.results == 0 => {
                failures.push(format!("the program ended with {status} before its summary"));
            }
            Ok(Some(_)) => {}
        }
        Stage {
            name,
            passed: passed.saturating_sub(skipped),
            failures,
            took,
            tests: self.tests,
            costs: self.costs,
            ..Stage::default()
        }
    }
}

/// `PROGRAM: COUNT of BUDGET instructions verified`
fn cost(line: &str) -> Option<Cost> {
    let (program, rest) = line.split_once(": ")?;
    let (instructions, budget) = rest.strip_suffix(" instructions verified")?.split_once(" of ")?;
    Some(Cost {
        program: program.to_owned(),
        instructions: instructions.parse().ok()?,
        budget: budget.parse().ok()?,
    })
}

/// The number before `word` in "ok. 3 passed; 0 failed; 1 ignored".
fn count_of(result: &str, word: &str) -> usize {
    let mut words = result.split([' ', ';']).filter(|part| !part.is_empty());
    let mut before = "";
    words
        .find_map(|part| {
            let number = before;
            before = part;
            (part == word).then(|| number.parse().ok()).flatten()
        })
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn stage(output: &str, ended: Option<i32>) -> (usize, Vec<String>) {
        let mut counts = Counts::default();
        output.lines().for_each(|line| counts.read(line));
        let stage =
            counts.into_stage(String::new(), Duration::ZERO, Ok(ended.map(ExitStatus::from_raw)));
        (stage.passed, stage.failures)
    }

    #[test]
    fn what_tests_say_of_themselves_is_understood() {
        let output = "test a ... ok\ntest b ... ok\ntest c ... ok\ntest d ... FAILED\n\nsuccesses:\n\n\
            ---- a stdout ----\nguard: 719 of 1400 instructions verified\n\n\
            ---- b stdout ----\nskipped: no root\n\n---- c stdout ----\nskipped in part: too old\n\n\
            successes:\n    a\n    b\n    c\n\nfailures:\n\n---- d stdout ----\nskipped in part: too old\n\n\
            failures:\n    d\n\ntest result: FAILED. 3 passed; 1 failed; 0 ignored";
        let mut counts = Counts::default();
        output.lines().for_each(|line| counts.read(line));
        let stage = counts.into_stage(String::new(), Duration::ZERO, Ok(None));
        assert_eq!(stage.passed, 2);
        assert_eq!(
            stage.costs,
            [Cost { program: "guard".into(), instructions: 719, budget: 1400 }]
        );
        assert_eq!(
            stage.tests,
            [
                ("a".into(), Outcome::Passed),
                ("b".into(), Outcome::Skipped("no root".into())),
                ("c".into(), Outcome::PassedInPart("too old".into())),
                ("d".into(), Outcome::Failed),
            ]
        );
    }

    #[test]
    fn passed_tests_are_counted_over_all_results() {
        let output = "test a ... ok\ntest result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out\n\
                      test result: ok. 3 passed; 0 failed; 0 ignored";
        assert_eq!(stage(output, Some(0)), (15, vec![]));
    }

    #[test]
    fn failed_tests_are_named() {
        let output = "test a::b ... FAILED\ntest c ... ok\ntest result: FAILED. 1 passed; 1 failed; 0 ignored";
        assert_eq!(stage(output, Some(101 << 8)), (1, vec!["a::b".into()]));
    }

    #[test]
    fn what_a_failed_test_said_last_is_repeated() {
        let lines: Vec<_> = (0..LAST_WORDS).map(|line| line.to_string()).collect();
        let said = lines.join("\n\n");
        let output = format!(
            "test a ... FAILED\n\nfailures:\n\n---- a stdout ----\nearly\n{said}\n\nfailures:\n    a\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored"
        );
        let want = format!("a\n    {}", lines.join("\n    "));
        assert_eq!(stage(&output, Some(101 << 8)).1, [want]);
    }

    #[test]
    fn failures_without_names_are_counted() {
        assert_eq!(
            stage("test result: FAILED. 0 passed; 2 failed; 0 ignored", Some(101 << 8)).1.len(),
            2
        );
    }

    #[test]
    fn a_program_that_dies_early_is_a_failure() {
        assert_eq!(stage("test a ... ok", Some(6)).1.len(), 1);
        assert_eq!(stage("test a ... FAILED", Some(6)).1.len(), 2);
        assert!(stage("test a ... ok\ntest b ... \npanicked", Some(6)).1[0].ends_with(", in b"));
    }

    #[test]
    fn a_program_killed_at_its_limit_tells_what_it_was_at() {
        let output = "test a has been running for over 60 seconds\ntest b has been running for over 60 seconds\ntest a ... ok";
        let want = vec!["killed at its time limit, in b".to_owned()];
        assert_eq!(stage(output, None).1, want);
        assert_eq!(stage("test a ... ok\ntest b ... ", None).1, want);
    }
}
