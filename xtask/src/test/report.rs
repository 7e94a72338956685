//! Writes `docs/TESTED.md`: which test held on which kernel, and what the programs cost each kernel's verifier.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter;
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result};

use super::promises;
use crate::tally::{Cost, Outcome, Stage};
use crate::{command, workspace};

/// What was tested, and where.
struct Setting {
    commit: String,
    date: String,
    cpu: String,
    cores: usize,
    kernel: String,
}

/// The release of this machine's kernel.
pub(super) fn own_kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Writes the report about `stages`, with `(passed, failed)` over all of them.
pub(super) fn write(stages: &[Stage], totals: (usize, usize)) -> Result<()> {
    let file = workspace::root().join("docs/TESTED.md");
    let text = text(&setting()?, &promises::document()?, stages, totals);
    fs::write(&file, text).with_context(|| format!("write {}", file.display()))
}

fn setting() -> Result<Setting> {
    let git = |args: &[&str]| {
        command::read(Command::new("git").args(args).current_dir(workspace::root()))
    };
    let mut commit = git(&["rev-parse", "HEAD"])?.trim().to_owned();
    if !git(&["status", "--porcelain", "--", ".", ":!docs/TESTED.md"])?.is_empty() {
        commit += ", with changes that are not committed";
    }
    let cpu = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    Ok(Setting {
        commit,
        date: command::read(Command::new("date").args(["-u", "+%F"]))?.trim().to_owned(),
        cpu: cpu.map_or("unknown CPU", |(_, name)| name).to_owned(),
        cores: thread::available_parallelism().map_or(1, usize::from),
        kernel: own_kernel(),
    })
}

fn text(
    setting: &Setting,
    steering: &str,
    stages: &[Stage],
    (passed, failed): (usize, usize),
) -> String {
    let mut kernels: Vec<&str> = Vec::new();
    for kernel in stages.iter().filter_map(|stage| stage.kernel.as_deref()) {
        if !kernels.contains(&kernel) {
            kernels.push(kernel);
        }
    }
    kernels.sort_by_key(|kernel| version(kernel));
    let mut text = format!(
        "# Tested\n\n\
         Written by `cargo xtask test --full`; not edited by hand.\n\n\
         | | |\n|---|---|\n\
         | commit | {} |\n| date | {} |\n| machine | {}, {} cores |\n| its kernel | {} |\n\
         | tests | {passed} passed, {failed} failed |\n\n",
        setting.commit, setting.date, setting.cpu, setting.cores, setting.kernel
    );
    text += "Kernels other than the machine's own are Debian's, under QEMU without KVM.\n\n";
    text += "## What steering promises\n\n\
        The rows are those of [STEERING.md](STEERING.md). A promise is kept on a kernel if every test that it names held there.\n\n";
    text += &promises::tables(steering, &kernels, stages);
    text += "\n";
    for (name, outcomes) in by_program(stages) {
        text += &outcome_table(&name, &kernels, &outcomes);
    }
    text += &reasons(stages);
    text += &cost_table(&kernels, stages);
    let failures: Vec<_> = stages
        .iter()
        .flat_map(|stage| stage.failures.iter().map(|what| (stage.name.as_str(), what)))
        .collect();
    if !failures.is_empty() {
        text += "## Failures\n\n";
        text.extend(
            failures
                .iter()
                .map(|(stage, what)| format!("- {stage}: {}\n", what.replace('\n', " "))),
        );
    }
    text
}

/// Outcomes by test and kernel.
type Outcomes<'a> = BTreeMap<&'a str, BTreeMap<&'a str, &'a Outcome>>;

/// The outcomes of each program that ran on some kernel.
fn by_program(stages: &[Stage]) -> BTreeMap<String, Outcomes<'_>> {
    let mut programs: BTreeMap<String, Outcomes<'_>> = BTreeMap::new();
    for stage in stages {
        let Some(kernel) = &stage.kernel else { continue };
        let program = stage.name.rsplit(": ").next().unwrap_or_default().to_owned();
        let outcomes = programs.entry(program).or_default();
        for (test, outcome) in &stage.tests {
            outcomes.entry(test).or_default().insert(kernel, outcome);
        }
    }
    programs
}

fn outcome_table(name: &str, kernels: &[&str], outcomes: &Outcomes<'_>) -> String {
    let mut table = format!("## {name}\n\n");
    table += &head("test", kernels);
    for (test, by_kernel) in outcomes {
        let cells = kernels.iter().map(|kernel| {
            let (_, word) = rank(by_kernel.get(kernel).copied());
            word.to_owned()
        });
        table += &row(&test.replace('_', " ").replace("::", ": "), cells);
    }
    table + "\n"
}

