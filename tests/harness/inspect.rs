//! What is attached to a namespace and pinned by a node, as tc and bpftool tell it.

use anyhow::{Context as _, Result, bail};
use aya::programs::{SchedClassifier, TcAttachType};
use culvert_sys::{bpf::LinkIds, chain};
use serde_json::Value;

use crate::{culvert::Culvert, netns::Netns};

/// The names that culvert gives its filters.
pub const OUR_FILTERS: [&str; 4] = ["hold_in", "hold_out", "guard", "guard_host"];

/// A program at a hook of tc.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Filter {
    /// `ingress` or `egress`.
    pub hook: &'static str,
    /// Its preference as a filter; a tcx link has none.
    pub priority: Option<u64>,
    /// The name of its program.
    pub name: String,
}

impl Filter {
    /// Whether it bears one of the names that culvert gives.
    pub fn is_ours(&self) -> bool {
        OUR_FILTERS.contains(&self.name.as_str())
    }
}

/// The BPF programs on both hooks of an interface, by tcx link or filter, in the order in which packets meet them.
pub fn filters(netns: &Netns, interface: &str) -> Result<Vec<Filter>> {
    let mut filters = Vec::new();
    for (hook, attach_type) in
        [("ingress", TcAttachType::Ingress), ("egress", TcAttachType::Egress)]
    {
        let tcx = if links(netns, interface, attach_type)?.is_empty() {
            Vec::new()
        } else {
            netns.run(|| SchedClassifier::query_tcx(interface, attach_type))?.1
        };
        for program in tcx {
            let name = program.name_as_str().context("a program without a name")?.to_owned();
            filters.push(Filter { hook, priority: None, name });
        }
        let text = netns.output("tc", &["-j", "filter", "show", "dev", interface, hook])?;
        for filter in list(&text)? {
            let Some(name) = filter.pointer("/options/bpf_name").and_then(Value::as_str) else {
                continue;
            };
            let priority = filter.get("pref").and_then(Value::as_u64);
            filters.push(Filter { hook, priority, name: name.to_owned() });
        }
    }
    Ok(filters)
}

/// The tcx links on a hook of an interface, each with its program, in the order in which packets meet them.
pub fn links(netns: &Netns, interface: &str, hook: TcAttachType) -> Result<Vec<LinkIds>> {
    let hook = match hook {
        TcAttachType::Ingress => chain::Hook::Ingress,
        TcAttachType::Egress => chain::Hook::Egress,
        TcAttachType::Custom(parent) => bail!("tcx has no hook {parent}"),
    };
    match netns.run(|| chain::attached(nix::net::if_::if_nametoindex(interface)?, hook)) {
        // Before Linux 6.6 there are none.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(Vec::new()),
        links => links.with_context(|| format!("list the links of {interface}")),
    }
}

/// Whether the kernel has tcx links (Linux 6.6); says so where it has not.
#[must_use]
pub fn have_tcx() -> bool {
    let there = chain::attached(1, chain::Hook::Ingress).is_ok();
    if !there {
        eprintln!("skipped: this kernel has no tcx links");
    }
    there
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
