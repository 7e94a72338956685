//! The YAML documents of a file, each read on its own, so that a mistake in one leaves the others alone.

use std::{
    fmt::{self, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use culvert_mesh::Snapshot;
use serde_json::Value;

use crate::objects::{self, Fault, Key, Object};

#[cfg(test)]
mod tests;

/// More would not be a file that people keep.
const MAX_FILE: usize = 256 << 20;
/// Kubernetes objects nest some ten deep.
const MAX_DEPTH: usize = 64;
/// What aliases may add.
const MAX_REPLAYED: usize = 100_000;
/// How much of a message is shown.
const MAX_MESSAGE: usize = 400;

/// What one document, or one item of a list, says.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// An object.
    Object(Key, Object, Place),
    /// Workloads, services and policies in ztunnel's local format.
    Mesh(Arc<Snapshot>, Place),
    /// Nothing that could be used.
    Bad(Problem),
}

/// Where in a file something stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Counted from 1.
    pub(crate) line: usize,
    /// Counted from 1.
    pub(crate) document: usize,
}

/// What is wrong, and where. `Display` is one line: `path:line: document n: object: field: what is wrong; remedy`, or, where
/// objects are a cluster's, `object: field: what is wrong; remedy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// `None`: in the cluster.
    pub(crate) place: Option<(PathBuf, Place)>,
    pub(crate) key: Option<Key>,
    pub(crate) field: String,
    pub(crate) what: String,
}

impl Problem {
    pub(crate) fn new(path: &Path, place: Place, fault: Fault) -> Self {
        let Fault { key, field, what } = fault;
        Self { place: Some((path.to_owned(), place)), key, field, what }
    }

    /// One of a cluster's object.
    pub(crate) fn in_cluster(fault: Fault) -> Self {
        let Fault { key, field, what } = fault;
        Self { place: None, key, field, what }
    }

    /// Whether the mesh might be less safe without what could not be read.
    pub(crate) fn is_grave(&self) -> bool {
        self.key.as_ref().is_none_or(|key| key.kind.guards())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        if let Some((path, place)) = &self.place {
            write!(f, "{}:{}: ", path.display(), place.line)?;
            write!(text, "document {}: ", place.document)?;
        }
        if let Some(key) = &self.key {
            write!(text, "{key}: ")?;
        }
        if !self.field.is_empty() {
            write!(text, "{}: ", self.field)?;
        }
        text.push_str(&self.what);
        let shown = text.chars().take(MAX_MESSAGE).map(|c| if c.is_control() { ' ' } else { c });
        f.write_str(&shown.collect::<String>())
    }
}

/// Everything that `text`, the contents of `path`, says, in its order.
pub(crate) fn read(path: &Path, text: &str) -> Vec<Content> {
    let mut contents = Vec::new();
    if text.len() > MAX_FILE {
        let what = "file is larger than 256 MiB; split it".to_owned();
        let fault = Fault { key: None, field: String::new(), what };
        contents.push(Content::Bad(Problem::new(path, Place { line: 1, document: 1 }, fault)));
        return contents;
    }
    for (index, (line, document)) in split(text).enumerate() {
        read_document(path, Place { line, document: index + 1 }, document, &mut contents);
    }
    contents
}

fn read_document(path: &Path, place: Place, text: &str, contents: &mut Vec<Content>) {
    if text.lines().all(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line == "---"
    }) {
        return;
    }
    let bad = |line: usize, fault| {
        let place = Place { line: place.line + line.max(1) - 1, ..place };
        Content::Bad(Problem::new(path, place, fault))
    };
    let value = match parse(text) {
        Ok(value) => value,
        Err((line, what)) => {
            contents.push(bad(line, Fault { key: None, field: String::new(), what }));
            return;
        }
    };
    if is_mesh(&value) {
        contents.push(match culvert_mesh::file::parse(path, text) {
            Ok(mesh) => Content::Mesh(Arc::new(mesh), place),
            Err(error) => {
                let line = usize::try_from(error.line()).unwrap_or(1);
                let (field, what) = (error.field().to_owned(), error.what().to_owned());
                bad(line, Fault { key: None, field, what })
            }
        });
        return;
    }
    for item in items(value) {
        match objects::read(item) {
            Ok(Some((key, object))) => contents.push(Content::Object(key, object, place)),
            Ok(None) => {}
            Err(fault) => contents.push(bad(1, fault)),
        }
    }
}

/// Each document with the line that it starts on. A line that starts with `---` always starts one (YAML 1.2 §9.1.4).
fn split(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut rest = Some((1, text));
    std::iter::from_fn(move || {
        let (line, text) = rest.take()?;
        let mut offset = 0;
        for (index, one) in text.split_inclusive('\n').enumerate() {
            if index > 0 && is_marker(one) {
                let (document, next) = text.split_at(offset);
                rest = Some((line + index, next));
                return Some((line, document));
            }
            offset += one.len();
        }
        Some((line, text))
    })
}

fn is_marker(line: &str) -> bool {
    line.strip_prefix("---")
        .is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

fn parse(text: &str) -> Result<Value, (usize, String)> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_documents: 2,
            max_nodes: MAX_FILE,
            max_events: MAX_FILE,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_REPLAYED,
            max_replay_stack_depth: MAX_DEPTH,
        },
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let line = error.location().map_or(1, |location| location.line().max(1));
        let what = error.without_snippet().to_string().replace('\n', " ");
        (usize::try_from(line).unwrap_or(1), format!("{what}; correct the YAML"))
    })
}

fn is_mesh(value: &Value) -> bool {
    let has = |field: &str| value.get(field).is_some();
    !has("kind") && ["workloads", "services", "policies"].into_iter().any(has)
}

/// The items of a `List`, or the one object that is none.
fn items(value: Value) -> Vec<Value> {
    match value {
        Value::Object(mut fields) if fields.get("kind").and_then(Value::as_str) == Some("List") => {
            match fields.remove("items") {
                Some(Value::Array(items)) => items,
                _ => Vec::new(),
            }
        }
        other => vec![other],
    }
}
