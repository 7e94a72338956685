//! The mesh as a local YAML file: all of it is right, or the first thing that is wrong is named.
//! Reading the file and watching it for changes is left to the binary.

mod build;
mod raw;
mod text;

#[cfg(test)]
mod tests;

use std::{
    fmt::{self, Write as _},
    path::{Path, PathBuf},
};

use serde_saphyr::{MessageFormatter as _, UserMessageFormatter};

use crate::snapshot::Snapshot;

/// The mesh that `text`, the contents of `path`, describes. `path` only names the file in errors.
///
/// # Errors
/// `text` is not what a mesh file may be. Nothing of it is used then.
pub fn parse(path: &Path, text: &str) -> Result<Snapshot, FileError> {
    read(text).and_then(build::snapshot).map_err(|fault| FileError { path: path.into(), fault })
}

/// A mesh file that cannot be used. `Display` is one line:
/// `path:line: field.path: what is wrong; remedy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    path: PathBuf,
    fault: Fault,
}

impl FileError {
    /// The line of the fault, counted from 1.
    pub fn line(&self) -> u64 {
        self.fault.line
    }

    /// The field at fault, such as `workloads[0].uid`; empty for the file as a whole.
    pub fn field(&self) -> &str {
        &self.fault.field
    }

    /// What is wrong, and what to do about it.
    pub fn what(&self) -> &str {
        &self.fault.what
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { line, field, what } = &self.fault;
        write!(f, "{}:{line}: ", self.path.display())?;
        if !field.is_empty() {
            write!(f, "{}: ", OneLine(field))?;
        }
        OneLine(what).fmt(f)
    }
}

impl std::error::Error for FileError {}

/// A fault, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fault {
    line: u64,
    field: String,
    /// `what is wrong; remedy`.
    what: String,
}

/// A text that quotes the file, made fit for one line of a log.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        for c in self.0.chars().take(MAX_MESSAGE).map(printable) {
            f.write_char(c)?;
        }
        if self.0.chars().nth(MAX_MESSAGE).is_some() { f.write_str("...") } else { Ok(()) }
    }
}

fn read(text: &str) -> Result<raw::Mesh, Fault> {
    let whole = |what: &str| Fault { line: 1, field: String::new(), what: what.into() };
    if text.len() > MAX_FILE {
        return Err(whole(
            "file is larger than 64 MiB; use a control plane for a mesh of this size",
        ));
    }
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Err(whole("file is empty; write `workloads: []` if no workload is meant"));
    }
    // The field at fault outlives the deserializer that knows it.
    let mut field = String::new();
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_documents: 2,
            max_nodes: MAX_NODES,
            max_events: MAX_NODES,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_REPLAYED,
            max_replay_stack_depth: MAX_DEPTH,
        },
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
    };
    serde_saphyr::with_deserializer_from_str_with_options(text, options, |deserializer| {
        serde_path_to_error::deserialize(deserializer).map_err(|error| {
            field = field_path(error.path());
            error.into_inner()
        })
    })
    .map_err(|error| {
        let line = error.location().map_or(1, |location| location.line().max(1));
        Fault { line, field, what: describe(&error) }
    })
}

/// The path as a user would write it, without the steps that only our types have.
fn field_path(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => write!(text, "[{index}]").unwrap_or_default(),
            // `Spanned` shows itself as a map with this key.
            Segment::Map { key } if key == "value" => {}
            Segment::Map { key: name } | Segment::Enum { variant: name } => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(name);
            }
            Segment::Unknown => {}
        }
    }
    text
}

fn describe(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error;
    match error.without_snippet() {
        Error::Message { msg, .. } => msg.clone(),
        Error::SerdeUnknownField { field, expected, .. } => {
            format!("unknown field `{field}`; use one of {}", expected.join(", "))
        }
        Error::SerdeUnknownVariant { variant, expected, .. } => {
            format!("unknown value `{variant}`; use one of {}", expected.join(", "))
        }
        Error::SerdeMissingField { field, .. } => format!("field `{field}` is missing; add it"),
        Error::SerdeInvalidType { unexpected, expected, .. } => {
            format!("{unexpected} is of the wrong type; write {expected}")
        }
        Error::Unexpected { expected, .. } => {
            let expected = match *expected {
                "sequence start" => "a list",
                "mapping start" => "a mapping",
                "string scalar" => "a text",
                other => other,
            };
            format!("value is of the wrong kind; write {expected}")
        }
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.as_deref().unwrap_or("the key");
            format!("`{key}` is given twice; keep one")
        }
        Error::MultipleDocuments { .. } => "a second document starts; keep one".into(),
        Error::Eof { .. } => "file ends early; write the rest of it".into(),
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => {
            "file has too many or too deeply nested values; write it plainly, without aliases"
                .into()
        }
        other => format!("{}; correct the YAML", UserMessageFormatter.format_message(other)),
    }
}

/// How much of a message is shown: enough for any that does not quote a monster.
const MAX_MESSAGE: usize = 400;
/// Some hundred thousand workloads.
const MAX_FILE: usize = 64 << 20;
/// The format's own depth is 10.
const MAX_DEPTH: usize = 24;
/// As many as fit into `MAX_FILE` when each has a few bytes.
const MAX_NODES: usize = 16 << 20;
/// What aliases may add.
const MAX_REPLAYED: usize = 100_000;
