//! A culvert process on a node: its files, its start and its end, and what it says about itself.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    ca::Ca,
    flow_log::{Flow, flows},
    http,
    mesh_file::{MeshFile, replace},
    metrics::Metrics,
    plane::Plane,
    poll,
    process::{Finished, Process, finish},
    topology::{Node, Pod, Topology},
};

/// What a start, with its BPF objects and listeners, may take on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(30);

/// `CULVERT_BIN`, else the `culvert` that was built beside the running program.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("CULVERT_BIN") {
        return Ok(PathBuf::from(path));
    }
    let own = std::env::current_exe().context("find the running program")?;
    let path = own
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("culvert"))
        .find(|path| path.is_file());
    path.with_context(|| {
        format!("no culvert beside {}; run `cargo build -p culvert` first", own.display())
    })
}

/// What the elder of two processes logs once it has met the other.
const MET: &str = "another process takes over";

/// What stays of a proxy after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remains {
    /// `--ephemeral`: nothing.
    Nothing,
    /// Pinned programs and the pods' settings, until [`Culvert`] is dropped.
    Pins,
}

/// A node's proxy; dropping it ends the process and removes what it left.
#[derive(Debug)]
pub struct Culvert<'t> {
    node: &'t Node,
    arguments: Vec<String>,
    process: Option<Process>,
}

impl<'t> Culvert<'t> {
    /// Writes the node's pods file, starts the proxy and waits until it is ready.
    pub fn start(
        topology: &'t Topology,
        node: &'t Node,
        pods: &[&Pod],
        ca: &Ca,
        remains: Remains,
    ) -> Result<Self> {
        Self::start_with(topology, node, pods, ca, remains, &[])
    }

    /// Like [`Culvert::start`], with more arguments; one that it would have anyway is replaced.
    pub fn start_with(
        topology: &'t Topology,
        node: &'t Node,
        pods: &[&Pod],
        ca: &Ca,
        remains: Remains,
        more: &[&str],
    ) -> Result<Self> {
        let arguments = arguments(node, &mesh_path(topology), ca.dir());
        Self::start_by(node, pods, arguments, remains, more)
    }

    /// Like [`Culvert::start_with`], with mesh and certificates from a control plane.
    pub fn start_on(
        plane: &Plane<'t>,
        node: &'t Node,
        pods: &[&Pod],
        remains: Remains,
        more: &[&str],
    ) -> Result<Self> {
        Self::start_by(node, pods, plane_arguments(plane, node), remains, more)
    }

    fn start_by(
        node: &'t Node,
        pods: &[&Pod],
        arguments: Vec<String>,
        remains: Remains,
        more: &[&str],
    ) -> Result<Self> {
        let mut culvert = Self::begin(node, pods, arguments, remains, more)?;
        culvert.wait_ready()?;
        Ok(culvert)
    }

    /// Starts the proxy without waiting until it is ready.
    fn begin(
        node: &'t Node,
        pods: &[&Pod],
        mut arguments: Vec<String>,
        remains: Remains,
        more: &[&str],
    ) -> Result<Self> {
        write_pods(node, pods)?;
        if let Some(replaced) = arguments
            .iter()
            .position(|argument| argument.starts_with("--") && more.contains(&argument.as_str()))
        {
            arguments.drain(replaced..replaced + 2);
        }
        arguments.extend(more.iter().copied().map(str::to_owned));
        if remains == Remains::Nothing {
            arguments.push("--ephemeral".to_owned());
        }
        let mut culvert = Self { node, arguments, process: None };
        culvert.launch()?;
        Ok(culvert)
    }

    /// Gives the next [`Culvert::launch`] this value of a flag.
    pub fn set_flag(&mut self, flag: &str, value: &str) {
        if let Some(at) = self.arguments.iter().position(|argument| argument == flag) {
            self.arguments.drain(at..at + 2);
        }
        self.arguments.extend([flag, value].map(str::to_owned));
    }

    /// Starts it again, after [`Culvert::kill`] or [`Culvert::terminate`], without waiting until it is ready.
    pub fn launch(&mut self) -> Result<()> {
        let mut command = Command::new(binary()?);
        command.args(&self.arguments).envs(ENVIRONMENT);
        let process = Process::spawn(&self.node.netns, &self.node.dir, "culvert", &mut command)?;
        self.process = Some(process);
        Ok(())
    }

    /// Starts another process beside the one that runs, which hands the node over to it; gives that one. Waits until the new one
    /// answers for the node, which is before it is ready.
    pub fn succeed(&mut self) -> Result<Process> {
        let before = self.process.take().context("culvert is not running")?;
        let met = self.log().matches(MET).count();
        self.launch()?;
        let process = self.process.as_mut().context("culvert is not running")?;
        let log = self.node.dir.join("culvert.log");
        let outcome = poll::within(START_LIMIT, || {
            let log = fs::read_to_string(&log).unwrap_or_default();
            (log.matches(MET).count() > met || process.ended().is_some()).then_some(())
        });
        ensure!(outcome.is_some(), "the two processes have not met:\n{}", self.log_tail());
        Ok(before)
    }

