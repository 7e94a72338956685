//! Builds a guest's first file system: busybox, iproute2, the test programs with their libraries and fixtures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::cpio::Archive;
use super::fetch::Unpacked;
use super::modules;
use crate::{command, workspace};

/// The first process.
const INIT: &str = include_str!("init.sh");

/// What `init.sh` runs of busybox; not its `ip`, which lacks what the tests ask of it.
const APPLETS: [&str; 8] = ["sh", "mount", "mkdir", "cat", "head", "sleep", "insmod", "poweroff"];

/// What the tests run of iproute2.
const TOOLS: [&str; 2] = ["ip", "tc"];

/// Where programs are in a guest.
pub(super) const PROGRAMS: &str = "/programs";

/// Where the BPF objects are in a guest.
pub(super) const OBJECTS: &str = "/objects";

/// Writes the image for `kernel` to `file`: `programs` by name, and the shell commands of `run`.
pub(super) fn build(
    file: &Path,
    kernel: &Unpacked,
    programs: &[(&str, &Path)],
    run: &str,
) -> Result<()> {
    let mut archive = Archive::default();
    for folder in ["/dev", "/proc", "/sys", "/tmp", "/run"] {
        archive.folder(Path::new(folder));
    }
    archive.file(Path::new("/init"), INIT.as_bytes());
    archive.file(&Path::new(PROGRAMS).join("run"), run.as_bytes());

    add_program(&mut archive, Path::new("/bin/busybox"), &installed("busybox")?)?;
    for applet in APPLETS {
        archive.link(&Path::new("/bin").join(applet), "busybox");
    }
    for tool in TOOLS {
        add_program(&mut archive, &Path::new("/sbin").join(tool), &installed(tool)?)?;
    }
    for (name, program) in programs {
        let stripped = file.with_file_name(name);
        command::read(Command::new("strip").arg("-o").arg(&stripped).arg(program))?;
        add_program(&mut archive, &Path::new(PROGRAMS).join(name), &stripped)?;
        fs::remove_file(&stripped).with_context(|| format!("remove {}", stripped.display()))?;
    }

    let mut order = Vec::new();
    for (name, content) in modules::collect(&kernel.modules)? {
        archive.file(&Path::new("/modules").join(format!("{name}.ko")), &content);
        order.push(name);
    }
    archive.file(Path::new("/modules/order"), order.join("\n").as_bytes());

    add_folder(&mut archive, &workspace::fresh_objects(), Path::new(OBJECTS))?;
    // The tests know where these were when they were compiled.
    for folder in ["bpf-fixtures", "tests"] {
        archive.folder(&workspace::root().join(folder));
    }
    let fixtures = workspace::root().join("bpf-fixtures");
    add_folder(&mut archive, &fixtures, &fixtures)?;
    fs::write(file, archive.finish()).with_context(|| format!("write {}", file.display()))
}

fn installed(program: &str) -> Result<PathBuf> {
    command::find(program).with_context(|| format!("{program} is not installed"))
}

/// Puts `program` at `path`, and the shared libraries it loads at their own.
fn add_program(archive: &mut Archive, path: &Path, program: &Path) -> Result<()> {
    archive.file(path, &read(program)?);
    // A static program has none, and `ldd` fails to say so.
    for library in libraries(&command::probe(Command::new("ldd").arg(program)).unwrap_or_default())
    {
        archive.file(library, &read(library)?);
    }
    Ok(())
}

/// The files in what `ldd` prints: `name => /path (0x0)`, or `/path (0x0)` for the loader.
fn libraries(ldd: &str) -> Vec<&Path> {
    ldd.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(Path::new)
        .collect()
}

fn add_folder(archive: &mut Archive, from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            add_folder(archive, &entry.path(), &to)?;
        } else {
            archive.file(&to, &read(&entry.path())?);
        }
    }
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd() {
        let output = "\tlinux-vdso.so.1 (0x00007ffc)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            libraries(output),
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(Path::new)
        );
    }
}
