//! A way from a pod to another one, with or without proxies on it, and what can be measured along it.

use std::{
    net::{Ipv4Addr, TcpListener},
    time::Duration,
};

use anyhow::{Context as _, Result};
use culvert_tests::{
    netns::Netns,
    topology::{Family, Pod},
};

use crate::{
    cpu::{self, Pins},
    load::Target,
    pairs::{self, each},
    report::{Better, Quantity, Report},
    serve::{Cpus, Server},
    sizes::Sizes,
    stats::Bound,
};

/// From one pod to another.
#[derive(Debug)]
pub(crate) struct Path<'t> {
    from: &'t Pod,
    to: &'t Pod,
    pins: Pins,
    proxies: Vec<u32>,
}

/// Bulk throughput and its price.
#[derive(Debug, Clone, Copy)]
struct Bulk {
    gbits: f64,
    /// CPU seconds of the proxies for each 10^9 bytes.
    proxies: f64,
    /// CPU seconds of the whole machine for each 10^9 bytes.
    machine: f64,
}

/// What the comparison is to show.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bounds {
    pub(crate) round_trip: Option<Bound>,
    pub(crate) bulk: Option<Bound>,
    pub(crate) proxies: Option<Bound>,
}

/// Whether the rate of new connections is measured too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Connections {
    Measured,
    Left,
}

impl<'t> Path<'t> {
    /// `proxies` are the processes whose work is counted.
    pub(crate) fn new(from: &'t Pod, to: &'t Pod, proxies: &[Option<u32>]) -> Result<Self> {
        let proxies =
            proxies.iter().copied().collect::<Option<_>>().context("a proxy has ended")?;
        Ok(Self { from, to, pins: Pins::apart()?, proxies })
    }

    /// The server has a port of its own in each sample, so that no 4-tuple is used twice.
    fn load<T>(&self, work: impl FnOnce(Target<'_>) -> Result<T>) -> Result<T> {
        let listener = listen(&self.to.netns)?;
        let to = self.to.at(Family::V4, listener.local_addr()?.port());
        let _server = Server::start(listener, Cpus::One(self.pins.server));
        work(Target { from: &self.from.netns, cpu: self.pins.client, to })
    }

    fn bulk(&self, streams: usize, time: Duration) -> Result<Bulk> {
        self.load(|target| {
            let (proxies, machine) = (self.proxies()?, cpu::of_machine()?);
            let transfer = target.bulk(streams, time)?;
            let (proxies, machine) = (
                self.proxies()?.saturating_sub(proxies),
                cpu::of_machine()?.saturating_sub(machine),
            );
            let gigabytes = transfer.bytes as f64 / 1e9;
            Ok(Bulk {
                gbits: transfer.gbits(),
                proxies: proxies.as_secs_f64() / gigabytes,
                machine: machine.as_secs_f64() / gigabytes,
            })
        })
    }

    fn proxies(&self) -> Result<Duration> {
        self.proxies.iter().map(|pid| cpu::of_process(*pid)).sum()
    }
}

fn listen(netns: &Netns) -> Result<TcpListener> {
    netns
        .run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
        .with_context(|| format!("listen in {}", netns.name()))
}

/// Fills the rows of a table with everything there is to compare.
pub(crate) fn compare(
    report: &mut Report,
    sizes: &Sizes,
    (reference, ours): (&Path<'_>, &Path<'_>),
    bounds: Bounds,
    connections: Connections,
) -> Result<()> {
    for (name, size, count) in [
        ("RTT 64 B, p50", 64, sizes.round_trips),
        ("RTT 16 KiB, p50", 16 << 10, sizes.round_trips / 2),
    ] {
        let sample = |path: &Path<'_>| path.load(|target| target.round_trip(size, count));
        let pairs = pairs::take(sizes.pairs, || sample(reference), || sample(ours))?;
        report.row(Quantity { name, unit: "µs", better: Better::Less }, &pairs, bounds.round_trip);
    }
    if connections == Connections::Measured {
        let sample = |path: &Path<'_>| path.load(|target| target.connections(sizes.connections));
        let pairs = pairs::take(sizes.pairs, || sample(reference), || sample(ours))?;
        let quantity =
            Quantity { name: "new connections, 8 at once", unit: "1/s", better: Better::More };
        report.row(quantity, &pairs, None);
    }
    for streams in [Streams::One, Streams::Eight] {
        let sample = |path: &Path<'_>| path.bulk(streams.count(), sizes.bulk);
        let pairs = pairs::take(sizes.pairs, || sample(reference), || sample(ours))?;
        let [rate, proxies, machine] = streams.quantities();
        report.row(rate, &each(&pairs, |bulk| bulk.gbits), bounds.bulk);
        if reference.proxies.is_empty() {
            let ours: Vec<f64> = pairs.iter().map(|(_, ours)| ours.proxies).collect();
            report.absolute(proxies, &ours);
        } else {
            report.row(proxies, &each(&pairs, |bulk| bulk.proxies), bounds.proxies);
        }
        report.row(machine, &each(&pairs, |bulk| bulk.machine), None);
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Streams {
    One,
    Eight,
}

impl Streams {
    const fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Eight => 8,
        }
    }

    const fn quantities(self) -> [Quantity; 3] {
        let [rate, proxies, machine] = match self {
            Self::One => ["bulk, 1 stream", "proxies' CPU, 1 stream", "machine's CPU, 1 stream"],
            Self::Eight => {
                ["bulk, 8 streams", "proxies' CPU, 8 streams", "machine's CPU, 8 streams"]
            }
        };
        [
            Quantity { name: rate, unit: "Gbit/s", better: Better::More },
            Quantity { name: proxies, unit: "s/GB", better: Better::Less },
            Quantity { name: machine, unit: "s/GB", better: Better::Less },
        ]
    }
}