    /// Makes a process that [`Culvert::succeed`] gave the only one again; the newer one must have ended.
    pub fn restore(&mut self, process: Process) {
        self.process = Some(process);
    }

    /// The process that the node is carried by.
    pub fn process(&mut self) -> Result<&mut Process> {
        self.process.as_mut().context("culvert is not running")
    }

    /// The control socket of the process in a seat.
    pub fn control_socket(&self, seat: u8) -> PathBuf {
        Path::new("/run/culvert").join(&self.node.name).join(format!("control-{seat}.sock"))
    }

    /// Waits until the node says that every pod is captured and its state is loaded.
    pub fn wait_ready(&mut self) -> Result<()> {
        let node = self.node;
        let process = self.process.as_mut().context("culvert is not running")?;
        let outcome = poll::within(START_LIMIT, || {
            if let Some(status) = process.ended() {
                return Some(Err(status));
            }
            let reply = node.netns.run(|| http::request("GET", local(15021), "/healthz/ready"));
            reply.is_ok_and(|reply| reply.status == 200).then_some(Ok(()))
        });
        match outcome {
            Some(Ok(())) => Ok(()),
            Some(Err(status)) => {
                bail!("culvert on {} ended with {status}:\n{}", node.name, self.log_tail())
            }
            None => bail!(
                "culvert on {} is not ready after {START_LIMIT:?}:\n{}",
                node.name,
                self.log_tail()
            ),
        }
    }

    /// Replaces the node's pods file.
    pub fn set_pods(&self, pods: &[&Pod]) -> Result<()> {
        write_pods(self.node, pods)
    }

    /// Replaces the node's pods file by one in which each pod has these annotations.
    pub fn annotate(&self, pods: &[(&Pod, &[(&str, &str)])]) -> Result<()> {
        write_annotated(self.node, pods)
    }

    /// The node's name.
    pub fn node(&self) -> &str {
        &self.node.name
    }

    /// Where its maps and links are pinned: the folder of the one layout that the node has.
    pub fn pins(&self) -> Result<PathBuf> {
        let node = Path::new("/sys/fs/bpf/culvert").join(&self.node.name);
        let entries = fs::read_dir(&node).with_context(|| format!("read {}", node.display()))?;
        let layout =
            entries.flatten().find(|entry| entry.file_name().to_string_lossy().starts_with('v'));
        Ok(layout.context("nothing is pinned")?.path())
    }

    /// The process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        drop(self.process.take());
    }

    /// SIGTERM, and how it ended.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut process = self.process.take().context("culvert is not running")?;
        process.signal(Signal::SIGTERM)?;
        process
            .wait(limit)
            .with_context(|| format!("culvert on {} ignores SIGTERM for {limit:?}", self.node.name))
    }

    /// A scrape of its metrics.
    pub fn metrics(&self) -> Result<Metrics> {
        let reply = self.node.netns.run(|| http::request("GET", local(15020), "/metrics"))?;
        ensure!(reply.status == 200, "metrics of {}: status {}", self.node.name, reply.status);
        Ok(Metrics::parse(&reply.body))
    }

    /// A request to its admin port.
    pub fn admin(&self, method: &str, path: &str) -> Result<http::Reply> {
        self.node.netns.run(|| http::request(method, local(15000), path))
    }

    /// Everything it has logged since the topology was built.
    pub fn log(&self) -> String {
        fs::read_to_string(self.node.dir.join("culvert.log")).unwrap_or_default()
    }

    /// Its access log.
    pub fn flows(&self) -> Vec<Flow> {
        flows(&self.log())
    }

    /// Waits for the access log line that `wanted` accepts.
    ///
    /// # Panics
    /// With all lines when it does not appear.
    #[track_caller]
    pub fn flow(&self, what: &str, wanted: impl Fn(&Flow) -> bool) -> Flow {
        match poll::within(poll::SOON, || self.flows().into_iter().find(|flow| wanted(flow))) {
            Some(flow) => flow,
            None => {
                panic!("{}: no access log line for {what}:\n{:#?}", self.node.name, self.flows())
            }
        }
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines.get(lines.len().saturating_sub(40)..).unwrap_or_default().join("\n")
    }
}

impl Drop for Culvert<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- culvert on {}, last lines:\n{}", self.node.name, self.log_tail());
        }
        if self.process.is_some()
            && let Err(error) = self.terminate(Duration::from_secs(5))
        {
            eprintln!("{error:#}; killed");
        }
        match cleanup(self.node) {
            Ok(finished) if finished.code == 0 => {}
            Ok(finished) => eprintln!("culvert cleanup of {}: {finished:?}", self.node.name),
            Err(error) => eprintln!("culvert cleanup of {}: {error:#}", self.node.name),
        }
    }
}

/// JSON lines with the completion of every connection.
pub const ENVIRONMENT: [(&str, &str); 2] = [("LOG_FORMAT", "json"), ("RUST_LOG", "info")];

