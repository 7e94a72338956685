//! What `docs/STEERING.md` promises, and on which kernels the tests that it names held.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};

use super::report::{head, rank, row};
use crate::tally::{Outcome, Stage};
use crate::workspace;

/// The document.
pub(super) fn document() -> Result<String> {
    let file = workspace::root().join("docs/STEERING.md");
    fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))
}

/// The scenarios of `tests/e2e` that the document names, each once.
pub(super) fn scenarios(document: &str) -> Vec<&str> {
    let named = document.lines().filter_map(promise).flat_map(|(_, tests)| tests);
    let mut scenarios: Vec<_> = named.filter(|test| !test.contains('/')).collect();
    scenarios.sort_unstable();
    scenarios.dedup();
    scenarios
}

/// A section for each of the document's own, with a row for each promise and a column for each kernel.
///
/// Promises whose tests ran nowhere have empty rows: that they were not shown is part of the report.
pub(super) fn tables(document: &str, kernels: &[&str], stages: &[Stage]) -> String {
    let outcomes = outcomes(stages);
    let mut text = String::new();
    let mut title = None;
    for line in document.lines() {
        if let Some(section) = line.strip_prefix("## ") {
            title = Some(section);
        } else if let Some((promise, tests)) = promise(line) {
            if let Some(title) = title.take() {
                text += if text.is_empty() { "### " } else { "\n### " };
                text += title;
                text += "\n\n";
                text += &head("promise", kernels);
            }
            let cells = kernels.iter().map(|kernel| {
                let shown = tests
                    .iter()
                    .map(|test| rank(outcomes.get(&((*test).to_owned(), *kernel)).copied()));
                // Together they say what the worst of them says.
                shown.max().map_or("", |(_, word)| word).to_owned()
            });
            text += &row(promise, cells);
        }
    }
    text
}

/// A row of the document that names tests.
fn promise(line: &str) -> Option<(&str, Vec<&str>)> {
    let (promise, shown_by) = line.strip_prefix("| ")?.rsplit_once(" | ")?;
    let named = shown_by.split('`').skip(1).step_by(2).filter(|name| name.contains("::"));
    let tests: Vec<_> = named.collect();
    (!tests.is_empty()).then_some((promise, tests))
}

/// Outcomes by test, as the document spells it, and kernel.
fn outcomes(stages: &[Stage]) -> BTreeMap<(String, &str), &Outcome> {
    let mut outcomes = BTreeMap::new();
    for stage in stages {
        let Some(kernel) = stage.kernel.as_deref() else { continue };
        for (test, outcome) in &stage.tests {
            let name = match stage.name.rsplit(' ').next() {
                Some("kernel") => format!("kernel/{test}"),
                Some("e2e") => test.clone(),
                _ => continue,
            };
            outcomes.insert((name, kernel), outcome);
        }
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_are_those_that_promises_name() {
        let document = "| All | `b::x`, `kernel/b::y`, `a::x` |\n| Some of it | `a::x` |\n";
        assert_eq!(scenarios(document), ["a::x", "b::x"]);
    }

    #[test]
    fn a_promise_is_kept_where_all_that_it_names_held() {
        let document = "## Out\n\n| promise | shown by |\n|---|---|\n\
            | All | `a::x`, `kernel/b::y` |\n| None | not yet: it is not there |\n\n\
            ## In\n\n| promise | shown by |\n|---|---|\n| One | `a::x` |\n";
        let stage = |name: &str, kernel: &str, tests: &[(&str, Outcome)]| Stage {
            name: name.into(),
            kernel: Some(kernel.into()),
            tests: tests.iter().map(|(test, outcome)| ((*test).into(), outcome.clone())).collect(),
            ..Stage::default()
        };
        let stages = [
            stage("culvert-tests, test e2e", "6.18", &[("a::x", Outcome::Passed)]),
            stage("culvert-tests, test kernel", "6.18", &[("b::y", Outcome::Passed)]),
            stage("Linux 5.10: culvert-tests, test e2e", "5.10", &[("a::x", Outcome::Passed)]),
            stage("Linux 5.10: culvert-tests, test kernel", "5.10", &[("b::y", Outcome::Failed)]),
            stage("Linux 6.1: culvert-tests, test e2e", "6.1", &[("a::x", Outcome::Passed)]),
        ];
        assert_eq!(
            tables(document, &["5.10", "6.1", "6.18"], &stages),
            "### Out\n\n| promise | 5.10 | 6.1 | 6.18 |\n| --- | --- | --- | --- |\n\
             | All | **FAIL** |  | pass |\n\n\
             ### In\n\n| promise | 5.10 | 6.1 | 6.18 |\n| --- | --- | --- | --- |\n\
             | One | pass | pass | pass |\n"
        );
    }
}
