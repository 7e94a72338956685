//! Fetches Debian's kernel packages by name through apt, with lists of its own, and unpacks them without installing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::{Kernel, sources};
use crate::command;

/// The flavour without drivers for real machines.
const FLAVOUR: &str = "-cloud-amd64";

/// A kernel and its modules on disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unpacked {
    /// What `uname -r` says in it.
    pub(super) release: String,
    /// The kernel itself.
    pub(super) image: PathBuf,
    /// Where its modules are.
    pub(super) modules: PathBuf,
}

/// The kernel in `folder`, fetched if it is not there; the newest one may be newer today, so it is asked for anew.
pub(super) fn fetch(kernel: Kernel, folder: &Path) -> Result<Unpacked> {
    let unpacked = folder.join("unpacked");
    if kernel.series().is_some()
        && let Some(found) = find(&unpacked)
    {
        return Ok(found);
    }
    let mut refusals = Vec::new();
    for suite in kernel.suites() {
        let sources = sources::of_machine(suite)?;
        if sources.is_empty() {
            refusals.push(format!("apt's sources name no place that could have {suite}"));
        }
        for source in sources {
            let attempt = Apt::new(&folder.join("apt"), &source.with_suite(suite))
                .and_then(|apt| apt.unpack_newest(kernel, &unpacked));
            match attempt {
                Ok(()) => {
                    return find(&unpacked)
                        .with_context(|| format!("no kernel in {}", unpacked.display()));
                }
                Err(error) => refusals.push(format!("{suite}: {error:#}")),
            }
        }
    }
    bail!("no package of this kernel can be had: {}", refusals.join("; "));
}

/// What `unpacked` holds, if a whole kernel.
fn find(unpacked: &Path) -> Option<Unpacked> {
    let image = fs::read_dir(unpacked.join("boot")).ok()?.flatten().find_map(|entry| {
        let release = entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned();
        Some((release, entry.path()))
    });
    let (release, image) = image?;
    // Debian is moving the modules there.
    let modules = ["lib/modules", "usr/lib/modules"]
        .map(|folder| unpacked.join(folder).join(&release))
        .into_iter()
        .find(|folder| folder.is_dir())?;
    Some(Unpacked { release, image, modules })
}

/// apt with one source and none of the machine's state.
struct Apt {
    folder: PathBuf,
    options: Vec<String>,
}

impl Apt {
    fn new(folder: &Path, source: &str) -> Result<Self> {
        for part in ["lists/partial", "cache/archives/partial", "download"] {
            let part = folder.join(part);
            fs::create_dir_all(&part).with_context(|| format!("create {}", part.display()))?;
        }
        let list = folder.join("only.sources");
        fs::write(&list, source).with_context(|| format!("write {}", list.display()))?;
        let shown = folder.display();
        let options = vec![
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={shown}/lists"),
            // What is installed here is no offer.
            "Dir::State::Status=/dev/null".to_owned(),
            format!("Dir::Cache={shown}/cache"),
            "Acquire::Languages=none".to_owned(),
            "Acquire::PDiffs=false".to_owned(),
            "Acquire::Retries=3".to_owned(),
            // The folder above may be closed to apt's own user.
            "APT::Sandbox::User=root".to_owned(),
        ];
        Ok(Self { folder: folder.to_owned(), options })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    fn unpack_newest(&self, kernel: Kernel, unpacked: &Path) -> Result<()> {
        command::run(self.command("apt-get").args(["update", "-qq"]))?;
        let names = command::read(self.command("apt-cache").args(["pkgnames", "linux-image-"]))?;
        let name = newest(&names, kernel.series()).context("has no such package")?;
        let download = self.folder.join("download");
        command::run(
            self.command("apt-get").args(["download", "-qq", name]).current_dir(&download),
        )?;
        let package = fs::read_dir(&download)?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .context("apt-get download left no package")?;
        // Renamed into place, so that a half of a kernel is never taken for one.
        let fresh = self.folder.join("fresh");
        for old in [&fresh, unpacked] {
            if old.exists() {
                fs::remove_dir_all(old).with_context(|| format!("remove {}", old.display()))?;
            }
        }
        command::run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&fresh))?;
        fs::remove_file(&package).with_context(|| format!("remove {}", package.display()))?;
        ensure!(find(&fresh).is_some(), "{name} holds no kernel");
        fs::rename(&fresh, unpacked).with_context(|| format!("rename {}", fresh.display()))
    }
}

/// The package with the highest version in `names`, within `series` if given, as in "6.1".
fn newest<'a>(names: &'a str, series: Option<&str>) -> Option<&'a str> {
    names
        .lines()
        .filter_map(|name| {
            let version = name.strip_prefix("linux-image-")?.strip_suffix(FLAVOUR)?;
            let in_series = series.is_none_or(|series| {
                version.strip_prefix(series).is_some_and(|rest| rest.starts_with('.'))
            });
            let numbers: Vec<u32> = version
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|number| number.parse().ok())
                .collect();
            (in_series && !numbers.is_empty()).then_some((numbers, name))
        })
        .max()
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &str = "linux-image-6.1.0-9-cloud-amd64\nlinux-image-6.1.0-57-cloud-amd64\n\
        linux-image-6.1.0-58-amd64\nlinux-image-6.12.95+deb12-cloud-amd64\nlinux-image-cloud-amd64\n\
        linux-image-6.1.0-57-cloud-amd64-dbg\nlinux-image-7.2.1-cloud-amd64";

    #[test]
    fn the_newest_of_a_series_is_chosen_by_number() {
        for (series, name) in [
            (Some("6.1"), Some("linux-image-6.1.0-57-cloud-amd64")),
            (Some("6.12"), Some("linux-image-6.12.95+deb12-cloud-amd64")),
            (Some("5.10"), None),
            (None, Some("linux-image-7.2.1-cloud-amd64")),
        ] {
            assert_eq!(newest(NAMES, series), name, "{series:?}");
        }
    }

    #[test]
    fn a_kernel_without_its_modules_is_not_taken_for_one() {
        let folder = tempfile::tempdir().unwrap();
        let boot = folder.path().join("boot");
        fs::create_dir(&boot).unwrap();
        fs::write(boot.join("vmlinuz-6.1.0"), "").unwrap();
        assert_eq!(find(folder.path()), None);
        let modules = folder.path().join("usr/lib/modules/6.1.0");
        fs::create_dir_all(&modules).unwrap();
        let want = Unpacked { release: "6.1.0".into(), image: boot.join("vmlinuz-6.1.0"), modules };
        assert_eq!(find(folder.path()), Some(want));
    }
}
