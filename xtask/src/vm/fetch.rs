//! Fetches Debian's kernel packages by name through apt, with lists of its own, and unpacks them without installing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::{Kernel, sources};
use crate::command;

/// The flavour without drivers for real machines.
const FLAVOUR: &str = "-cloud-amd64";

/// What the packages that hold a kernel are called before its version.
const PARTS: [&str; 4] = ["linux-base-", "linux-image-", "linux-binary-", "linux-modules-"];

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

/// What `unpacked` holds, if a whole kernel; newer packages have the image beside the modules, and both under `usr`.
fn find(unpacked: &Path) -> Option<Unpacked> {
    ["lib/modules", "usr/lib/modules"]
        .into_iter()
        .filter_map(|folder| fs::read_dir(unpacked.join(folder)).ok())
        .flat_map(Iterator::flatten)
        .find_map(|entry| {
            let release = entry.file_name().to_str()?.to_owned();
            let modules = entry.path();
            let image =
                [unpacked.join("boot").join(format!("vmlinuz-{release}")), modules.join("vmlinuz")]
                    .into_iter()
                    .find(|image| image.is_file())?;
            Some(Unpacked { release, image, modules })
        })
}

/// apt with one source and none of the machine's state.
struct Apt {
    folder: PathBuf,
    options: Vec<String>,
}

impl Apt {
    fn new(folder: &Path, source: &str) -> Result<Self> {
        for part in ["lists/partial", "cache/archives/partial"] {
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
        let names = command::read(self.command("apt-cache").args(["pkgnames", "linux-"]))?;
        let version = newest(&names, kernel.series()).context("has no such package")?;
        let download = self.folder.join("download");
        remove(&download)?;
        fs::create_dir(&download).with_context(|| format!("create {}", download.display()))?;
        command::run(
            self.command("apt-get")
                .args(["download", "-qq"])
                .args(parts(&names, version))
                .current_dir(&download),
        )?;
        // Renamed into place, so that a half of a kernel is never taken for one.
        let fresh = self.folder.join("fresh");
        remove(&fresh)?;
        let packages = fs::read_dir(&download);
        for package in packages.with_context(|| format!("read {}", download.display()))?.flatten() {
            command::run(Command::new("dpkg-deb").arg("-x").arg(package.path()).arg(&fresh))?;
        }
        ensure!(find(&fresh).is_some(), "the packages of {version} hold no kernel");
        remove(&download)?;
        remove(unpacked)?;
        fs::rename(&fresh, unpacked).with_context(|| format!("rename {}", fresh.display()))
    }
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    Ok(())
}

/// The highest version of a kernel in `names`, within `series` if given, as in "6.1"; with its flavour.
fn newest<'a>(names: &'a str, series: Option<&str>) -> Option<&'a str> {
    names
        .lines()
        .filter_map(|name| {
            let version = name.strip_prefix("linux-image-")?;
            let numbers: Vec<u32> = version
                .strip_suffix(FLAVOUR)?
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|number| number.parse().ok())
                .collect();
            let in_series = series.is_none_or(|series| {
                version.strip_prefix(series).is_some_and(|rest| rest.starts_with('.'))
            });
            (in_series && !numbers.is_empty()).then_some((numbers, version))
        })
        .max()
        .map(|(_, version)| version)
}

/// The packages in `names` that make up the kernel `version`: one, or since Linux 7 several.
fn parts<'a>(names: &'a str, version: &str) -> impl Iterator<Item = &'a str> {
    names.lines().filter(move |name| {
        PARTS.iter().any(|part| name.strip_prefix(part).is_some_and(|rest| rest == version))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &str = "linux-image-6.1.0-9-cloud-amd64\nlinux-image-6.1.0-57-cloud-amd64\n\
        linux-image-6.1.0-58-amd64\nlinux-image-6.12.95+deb12-cloud-amd64\nlinux-image-cloud-amd64\n\
        linux-image-6.1.0-57-cloud-amd64-dbg\nlinux-image-7.2.1-cloud-amd64\n\
        linux-binary-7.2.1-cloud-amd64\nlinux-modules-7.2.1-cloud-amd64\nlinux-headers-7.2.1-cloud-amd64";

    #[test]
    fn the_newest_of_a_series_is_chosen_by_number() {
        for (series, version) in [
            (Some("6.1"), Some("6.1.0-57-cloud-amd64")),
            (Some("6.12"), Some("6.12.95+deb12-cloud-amd64")),
            (Some("5.10"), None),
            (None, Some("7.2.1-cloud-amd64")),
        ] {
            assert_eq!(newest(NAMES, series), version, "{series:?}");
        }
    }

    #[test]
    fn a_kernel_may_be_in_several_packages() {
        let parts_of = |version| parts(NAMES, version).collect::<Vec<_>>();
        assert_eq!(parts_of("6.1.0-57-cloud-amd64"), ["linux-image-6.1.0-57-cloud-amd64"]);
        assert_eq!(
            parts_of("7.2.1-cloud-amd64"),
            ["image", "binary", "modules"].map(|part| format!("linux-{part}-7.2.1-cloud-amd64"))
        );
    }

    #[test]
    fn a_kernel_is_its_image_and_its_modules() {
        for (image, modules) in [
            ("boot/vmlinuz-6.1.0", "lib/modules/6.1.0"),
            ("usr/lib/modules/6.1.0/vmlinuz", "usr/lib/modules/6.1.0"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let (image, modules) = (folder.path().join(image), folder.path().join(modules));
            fs::create_dir_all(&modules).unwrap();
            assert_eq!(find(folder.path()), None, "{}", image.display());
            fs::create_dir_all(image.parent().unwrap()).unwrap();
            fs::write(&image, "").unwrap();
            let want = Unpacked { release: "6.1.0".into(), image, modules };
            assert_eq!(find(folder.path()), Some(want));
        }
    }
}
