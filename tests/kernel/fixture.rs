//! Reads the text fixtures of `bpf-fixtures`; their format is documented there.

use std::{collections::BTreeMap, fmt, fs, path::Path};

use crate::objects;

/// One file: what goes in, and what each program makes of it.
pub(crate) struct Fixture {
    /// File name, for messages.
    pub(crate) name: String,
    /// The lines that are neither comments nor expectations, without trailing comments.
    pub(crate) input: Vec<String>,
    /// The lines that start with `>`.
    expectations: Vec<Expectation>,
}

impl Fixture {
    /// What is expected of a node with this `when-down`.
    pub(crate) fn expectations_of(&self, when_down: &str) -> impl Iterator<Item = &Expectation> {
        self.expectations.iter().filter(move |one| one.setting("when-down", "closed") == when_down)
    }
}

/// `> PROGRAM [SETTING=VALUE ...] -> VERDICT [OUTCOME]`
pub(crate) struct Expectation {
    /// The program to run.
    pub(crate) program: String,
    settings: BTreeMap<String, String>,
    /// What it must answer.
    pub(crate) result: Outcome,
    line: String,
}

/// A program's answer and what it counted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// `pass`, `drop`, or a program's own word.
    pub(crate) verdict: String,
    /// `program/outcome`, in the order of the counters.
    pub(crate) counted: Vec<String>,
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl Expectation {
    /// The value of a setting, or `default` where the line does not name it.
    pub(crate) fn setting<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.settings.get(name).map_or(default, String::as_str)
    }

    /// The setting `mark`, by default 0.
    pub(crate) fn mark(&self) -> u32 {
        let mark = self.setting("mark", "0x0").trim_start_matches("0x");
        u32::from_str_radix(mark, 16).unwrap_or_else(|_| panic!("{self}: a mark is hexadecimal"))
    }

    fn parse(line: &str) -> Self {
        Self::try_parse(line).unwrap_or_else(|| {
            panic!("not `> PROGRAM [SETTING=VALUE ...] -> VERDICT [OUTCOME]`: {line}")
        })
    }

    fn try_parse(line: &str) -> Option<Self> {
        let (given, wanted) = line.strip_prefix('>')?.split_once("->")?;
        let mut given = given.split_whitespace();
        let program = given.next()?.to_owned();
        let setting = |word: &str| {
            let (name, value) = word.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        let settings = given.map(setting).collect::<Option<_>>()?;
        let mut wanted = wanted.split_whitespace();
        let verdict = wanted.next()?.to_owned();
        let counted = wanted.map(|outcome| format!("{program}/{outcome}")).collect();
        Some(Self {
            program,
            settings,
            result: Outcome { verdict, counted },
            line: line.to_owned(),
        })
    }
}

/// Every fixture in `bpf-fixtures/FOLDER`, by name.
pub(crate) fn read_all(folder: &str) -> Vec<Fixture> {
    let folder = objects::fixtures().join(folder);
    let mut paths: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    paths.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Fixture {
    let text = fs::read_to_string(path).unwrap();
    let (expectations, rest): (Vec<_>, Vec<_>) =
        text.lines().partition(|line| line.starts_with('>'));
    let input = rest
        .iter()
        .map(|line| line.split('#').next().unwrap_or("").trim().to_owned())
        .filter(|line| !line.is_empty())
        .collect();
    let expectations: Vec<_> = expectations.into_iter().map(Expectation::parse).collect();
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    assert!(!expectations.is_empty(), "{name}: expects nothing");
    Fixture { name, input, expectations }
}
