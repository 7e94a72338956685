//! `cargo xtask build-ebpf`: compiles the BPF objects, or checks that those at hand are of these sources.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::hash_sources::HASH_FILE;
use crate::objects::{self, DIGESTS_FILE, OBJECTS, State, TOOLCHAIN_FILE};
use crate::toolchain::{TARGET, Toolchain, linker_version};
use crate::{command, workspace};

/// Compile the BPF programs to target/culvert-bpf, from where the proxy embeds them.
#[derive(Args)]
pub(crate) struct Options {
    /// Build nothing; succeed if objects of the current sources are at hand (with --reference: in bpf-fixtures).
    #[arg(long)]
    check: bool,
    /// Also renew the reference objects in bpf-fixtures/objects.
    #[arg(long)]
    reference: bool,
}

pub(crate) fn run(options: Options) -> Result<ExitCode> {
    if options.check {
        return check(options.reference);
    }
    let Some(toolchain) = Toolchain::find() else {
        bail!("no compiler here has core for {TARGET}; run `cargo xtask setup`");
    };
    build(&toolchain)?;
    if options.reference {
        renew_reference(&toolchain)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Compiles the objects and publishes them with the hash of their sources.
pub(crate) fn build(toolchain: &Toolchain) -> Result<()> {
    if linker_version().is_none() {
        bail!("no bpf-linker that runs; run `cargo xtask setup`");
    }
    println!("compiler: {toolchain}");
    let hash = objects::current_hash()?;
    command::run(&mut toolchain.cargo("build", workspace::root(), &target_folder()))?;
    if objects::current_hash()? != hash {
        bail!(
            "the BPF sources changed while they were compiled; run `cargo xtask build-ebpf` again"
        );
    }
    let folder = workspace::fresh_objects();
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    publish(&built_in(&target_folder()), &folder, &hash, str::to_owned)?;
    for object in OBJECTS.map(objects::file_name) {
        let path = folder.join(object);
        let size = fs::metadata(&path).with_context(|| format!("read {}", path.display()))?.len();
        println!("{} ({size} bytes)", path.display());
    }
    Ok(())
}

/// Builds the objects; where no toolchain can, is content with reference objects of these sources.
pub(crate) fn build_or_reference() -> Result<()> {
    let Some(toolchain) = Toolchain::find().filter(|_| linker_version().is_some()) else {
        let reference = objects::state(&workspace::reference_objects(), &objects::current_hash()?)?;
        if reference != State::Current {
            bail!(
                "nothing here compiles for {TARGET}, and the reference objects {}",
                reference.describe()
            );
        }
        println!(
            "nothing here compiles for {TARGET}: using the reference objects, which match the sources"
        );
        return Ok(());
    };
    build(&toolchain)
}

/// Fails unless the reference objects are of these sources and, where the same toolchain made them, are byte for byte
/// what was just built.
pub(crate) fn check_reference() -> Result<()> {
    let reference = workspace::reference_objects();
    let state = objects::state(&reference, &objects::current_hash()?)?;
    if state != State::Current {
        bail!(
            "the reference objects {}; run `cargo xtask build-ebpf --reference`",
            state.describe()
        );
    }
    let Some(toolchain) = Toolchain::find().filter(|_| linker_version().is_some()) else {
        return Ok(());
    };
    let made_by = fs::read_to_string(reference.join(TOOLCHAIN_FILE))
        .with_context(|| {
 format!("read {TOOLCHAIN_FILE} beside the reference objects; `cargo xtask build-ebpf --reference` writes it")
 })?;
    let here = toolchain.describe()?;
    if made_by != here {
        println!(
            "the reference objects were not made by this toolchain, so their bytes are not compared:"
        );
        println!("{made_by}---\n{here}");
        return Ok(());
    }
    if objects::digests(&reference)? != objects::digests(&workspace::fresh_objects())? {
        bail!(
            "the reference objects are not what their toolchain makes now; run `cargo xtask build-ebpf --reference`"
        );
    }
    println!("the reference objects are, byte for byte, what this machine builds");
    Ok(())
}

/// Fails unless a copy of the workspace in another folder builds the same objects.
pub(crate) fn check_reproducible() -> Result<()> {
    let Some(toolchain) = Toolchain::find() else { bail!("nothing here compiles for {TARGET}") };
    let elsewhere = workspace::target().join("elsewhere");
    remove_folder(&elsewhere)?;
    copy_workspace(workspace::root(), &elsewhere)?;
    let target_folder = elsewhere.join("target/bpf");
    command::run(&mut toolchain.cargo("build", &elsewhere, &target_folder))?;
    let published = elsewhere.join("objects");
    fs::create_dir_all(&published).with_context(|| format!("create {}", published.display()))?;
    publish(&built_in(&target_folder), &published, "", str::to_owned)?;
    let same = objects::digests(&published)? == objects::digests(&workspace::fresh_objects())?;
    if !same {
        bail!(
            "{} holds other objects than {}",
            published.display(),
            workspace::fresh_objects().display()
        );
    }
    remove_folder(&elsewhere)
}

/// Where cargo builds the programs. Not the usual folder: its lock belongs to the cargo that runs us.
pub(crate) fn target_folder() -> PathBuf {
    workspace::target().join("bpf")
}

fn built_in(target_folder: &Path) -> PathBuf {
    target_folder.join(TARGET).join("bpf")
}

fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Copies what cargo reads; what it writes, and the history, stay behind.
fn copy_workspace(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        if name == "target" || name == ".git" {
            continue;
        }
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_workspace(&entry.path(), &to.join(name))?;
        } else if kind.is_file() {
            let copy = to.join(name);
            fs::copy(entry.path(), &copy).with_context(|| format!("copy to {}", copy.display()))?;
        }
    }
    Ok(())
}

