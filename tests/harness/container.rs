//! culvert's image, built as the Dockerfile says but for where the binary and the base come from, and containers of it that
//! get what a pod's manifest gives them, as a container runtime of Kubernetes does it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{chart, culvert, netns::Netns, process::Process, require};

/// What runtimes hide from containers that are not privileged.
const MASKED: [&str; 7] = [
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/sys/firmware",
];
const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// By bit, as `capabilities(7)` numbers them.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Whether images can be built and containers run.
#[must_use]
pub fn is_available() -> bool {
    let probes = [("buildah", "--version"), ("runc", "--version"), ("strip", "--version")];
    probes.into_iter().all(|(program, probe)| require::tool(program, &[probe]))
}

/// An image's files.
#[derive(Debug)]
pub struct Image {
    dir: PathBuf,
}

impl Image {
    /// Builds the Dockerfile's last stage in `dir`, on a base of the libraries that this machine runs the binary with.
    pub fn build(dir: &Path) -> Result<Self> {
        let binary = culvert::binary()?;
        let built = dir.join("built/culvert/target/release/culvert");
        fs::create_dir_all(built.parent().context("it has a folder")?)?;
        run(Command::new("strip").arg("-o").arg(&built).arg(&binary))?;
        let base = dir.join("base");
        for library in libraries(&binary)? {
            let to = base.join(library.strip_prefix("/")?);
            fs::create_dir_all(to.parent().context("it has a folder")?)?;
            fs::copy(&library, &to).with_context(|| format!("copy {}", library.display()))?;
        }
        let repository = chart::deploy().join("..");
        let dockerfile = fs::read_to_string(repository.join("Dockerfile"))?;
        let last = dockerfile.rfind("FROM").and_then(|at| dockerfile.get(at..));
        let last = last.context("the Dockerfile has no stage")?;
        let last = format!("ARG BASE\n{last}");
        let files = [("base.file", "FROM scratch\nCOPY . /\n"), ("culvert.file", &last)];
        for (name, text) in files {
            fs::write(dir.join(name), text)?;
        }
        let mut command = buildah(dir, &dir.join("base.file"));
        run(command.args(["--tag", "localhost/culvert-base"]).arg(&base))?;
        let mut command = buildah(dir, &dir.join("culvert.file"));
        command.arg("--build-arg").arg("BASE=localhost/culvert-base");
        command.arg("--build-context").arg(format!("build={}", dir.join("built").display()));
        command.arg("--output").arg(format!("type=local,dest={}", dir.join("rootfs").display()));
        run(command.arg(&repository))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// Its root file system.
    pub fn root(&self) -> PathBuf {
        self.dir.join("rootfs")
    }
}

fn buildah(dir: &Path, file: &Path) -> Command {
    let mut command = Command::new("buildah");
    command.args(["--storage-driver", "vfs", "--root"]).arg(dir.join("storage"));
    command.arg("--runroot").arg(dir.join("run"));
    // Nothing is pulled, and nothing is run.
    command.args(["build", "--pull=never", "--isolation", "chroot", "--file"]).arg(file);
    command
}

fn libraries(binary: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(binary).output().context("run ldd")?;
    let listed = String::from_utf8(output.stdout)?;
    Ok(listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("start {command:?}"))?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&said));
    Ok(())
}

/// What a container gets that its pod's manifest does not say, or says otherwise in a cluster.
#[derive(Debug, Default)]
pub struct Surroundings<'a> {
    /// Variables; `None` takes one away.
    pub variables: Vec<(&'a str, Option<String>)>,
    /// Folders that it finds where they are.
    pub folders: Vec<PathBuf>,
}

/// A container, which is removed when dropped.
#[derive(Debug)]
pub struct Container {
    id: String,
    process: Process,
}

impl Container {
    /// Starts the first container of `pod` in `netns` with `arguments` in place of its own, if there are any. `dir` is for
    /// its files; `id` must be unique.
    pub fn start(
        image: &Image,
        (dir, id): (&Path, &str),
        netns: &Netns,
        pod: &Value,
        around: &Surroundings<'_>,
        arguments: &[&str],
    ) -> Result<Self> {
        let bundle = dir.join(format!("bundle-{id}"));
        fs::create_dir_all(bundle.join("empty"))?;
        let config = config(image, &bundle, id, pod, around, arguments)?;
        fs::write(bundle.join("config.json"), serde_json::to_vec_pretty(&config)?)?;
        let mut command = Command::new("runc");
        command.args(["run", "--bundle"]).arg(&bundle).arg(id);
        let process = Process::spawn(netns, dir, id, &mut command)?;
        Ok(Self { id: id.to_owned(), process })
    }

    /// The process in it; `None` before it runs, and afterwards.
    pub fn pid(&self) -> Option<u32> {
        let output = Command::new("runc").args(["state", &self.id]).output().ok()?;
        let state: Value = serde_json::from_slice(&output.stdout).ok()?;
        (at(&state, "/status") == "running").then_some(())?;
        at(&state, "/pid").as_u64()?.try_into().ok()
    }

    /// What it has printed.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// SIGTERM to its process.
    pub fn terminate(&self) -> Result<()> {
        self.process.signal(Signal::SIGTERM)
    }

    /// The exit code; `None` when `limit` has passed.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        self.process.wait(limit)?.code()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let removed = Command::new("runc").args(["delete", "--force", &self.id]).output();
        if let Err(error) = removed {
            eprintln!("remove container {}: {error}", self.id);
        }
    }
}

