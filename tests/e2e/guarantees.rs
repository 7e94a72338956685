//! `docs/STEERING.md` and the tests agree: it names none that is not there, and leaves none of steering out.

use std::{collections::BTreeSet, fs, path::Path};

/// The modules whose scenarios are about steering and nothing else.
const STEERING: [&str; 10] = [
    "addresses",
    "enrolment",
    "handover",
    "hostile",
    "links",
    "neighbours",
    "settings",
    "survival",
    "tcp_traps",
    "virtuals",
];

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The rows of the document's tables, each with the tests that it names.
fn rows(document: &str) -> Vec<(&str, BTreeSet<&str>)> {
    let rows =
        document.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| shown by |"));
    rows.map(|row| {
        let named = row.split('`').skip(1).step_by(2).filter(|name| name.contains("::"));
        (row, named.collect())
    })
    .collect()
}

/// The tests of a module, as the document spells them; `None` where there is no such module.
fn tests(module: &str) -> Option<BTreeSet<String>> {
    let path = match module.split_once('/') {
        Some(("kernel", module)) => format!("kernel/{module}.rs"),
        _ => format!("e2e/{module}.rs"),
    };
    let source = fs::read_to_string(Path::new(ROOT).join(path)).ok()?;
    let bodies = source.split("#[test]\nfn ").skip(1);
    Some(
        bodies.filter_map(|body| Some(format!("{module}::{}", body.split_once("()")?.0))).collect(),
    )
}

fn document() -> String {
    fs::read_to_string(Path::new(ROOT).join("../docs/STEERING.md")).unwrap()
}

#[test]
fn every_promise_is_shown_by_tests_that_exist_or_says_what_is_missing() {
    let document = document();
    let rows = rows(&document);
    assert!(rows.len() > 30, "only {} rows were understood", rows.len());
    for (row, named) in rows {
        assert!(!named.is_empty() || row.contains("| not yet: "), "nothing shows this: {row}");
        for name in named {
            let module = name.split("::").next().unwrap_or_default();
            let there = tests(module).is_some_and(|tests| tests.contains(name));
            assert!(there, "there is no test `{name}`, named in: {row}");
        }
    }
}

#[test]
fn every_scenario_about_steering_shows_a_promise() {
    let document = document();
    let named: BTreeSet<&str> = rows(&document).into_iter().flat_map(|(_, named)| named).collect();
    for module in STEERING {
        for test in tests(module).unwrap_or_else(|| panic!("there is no module {module}")) {
            assert!(named.contains(test.as_str()), "docs/STEERING.md does not name `{test}`");
        }
    }
}