fn check(reference_only: bool) -> Result<ExitCode> {
    let hash = objects::current_hash()?;
    let reference = objects::state(&workspace::reference_objects(), &hash)?;
    println!("the reference objects {}", reference.describe());
    let mut good = reference == State::Current;
    if !reference_only {
        let fresh = objects::state(&workspace::fresh_objects(), &hash)?;
        println!("the fresh objects {}", fresh.describe());
        good |= fresh == State::Current;
    }
    if !good {
        println!(
            "run `cargo xtask build-ebpf{}`",
            if reference_only { " --reference" } else { "" }
        );
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn renew_reference(toolchain: &Toolchain) -> Result<()> {
    let (fresh, reference) = (workspace::fresh_objects(), workspace::reference_objects());
    fs::create_dir_all(&reference).with_context(|| format!("create {}", reference.display()))?;
    let hash = objects::current_hash()?;
    if objects::state(&fresh, &hash)? != State::Current {
        bail!(
            "the BPF sources changed after they were compiled; run `cargo xtask build-ebpf --reference` again"
        );
    }
    publish(&fresh, &reference, &hash, objects::file_name)?;
    objects::write(&reference.join(DIGESTS_FILE), objects::digests(&reference)?.as_bytes())?;
    objects::write(&reference.join(TOOLCHAIN_FILE), toolchain.describe()?.as_bytes())?;
    println!("renewed {}", reference.display());
    Ok(())
}

/// Copies the objects; their hash is written last, so that what is half copied never looks current.
fn publish(from: &Path, to: &Path, hash: &str, name: impl Fn(&str) -> String) -> Result<()> {
    let hash_file = to.join(HASH_FILE);
    let unchanged = fs::read_to_string(&hash_file).is_ok_and(|old| old.trim() == hash);
    if !unchanged {
        match fs::remove_file(&hash_file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", hash_file.display()));
            }
            _ => {}
        }
    }
    for object in OBJECTS {
        let path = from.join(name(object));
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        objects::write(&to.join(objects::file_name(object)), &bytes)?;
    }
    objects::write(&hash_file, format!("{hash}\n").as_bytes())
}
