//! A `culvert controlplane` on the network: its files, its start and its end, and what nodes need to find it.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    ca::Ca,
    culvert::{ENVIRONMENT, binary, mesh_path},
    http,
    metrics::Metrics,
    poll,
    process::Process,
    topology::{Node, Topology},
};

/// Where it listens, on node a's end of the wire.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const PORT: u16 = 15012;
/// Where its metrics are.
const STATS_PORT: u16 = 15014;
const START_LIMIT: Duration = Duration::from_secs(30);

/// A control plane beside node a's proxy, which serves the directory of the mesh file; dropping it ends the process.
#[derive(Debug)]
pub struct Plane<'t> {
    topology: &'t Topology,
    root: PathBuf,
    arguments: Vec<String>,
    process: Option<Process>,
}

impl<'t> Plane<'t> {
    /// Gives both nodes a token, starts a control plane that signs as `ca`, and waits until it serves.
    pub fn start(topology: &'t Topology, ca: &Ca) -> Result<Self> {
        let config = mesh_path(topology);
        let config = config.parent().context("the mesh file is in no folder")?;
        let mut tokens = String::new();
        for node in [&topology.a, &topology.b] {
            let token = format!("token-of-{}", node.name);
            writeln!(tokens, "{}: {token}", node.name)?;
            write_secret(&token_path(node), &token)?;
        }
        let tokens_path = topology.dir().join("tokens.yaml");
        write_secret(&tokens_path, &tokens)?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let arguments = [
            "controlplane",
            "--config",
            &text(config),
            "--ca-dir",
            &text(ca.dir()),
            "--node-tokens",
            &text(&tokens_path),
            "--listen",
            &format!("[::]:{PORT}"),
            "--name",
            &ADDRESS.to_string(),
            "--drain",
            "0s",
        ]
        .map(str::to_owned)
        .to_vec();
        let root = ca.dir().join("ca.pem");
        let mut plane = Self { topology, root, arguments, process: None };
        plane.launch()?;
        plane.wait_ready()?;
        Ok(plane)
    }

    /// Starts it again, after [`Plane::kill`], without waiting until it serves.
    pub fn launch(&mut self) -> Result<()> {
        let mut command = Command::new(binary()?);
        command.args(&self.arguments).envs(ENVIRONMENT);
        let (netns, dir) = (&self.topology.a.netns, self.topology.dir());
        self.process = Some(Process::spawn(netns, dir, "controlplane", &mut command)?);
        Ok(())
    }

    /// Waits until it serves.
    pub fn wait_ready(&mut self) -> Result<()> {
        let process = self.process.as_mut().context("the control plane is not running")?;
        let netns = &self.topology.a.netns;
        let outcome = poll::within(START_LIMIT, || {
            if process.ended().is_some() {
                return Some(false);
            }
            let reply = netns.run(|| http::request("GET", stats(), "/ready"));
            reply.is_ok_and(|reply| reply.status == 200).then_some(true)
        });
        match outcome {
            Some(true) => Ok(()),
            Some(false) => bail!("the control plane has ended:\n{}", self.log()),
            None => bail!("the control plane does not serve:\n{}", self.log()),
        }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        drop(self.process.take());
    }

    /// What `culvert run` on `node` has to be told to find it.
    pub fn arguments(&self, node: &Node) -> Vec<String> {
        let (address, root) =
            (format!("https://{ADDRESS}:{PORT}"), self.root.to_string_lossy().into_owned());
        let token = token_path(node).to_string_lossy().into_owned();
        [
            ("--xds-address", &address),
            ("--xds-root", &root),
            ("--ca-address", &address),
            ("--ca-root", &root),
            ("--auth-token", &token),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value.clone()])
        .collect()
    }

    /// Replaces a file beside the mesh file.
    pub fn set(&self, name: &str, text: &str) -> Result<()> {
        crate::mesh_file::replace(&mesh_path(self.topology).with_file_name(name), text)
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.topology.dir().join("controlplane.log")).unwrap_or_default()
    }

    /// A scrape of its metrics.
    pub fn metrics(&self) -> Result<Metrics> {
        let netns = &self.topology.a.netns;
        let reply = netns.run(|| http::request("GET", stats(), "/metrics"))?;
        ensure!(reply.status == 200, "metrics of the control plane: status {}", reply.status);
        Ok(Metrics::parse(&reply.body))
    }

    /// Its record of certificates.
    pub fn issued(&self) -> String {
        fs::read_to_string(self.root.with_file_name("issued.jsonl")).unwrap_or_default()
    }
}

impl Drop for Plane<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n");
            eprintln!("--- control plane, last lines:\n{tail}");
        }
    }
}

/// Where nodes connect to it.
pub(crate) fn address() -> SocketAddr {
    (ADDRESS, PORT).into()
}

fn stats() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, STATS_PORT).into()
}

fn token_path(node: &Node) -> PathBuf {
    node.dir.join("token")
}

fn write_secret(path: &Path, text: &str) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    let opened = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    opened
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("write {}", path.display()))
}