/// How bad an outcome is, and its word.
pub(super) fn rank(outcome: Option<&Outcome>) -> (u8, &'static str) {
    match outcome {
        Some(Outcome::Passed) => (0, "pass"),
        Some(Outcome::PassedInPart(_)) => (1, "pass in part"),
        Some(Outcome::Skipped(_)) => (2, "skip"),
        None => (3, ""),
        Some(Outcome::Failed) => (4, "**FAIL**"),
    }
}

/// Why something was left out, once for each reason and kernel.
fn reasons(stages: &[Stage]) -> String {
    let mut reasons: BTreeSet<(&str, &str)> = BTreeSet::new();
    for stage in stages {
        for (_, outcome) in &stage.tests {
            if let Outcome::Skipped(reason) | Outcome::PassedInPart(reason) = outcome {
                reasons.insert((stage.kernel.as_deref().unwrap_or("any kernel"), reason));
            }
        }
    }
    if reasons.is_empty() {
        return String::new();
    }
    let lines = reasons.iter().map(|(kernel, reason)| format!("- {kernel}: {reason}\n"));
    format!("## Left out\n\n{}\n", lines.collect::<String>())
}

fn cost_table(kernels: &[&str], stages: &[Stage]) -> String {
    let mut costs: BTreeMap<&str, BTreeMap<&str, &Cost>> = BTreeMap::new();
    for stage in stages {
        for cost in &stage.costs {
            let kernel = stage.kernel.as_deref().unwrap_or_default();
            costs.entry(&cost.program).or_default().insert(kernel, cost);
        }
    }
    if costs.is_empty() {
        return String::new();
    }
    let columns: Vec<_> = kernels.iter().copied().chain(["budget"]).collect();
    let mut table = "## Instructions that the verifier looks at\n\n\
        A kernel before 5.16 does not tell.\n\n"
        .to_owned();
    table += &head("program", &columns);
    for (program, by_kernel) in costs {
        let budget = by_kernel.values().next().map_or(0, |cost| cost.budget);
        let cells = kernels
            .iter()
            .map(|kernel| {
                by_kernel.get(kernel).map_or_else(String::new, |cost| cost.instructions.to_string())
            })
            .chain([budget.to_string()]);
        table += &row(&format!("`{program}`"), cells);
    }
    table + "\n"
}

pub(super) fn head(first: &str, columns: &[&str]) -> String {
    row(first, columns.iter().map(|&column| column.to_owned()))
        + &row("---", columns.iter().map(|_| "---".to_owned()))
}

pub(super) fn row(first: &str, cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<_> = iter::once(first.to_owned()).chain(cells).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// The numbers in a release, so that 6.12 comes after 6.1.
fn version(release: &str) -> Vec<u32> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str, kernel: Option<&str>, tests: &[(&str, Outcome)]) -> Stage {
        Stage {
            name: name.into(),
            kernel: kernel.map(str::to_owned),
            tests: tests
                .iter()
                .map(|(test, outcome)| ((*test).to_owned(), outcome.clone()))
                .collect(),
            ..Stage::default()
        }
    }

    #[test]
    fn a_test_has_a_row_and_a_kernel_a_column() {
        let old = Outcome::PassedInPart("too old".into());
        let mut native = stage("kernel", Some("6.18.0"), &[("a::it_holds", Outcome::Passed)]);
        native.costs = vec![Cost { program: "guard".into(), instructions: 719, budget: 1400 }];
        let stages = [
            stage("unit", None, &[("not_told", Outcome::Passed)]),
            native,
            stage("Linux 6.1: kernel", Some("6.1.0"), &[("a::it_holds", Outcome::Failed)]),
            stage("Linux 5.10: kernel", Some("5.10.0"), &[("a::it_holds", old)]),
        ];
        let setting = Setting {
            commit: "abc".into(),
            date: "2026-01-02".into(),
            cpu: "some CPU".into(),
            cores: 2,
            kernel: "6.18.0".into(),
        };
        let text = text(&setting, "", &stages, (2, 1));
        for part in [
            "| machine | some CPU, 2 cores |\n",
            "| tests | 2 passed, 1 failed |\n",
            "## kernel\n\n| test | 5.10.0 | 6.1.0 | 6.18.0 |\n| --- | --- | --- | --- |\n\
             | a: it holds | pass in part | **FAIL** | pass |\n",
            "- 5.10.0: too old\n",
            "| `guard` |  |  | 719 | 1400 |\n",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
        assert!(!text.contains("not told"));
    }
}
