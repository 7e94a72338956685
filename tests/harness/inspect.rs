//! What is attached to a namespace and pinned by a node, as tc and bpftool tell it.

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{culvert::Culvert, netns::Netns};

/// The names that culvert gives its filters.
pub const OUR_FILTERS: [&str; 3] = ["hold_in", "hold_out", "guard"];

/// A tc filter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Filter {
    /// `ingress` or `egress`.
    pub hook: &'static str,
    /// Its preference.
    pub priority: u64,
    /// The name of its program.
    pub name: String,
}

impl Filter {
    /// Whether it bears one of the names that culvert gives.
    pub fn is_ours(&self) -> bool {
        OUR_FILTERS.contains(&self.name.as_str())
    }
}

/// The BPF filters on both hooks of an interface, in the order in which packets meet them.
pub fn filters(netns: &Netns, interface: &str) -> Result<Vec<Filter>> {
    let mut filters = Vec::new();
    for hook in ["ingress", "egress"] {
        let text = netns.output("tc", &["-j", "filter", "show", "dev", interface, hook])?;
        for filter in list(&text)? {
            let Some(name) = filter.pointer("/options/bpf_name").and_then(Value::as_str) else {
                continue;
            };
            let priority = filter.get("pref").and_then(Value::as_u64).unwrap_or_default();
            filters.push(Filter { hook, priority, name: name.to_owned() });
        }
    }
    Ok(filters)
}

/// How many `sk_lookup` links the namespace has, whoever holds them.
pub fn lookup_links(netns: &Netns) -> Result<usize> {
    use std::os::unix::fs::MetadataExt as _;
    let inode = std::fs::metadata(netns.path())?.ino();
    let links = list(&netns.output("bpftool", &["-j", "link", "show"])?)?;
    Ok(links
        .iter()
        .filter(|link| link.get("netns_ino").and_then(Value::as_u64) == Some(inode))
        .count())
}

/// The `sockops` links of a node, by the id of the program that each runs.
pub fn socket_programs(culvert: &Culvert<'_>, netns: &Netns) -> Result<Vec<(String, u64)>> {
    let folder = culvert.pins()?.join("links");
    let mut programs = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        let link =
            netns.output("bpftool", &["-j", "link", "show", "pinned", &path.to_string_lossy()])?;
        let link: Value = serde_json::from_str(&link)?;
        let link = link.get(0).unwrap_or(&link);
        let id = link.get("prog_id").and_then(Value::as_u64).context("a link has no program")?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        programs.push((name, id));
    }
    programs.sort();
    Ok(programs)
}

/// The number of entries in one of a node's pinned maps.
pub fn entries(culvert: &Culvert<'_>, netns: &Netns, map: &str) -> Result<usize> {
    let path = culvert.pins()?.join("maps").join(map);
    let text =
        netns.output("bpftool", &["-j", "map", "dump", "pinned", &path.to_string_lossy()])?;
    Ok(list(&text)?.len())
}

/// The list in `text`; nothing at all, and `null`, are what the tools print for an empty one.
fn list(text: &str) -> Result<Vec<Value>> {
    match text.trim() {
        "" => Ok(Vec::new()),
        text => match serde_json::from_str(text).with_context(|| format!("parse {text}"))? {
            Value::Array(list) => Ok(list),
            _ => Ok(Vec::new()),
        },
    }
}
