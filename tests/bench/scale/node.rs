//! A real proxy that a real control plane tells of a mesh.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use culvert_tests::{
    ca::Ca,
    culvert::{Culvert, Remains, mesh_path},
    mesh_file::MeshFile,
    plane::Plane,
    poll,
    topology::Topology,
};

use super::fleet::Fleet;
use crate::{cpu, sizes::Sizes};

/// A control plane that serves a fleet, and the pods of a topology.
pub(super) struct LargeNode<'t> {
    topology: &'t Topology,
    plane: Plane<'t>,
    fleet: Fleet,
}

/// What one start of the node showed.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) ready: Duration,
    pub(super) ready_cpu: Duration,
    /// In bytes.
    pub(super) peak: u64,
    /// In bytes.
    pub(super) settled: u64,
    pub(super) update: Duration,
    pub(super) update_cpu: Duration,
}

impl<'t> LargeNode<'t> {
    pub(super) fn new(topology: &'t Topology, workloads: usize) -> Result<Self> {
        let fleet = Fleet { workloads };
        MeshFile::new(topology).write(&mesh_path(topology))?;
        fs::write(mesh_path(topology).with_file_name("fleet.yaml"), fleet.file())?;
        let ca = Ca::create(&topology.dir().join("ca"))?;
        Ok(Self { topology, plane: Plane::start(topology, &ca)?, fleet })
    }

    pub(super) fn start(&self, sizes: &Sizes) -> Result<Sample> {
        let Topology { a, a1, .. } = self.topology;
        let start = Instant::now();
        let culvert = Culvert::start_on(&self.plane, a, &[a1], Remains::Nothing, &[])?;
        let ready = start.elapsed();
        let pid = culvert.pid().context("the proxy has ended")?;
        let ready_cpu = cpu::of_threads(pid)?;
        rest(sizes.rest);
        let settled = memory(pid, "VmRSS:")?;
        let peak = memory(pid, "VmHWM:")?;
        let cpu = cpu::of_threads(pid)?;
        let (_, before) = self.acknowledged()?;
        for index in 0..sizes.changes {
            self.change(index)?;
        }
        let changes = u32::try_from(sizes.changes)?;
        let (_, after) = self.acknowledged()?;
        let update = Duration::from_secs_f64(after - before) / changes;
        let update_cpu = cpu::of_threads(pid)?.saturating_sub(cpu) / changes;
        Ok(Sample { ready, ready_cpu, peak, settled, update, update_cpu })
    }

    /// Adds one workload or removes it, in turn, and waits until the node has acknowledged it.
    fn change(&self, index: usize) -> Result<()> {
        let (before, _) = self.acknowledged()?;
        let one_more = self.fleet.file_of_one_more();
        let text = if index.is_multiple_of(2) { one_more } else { "---\n".to_owned() };
        self.plane.set("one.yaml", &text)?;
        let done = poll::within(poll::SOON, || {
            self.acknowledged().is_ok_and(|(after, _)| after > before).then_some(())
        });
        done.context("the node has not acknowledged a change")
    }

    /// How many responses the node has acknowledged, and in how many seconds altogether.
    fn acknowledged(&self) -> Result<(f64, f64)> {
        let metrics = self.plane.metrics()?;
        let of = |name: &str| metrics.sum(name, &[]);
        Ok((of("pilot_xds_send_time_count"), of("pilot_xds_send_time_sum")))
    }
}

#[expect(clippy::disallowed_methods, reason = "an allocator gives memory back as time passes")]
fn rest(time: Duration) {
    std::thread::sleep(time);
}

/// A size in `/proc/<pid>/status`, which counts in KiB, in bytes.
fn memory(pid: u32, name: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let size = text.lines().find_map(|line| line.strip_prefix(name));
    let size = size.and_then(|size| size.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(size.with_context(|| format!("no {name} in {path}"))? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_no_less_than_what_there_is() {
        let own = std::process::id();
        let (now, peak) = (memory(own, "VmRSS:").unwrap(), memory(own, "VmHWM:").unwrap());
        assert!(now > 1 << 20 && peak >= now, "{now} {peak}");
    }
}
