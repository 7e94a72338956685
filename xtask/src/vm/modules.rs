//! Finds the kernel modules that the tests need, with those they depend on, in an order they can be loaded in.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::command;

/// What pods, their wires, the attached programs and the filters of others take, unless it is built in.
const WANTED: [&str; 6] = ["veth", "bridge", "tun", "sch_ingress", "cls_bpf", "cls_u32"];

/// A module's name and its uncompressed content.
pub(super) type Module = (String, Vec<u8>);

/// The wanted modules of the kernel whose modules are in `folder`, dependencies first.
pub(super) fn collect(folder: &Path) -> Result<Vec<Module>> {
    let builtin = folder.join("modules.builtin");
    let builtin =
        fs::read_to_string(&builtin).with_context(|| format!("read {}", builtin.display()))?;
    let mut files = BTreeMap::new();
    index(&folder.join("kernel"), &mut files)?;
    let mut modules = Vec::new();
    for name in WANTED {
        if !is_builtin(&builtin, name) {
            add(name, &files, &mut modules)?;
        }
    }
    Ok(modules)
}

fn add(name: &str, files: &BTreeMap<String, PathBuf>, modules: &mut Vec<Module>) -> Result<()> {
    if modules.iter().any(|(added, _)| added == name) {
        return Ok(());
    }
    let Some(file) = files.get(name) else { bail!("this kernel has no module {name}") };
    let content = content(file)?;
    for needed in depends(&content) {
        add(&needed, files, modules)?;
    }
    modules.push((name.to_owned(), content));
    Ok(())
}

/// Every module below `folder`, by name.
fn index(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            index(&entry.path(), files)?;
        } else if let Some((name, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
            files.insert(name.replace('-', "_"), entry.path());
        }
    }
    Ok(())
}

fn content(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_some_and(|extension| extension == "ko") {
        return fs::read(file).with_context(|| format!("read {}", file.display()));
    }
    // It tells the compression by itself, and is there for the image anyway.
    command::read_bytes(Command::new("busybox").arg("xzcat").arg(file))
}

/// What the module says in its `.modinfo` section that it needs.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let list = module.get(at + KEY.len()..).unwrap_or_default();
    let list = list.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(list)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

fn is_builtin(list: &str, name: &str) -> bool {
    list.lines()
        .filter_map(|line| line.rsplit('/').next()?.strip_suffix(".ko"))
        .any(|builtin| builtin.replace('-', "_") == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(modules: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("modules.builtin"), "kernel/net/sched/cls_bpf.ko\n").unwrap();
        let net = folder.path().join("kernel/net");
        fs::create_dir_all(&net).unwrap();
        for (name, needs) in modules {
            let content = format!("\x7fELF\0license=GPL\0depends={needs}\0name={name}\0");
            fs::write(net.join(format!("{name}.ko")), content).unwrap();
        }
        folder
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let folder = kernel(&[
            ("veth", ""),
            ("bridge", "stp,llc"),
            ("stp", "llc"),
            ("llc", ""),
            ("tun", ""),
            ("sch-ingress", ""),
            ("cls_u32", ""),
            ("unwanted", ""),
        ]);
        let names: Vec<_> =
            collect(folder.path()).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["veth", "llc", "stp", "bridge", "tun", "sch_ingress", "cls_u32"]);
    }

    #[test]
    fn a_module_that_is_missing_is_named() {
        let folder = kernel(&[("veth", ""), ("bridge", "stp")]);
        let error = collect(folder.path()).unwrap_err().to_string();
        assert_eq!(error, "this kernel has no module stp");
    }
}