/// The capabilities that this process can give, of those the manifest asks for.
pub fn granted(container: &Value) -> Result<Vec<&'static str>> {
    let permitted = permitted()?;
    let security = at(container, "/securityContext");
    let wants = |name: &str| {
        at(security, "/privileged") == true
            || at(security, "/capabilities/add")
                .as_array()
                .is_some_and(|add| add.contains(&name.into()))
    };
    let all = CAPABILITIES.iter().enumerate();
    Ok(all
        .filter(|(bit, name)| permitted & (1 << bit) != 0 && wants(name))
        .map(|(_, name)| *name)
        .collect())
}

/// The set of capabilities as `/proc/PID/status` shows it.
pub fn mask(names: &[&str]) -> u64 {
    let has = |(bit, name): (usize, &&str)| if names.contains(name) { 1 << bit } else { 0 };
    CAPABILITIES.iter().enumerate().map(has).sum()
}

/// The effective set of a process.
pub fn effective(pid: u32) -> Result<u64> {
    set(&format!("/proc/{pid}/status"), "CapEff:")
}

fn permitted() -> Result<u64> {
    set("/proc/self/status", "CapPrm:")
}

fn set(path: &str, name: &str) -> Result<u64> {
    let status = fs::read_to_string(path)?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no such set")?;
    Ok(u64::from_str_radix(line.trim(), 16)?)
}

/// The runtime's configuration, as of `config.json` of the OCI's runtime specification.
fn config(
    image: &Image,
    bundle: &Path,
    id: &str,
    pod: &Value,
    around: &Surroundings<'_>,
    arguments: &[&str],
) -> Result<Value> {
    let container = pod.pointer("/containers/0").context("the pod has no container")?;
    let security = at(container, "/securityContext");
    let privileged = at(security, "/privileged") == true;
    let mut args = strings(at(container, "/command"));
    if arguments.is_empty() {
        args.extend(strings(at(container, "/args")));
    } else {
        args.extend(arguments.iter().copied().map(str::to_owned));
    }
    let capabilities: Vec<_> =
        granted(container)?.into_iter().map(|name| format!("CAP_{name}")).collect();
    let mut namespaces = vec!["mount", "ipc", "uts"];
    if at(pod, "/hostPID") != true {
        namespaces.push("pid");
    }
    if !privileged {
        namespaces.push("cgroup");
    }
    let namespaces: Vec<_> = namespaces.into_iter().map(|name| json!({ "type": name })).collect();
    let (masked, read_only) =
        if privileged { ([].as_slice(), [].as_slice()) } else { (&MASKED[..], &READ_ONLY[..]) };
    Ok(json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": at(security, "/runAsUser"), "gid": at(security, "/runAsGroup")},
            "args": args,
            "env": variables(container, around),
            "cwd": "/",
            "noNewPrivileges": at(security, "/allowPrivilegeEscalation") == false,
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
        },
        "root": {"path": image.root(), "readonly": at(security, "/readOnlyRootFilesystem") == true},
        "hostname": id,
        "mounts": mounts(bundle, pod, container, around, privileged)?,
        "linux": {
            "cgroupsPath": format!("/{id}"),
            "namespaces": namespaces,
            "maskedPaths": masked,
            "readonlyPaths": read_only,
        },
    }))
}

fn variables(container: &Value, around: &Surroundings<'_>) -> Vec<String> {
    let all = at(container, "/env").as_array().into_iter().flatten();
    let of_manifest = all.filter_map(|variable| {
        let name = at(variable, "/name").as_str()?;
        let value = at(variable, "/value").as_str().unwrap_or("of-the-pod");
        let is_set = around.variables.iter().any(|(other, _)| *other == name);
        (!is_set).then(|| format!("{name}={value}"))
    });
    let set = around.variables.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    of_manifest.chain(set.map(|(name, value)| format!("{name}={value}"))).collect()
}

fn mounts(
    bundle: &Path,
    pod: &Value,
    container: &Value,
    around: &Surroundings<'_>,
    privileged: bool,
) -> Result<Vec<Value>> {
    let of = |kind: &str, at: &str, options: &[&str]| json!({"type": kind, "source": kind, "destination": at, "options": options});
    let writable = if privileged { "rw" } else { "ro" };
    let mut mounts = vec![
        of("proc", "/proc", &["nosuid", "noexec", "nodev"]),
        of("tmpfs", "/dev", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        of("sysfs", "/sys", &["nosuid", "noexec", "nodev", writable]),
    ];
    let bind = |from: &Path, at: &str, options: &[&str]| json!({"type": "bind", "source": from, "destination": at, "options": options});
    for mount in at(container, "/volumeMounts").as_array().into_iter().flatten() {
        let path = at(mount, "/mountPath").as_str().context("a mount without a path")?;
        let mut volumes = at(pod, "/volumes").as_array().into_iter().flatten();
        let volume = volumes.find(|volume| at(volume, "/name") == at(mount, "/name"));
        let volume = volume.with_context(|| format!("{path} is of no volume"))?;
        let propagation = match at(mount, "/mountPropagation").as_str() {
            Some("Bidirectional") => "rshared",
            Some("HostToContainer") => "rslave",
            _ => "rprivate",
        };
        let access = if at(mount, "/readOnly") == true { "ro" } else { "rw" };
        // What is not of the node has no part in this.
        let from = at(volume, "/hostPath/path")
            .as_str()
            .map_or_else(|| bundle.join("empty"), PathBuf::from);
        if at(volume, "/hostPath/type") == "DirectoryOrCreate" {
            fs::create_dir_all(&from)?;
        }
        mounts.push(bind(&from, path, &["rbind", propagation, access]));
    }
    for folder in &around.folders {
        mounts.push(bind(folder, &folder.to_string_lossy(), &["rbind", "rprivate", "ro"]));
    }
    Ok(mounts)
}

/// What is there, which may be nothing.
fn at<'a>(value: &'a Value, pointer: &str) -> &'a Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}