/// The arguments of `culvert run` for a node whose pods file is in its folder.
pub fn arguments(node: &Node, mesh: &Path, ca: &Path) -> Vec<String> {
    let files = [("--mesh", mesh), ("--ca-dir", ca)];
    let files = files.map(|(flag, path)| [flag.to_owned(), path.to_string_lossy().into_owned()]);
    base_arguments(node).into_iter().chain(files.into_iter().flatten()).collect()
}

fn plane_arguments(plane: &Plane<'_>, node: &Node) -> Vec<String> {
    base_arguments(node).into_iter().chain(plane.arguments(node)).collect()
}

/// Those that do not say where mesh and certificates come from.
fn base_arguments(node: &Node) -> Vec<String> {
    let pods = pods_path(node);
    ["run", "--node", &node.name, "--pods", &pods.to_string_lossy(), "--drain", "1s"]
        .map(str::to_owned)
        .to_vec()
}

/// Runs `culvert cleanup` for a node whose proxy has ended.
pub fn cleanup(node: &Node) -> Result<Finished> {
    let mut command = Command::new(binary()?);
    command.args(["cleanup", "--node", &node.name]);
    finish(&node.netns, &mut command, Duration::from_secs(20))
}

/// The mesh file, which both nodes or their control plane read.
pub fn mesh_path(topology: &Topology) -> PathBuf {
    topology.dir().join("mesh/mesh.yaml")
}

/// Where the node reads its pods.
pub fn pods_path(node: &Node) -> PathBuf {
    node.dir.join("pods.yaml")
}

/// Replaces the node's pods file.
pub fn write_pods(node: &Node, pods: &[&Pod]) -> Result<()> {
    let plain: Vec<_> = pods.iter().map(|pod| (*pod, [].as_slice())).collect();
    write_annotated(node, &plain)
}

fn write_annotated(node: &Node, pods: &[(&Pod, &[(&str, &str)])]) -> Result<()> {
    let pods: Vec<_> = pods
        .iter()
        .map(|(pod, annotations)| {
            json!({
                "name": pod.name,
                "namespace": pod.namespace,
                "serviceAccount": pod.service_account,
                "netns": pod.netns.path(),
                "annotations": annotations.iter().copied().collect::<BTreeMap<_, _>>(),
            })
        })
        .collect();
    replace(&pods_path(node), &serde_saphyr::to_string(&json!({ "pods": pods }))?)
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// A mesh of both nodes: what most scenarios start with.
#[derive(Debug)]
pub struct Mesh<'t> {
    /// The proxy of a1 and a2.
    pub a: Culvert<'t>,
    /// The proxy of b1.
    pub b: Culvert<'t>,
    /// The authority both use.
    pub ca: Ca,
    /// Who tells both of the mesh; `None` if files do.
    pub plane: Option<Plane<'t>>,
    topology: &'t Topology,
}

impl<'t> Mesh<'t> {
    /// Writes the mesh file and a root of trust, and starts a control plane that serves them, and both nodes on it.
    pub fn start(topology: &'t Topology, file: &MeshFile, remains: Remains) -> Result<Self> {
        Self::start_with(topology, file, remains, &[])
    }

    /// Like [`Mesh::start`], with more arguments for both nodes, as [`Culvert::start_with`] takes them.
    pub fn start_with(
        topology: &'t Topology,
        file: &MeshFile,
        remains: Remains,
        more: &[&str],
    ) -> Result<Self> {
        file.write(&mesh_path(topology))?;
        let ca = Ca::create(&topology.dir().join("ca"))?;
        let plane = Plane::start(topology, &ca)?;
        let arguments = |node: &Node| plane_arguments(&plane, node);
        let (a, b) = start_both(topology, arguments, remains, more)?;
        Ok(Self { a, b, ca, plane: Some(plane), topology })
    }

    /// Like [`Mesh::start`], but both nodes read the mesh file and sign by themselves.
    pub fn start_from_files(
        topology: &'t Topology,
        file: &MeshFile,
        remains: Remains,
    ) -> Result<Self> {
        let mesh = mesh_path(topology);
        file.write(&mesh)?;
        let ca = Ca::create(&topology.dir().join("ca"))?;
        let arguments = |node: &Node| arguments(node, &mesh, ca.dir());
        let (a, b) = start_both(topology, arguments, remains, &[])?;
        Ok(Self { a, b, ca, plane: None, topology })
    }

    /// Replaces the mesh file.
    pub fn set(&self, file: &MeshFile) -> Result<()> {
        file.write(&mesh_path(self.topology))
    }
}

/// Both at once, which takes less time than one after the other.
fn start_both<'t>(
    topology: &'t Topology,
    arguments: impl Fn(&Node) -> Vec<String>,
    remains: Remains,
    more: &[&str],
) -> Result<(Culvert<'t>, Culvert<'t>)> {
    let begin = |node, pods: &[&Pod]| Culvert::begin(node, pods, arguments(node), remains, more);
    let mut a = begin(&topology.a, &[&topology.a1, &topology.a2])?;
    let mut b = begin(&topology.b, &[&topology.b1])?;
    a.wait_ready()?;
    b.wait_ready()?;
    Ok((a, b))
}
