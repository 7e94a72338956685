//! Rules for the files themselves, read without a compiler: module docs, licence lines, words that do not belong.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Folders that hold no sources, wherever they are.
const SKIPPED: [&str; 3] = [".git", "target", "node_modules"];

/// The licence line of everything under `ebpf/`: the kernel accepts programs with GPL-only helpers under it.
const EBPF_LICENCE: &str = "// SPDX-License-Identifier: GPL-2.0 OR MIT";

/// Words that tie a file to somebody's machine or network. Put together here, lest this file break its own rule.
const FORBIDDEN: [(&str, &str); 8] = [
    (concat!("/wo", "rk/"), "a path of one machine"),
    (concat!("/ro", "ot/"), "a path of one machine"),
    (concat!("deb.deb", "ian.org"), "a package registry's host"),
    (concat!("index.cra", "tes.io"), "a package registry's host"),
    (concat!("static.cra", "tes.io"), "a package registry's host"),
    (concat!("static.rust", "-lang.org"), "a package registry's host"),
    (concat!("py", "pi.org"), "a package registry's host"),
    (concat!("registry.np", "mjs.org"), "a package registry's host"),
];

/// Every broken rule under `root`, as `path:line: what`.
pub(super) fn problems(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    collect(root, &mut files)?;
    files.sort();
    let mut problems = Vec::new();
    for file in files {
        let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        // Objects and captures are not text.
        if let Ok(text) = String::from_utf8(bytes) {
            let path = file.strip_prefix(root).unwrap_or(&file).to_string_lossy();
            problems.extend(of_file(&path, &text));
        }
    }
    Ok(problems)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && !entry.file_name().to_str().is_some_and(|name| SKIPPED.contains(&name))
        {
            collect(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

fn of_file(path: &str, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    // Its contents are cargo's, and name where crates come from.
    if path == "Cargo.lock" {
        return problems;
    }
    for (number, line) in (1..).zip(text.lines()) {
        for (word, what) in FORBIDDEN {
            if line.contains(word) {
                problems.push(format!("{path}:{number}: {word} is {what}"));
            }
        }
        if bare_todo(line) {
            problems.push(format!("{path}:{number}: a to-do must say what is to be done"));
        }
    }
    if Path::new(path).extension().is_some_and(|extension| extension == "rs") {
        if path.starts_with("ebpf/") && text.lines().next() != Some(EBPF_LICENCE) {
            problems.push(format!("{path}:1: the first line must be `{EBPF_LICENCE}`"));
        }
        // `foo/tests.rs` tests `foo`, as its name says.
        if !path.ends_with("/tests.rs") && !has_module_doc(text) {
            problems.push(format!("{path}:1: no `//!` line tells what this module is for"));
        }
    }
    problems
}

/// Only comments and inner attributes may come before a module's doc.
fn has_module_doc(text: &str) -> bool {
    text.lines()
        .map(str::trim)
        .find(|line| {
            !line.is_empty()
                && (line.starts_with("//!") || !line.starts_with("//"))
                && !line.starts_with("#![")
        })
        .is_some_and(|line| line.starts_with("//!"))
}

/// A to-do with no sentence after it.
fn bare_todo(line: &str) -> bool {
    line.split_once(concat!("TO", "DO")).is_some_and(|(before, after)| {
        let is_word = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_')
            && !after.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        is_word && after.chars().filter(|c| c.is_alphabetic()).count() < 10
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, text: &str, want: usize) {
        let found = of_file(path, text);
        assert_eq!(found.len(), want, "{found:?}");
    }

    #[test]
    fn a_module_starts_with_its_doc() {
        check("proxy/src/a.rs", "//! What it does.\nfn a() {}\n", 0);
        check("proxy/src/a.rs", "#![no_std]\n\n//! What it does.\n", 0);
        check("proxy/src/a.rs", "fn a() {}\n//! Too late.\n", 1);
        check("proxy/src/a.rs", "/// Of the item.\nfn a() {}\n", 1);
        check("proxy/src/a.rs", "", 1);
        check("proxy/src/a/tests.rs", "use super::*;\n", 0);
    }

    #[test]
    fn programs_carry_their_licence() {
        check("ebpf/src/lib.rs", "// SPDX-License-Identifier: GPL-2.0 OR MIT\n//! Doc.\n", 0);
        check("ebpf/src/lib.rs", "//! Doc.\n", 1);
        check("ebpf/src/lib.rs", "// SPDX-License-Identifier: MIT\n//! Doc.\n", 1);
    }

    #[test]
    fn machines_and_hosts_are_not_named() {
        check("README.md", concat!("see /wo", "rk/x\n"), 1);
        check("README.md", concat!("see /wo", "rkloads\n"), 0);
        check("Cargo.lock", concat!("index.cra", "tes.io\n"), 0);
    }

    #[test]
    fn a_to_do_says_what() {
        check("a.md", concat!("TO", "DO\n"), 1);
        check("a.md", concat!("TO", "DO: x\n"), 1);
        check("a.md", concat!("TO", "DO: drop this once Linux 5.10 is out of support\n"), 0);
        check("a.md", concat!("AUTO", "DOC\n"), 0);
    }

    #[test]
    fn this_repository_is_read_without_error() {
        problems(crate::workspace::root()).unwrap();
    }
}
