//! Finds and loads the BPF objects.

use std::path::{Path, PathBuf};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{Program, ProgramError},
};
use culvert_sys::netns::Netns;
use culvert_tests::require;

/// The pod that a loaded `pod` object believes to be in.
pub(crate) const POD_ID: u32 = 7;

/// Whether the objects are there and this process may load them.
pub(crate) fn available() -> bool {
    require::bpf(|| {
        let pod = path("pod");
        if !pod.exists() {
            return Some(format!(
                "{} is missing; build it: cargo xtask build-ebpf, or set CULVERT_BPF_DIR",
                pod.display()
            ));
        }
        loader("pod").load_file(pod).err().map(|error| format!("BPF maps cannot be made: {error}"))
    })
}

/// A loader for the object `name`, with logging off.
pub(crate) fn loader(name: &str) -> EbpfLoader<'static> {
    let mut loader = EbpfLoader::new();
    loader.verifier_log_level(VerifierLogLevel::STATS);
    loader.override_global("AYA_LOG_LEVEL", &0_u8, false);
    loader.override_global("POD_ID", &POD_ID, name == "pod");
    loader
}

/// The object `pod` for each thing that a node can do while the proxy is gone, as the setting `when-down` has it.
pub(crate) fn pods() -> [(&'static str, Ebpf); 2] {
    [("closed", &0_u32), ("open", &1)].map(|(when_down, global)| {
        let mut loader = loader("pod");
        loader.override_global("OPEN_WHEN_DOWN", global, true);
        (when_down, open_with(loader, "pod"))
    })
}

/// Loads the object `name`; its programs are not loaded yet.
pub(crate) fn open(name: &str) -> Ebpf {
    open_with(loader(name), name)
}

/// Loads the object `name` with a prepared loader.
pub(crate) fn open_with(mut loader: EbpfLoader<'_>, name: &str) -> Ebpf {
    let path = path(name);
    loader.load_file(&path).unwrap_or_else(|error| panic!("load {}: {error}", path.display()))
}

/// Passes a program through the verifier.
#[expect(clippy::panic_in_result_fn, reason = "a program of another type is a mistake of the test")]
pub(crate) fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::SockOps(program) => program.load(),
        Program::SkLookup(program) => program.load(),
        Program::SchedClassifier(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        other => panic!("no object holds a program of type {:?}", other.prog_type()),
    }
}

/// The marking programs that this kernel has the helpers for; the rest is said to be skipped.
pub(crate) fn marking_programs() -> &'static [&'static str] {
    if Netns::current().unwrap().cookie().unwrap().is_some() {
        return &["mark_connect", "mark_noted"];
    }
    println!(
        "skipped in part: mark_connect, because sockops cannot read a netns cookie before Linux 5.15"
    );
    &["mark_noted"]
}

/// Whether this kernel has the helpers of the program; says what is skipped.
pub(crate) fn is_for_this_kernel(program: &str) -> bool {
    match program {
        "mark_connect" => marking_programs().contains(&program),
        "reuse_bind4" | "reuse_bind6" => {
            let new = kernel() >= (6, 1);
            if !new {
                println!(
                    "skipped in part: {program}, because bind programs set no option before Linux 6.1"
                );
            }
            new
        }
        _ => true,
    }
}

fn kernel() -> (u32, u32) {
    let uname = nix::sys::utsname::uname().unwrap();
    let release = uname.release().to_str().unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// The repository's `bpf-fixtures`.
pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../bpf-fixtures")
}

fn path(name: &str) -> PathBuf {
    match std::env::var_os("CULVERT_BPF_DIR") {
        // As `build-ebpf` names them, or as the compiler does.
        Some(dir) => [format!("{name}.o"), name.to_owned()]
            .map(|file| Path::new(&dir).join(file))
            .into_iter()
            .find(|path| path.exists())
            .unwrap_or_else(|| Path::new(&dir).join(format!("{name}.o"))),
        None => {
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../target/culvert-bpf/{name}.o"))
        }
    }
}
