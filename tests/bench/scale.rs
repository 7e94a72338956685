//! A mesh of 100,000 workloads against one of 100: what it costs a proxy to learn it, to keep it and to follow its
//! changes, and whether decisions notice how large it is.

mod decisions;
mod fleet;
mod node;

use std::time::Duration;

use anyhow::Result;
use culvert_tests::topology::Topology;

use self::{decisions::Decisions, node::LargeNode};
use crate::{
    pairs::{each, take},
    report::{Better, Quantity, Report},
    sizes::Sizes,
    stats::Bound,
};

const FEW: usize = 100;
/// Policies that decisions are made under.
const FEW_POLICIES: usize = 10;
/// What a thousand times as much may cost at most where it should cost the same: trees are deeper, and less of them is
/// in the processor's caches.
const FLAT: Bound = Bound::AtMost(4.0);

pub(crate) fn measure(report: &mut Report, sizes: &Sizes) -> Result<()> {
    starts(report, sizes)?;
    for workloads in [sizes.workloads / 10, sizes.workloads] {
        decisions(report, sizes, workloads)?;
    }
    policies(report, sizes)
}

fn starts(report: &mut Report, sizes: &Sizes) -> Result<()> {
    report.section(
        &format!("A node in a mesh of {} workloads, against one of {FEW}", sizes.workloads),
        &format!(
            "One in ten is a service, and each workload belongs to one. A control plane of our own tells the node over \
             TLS; it serves before the node starts. Ready: from the start of the process to the first 200 on \
             `/healthz/ready`, with one pod enrolled. Memory: the peak and, {} s after it was ready, the current size \
             of the process in memory. An update adds or removes one workload: its time is the control plane's from \
             sending it to its acknowledgement, its CPU all that the proxy uses meanwhile.",
            sizes.rest.as_secs()
        ),
        &format!("{FEW}"),
        &format!("{}", sizes.workloads),
    );
    let topologies = [Topology::build()?, Topology::build()?];
    let [few, many] = &topologies;
    let (few, many) = (LargeNode::new(few, FEW)?, LargeNode::new(many, sizes.workloads)?);
    let pairs = take(sizes.starts, || few.start(sizes), || many.start(sizes))?;
    let time = |value: fn(&node::Sample) -> Duration, unit: f64| {
        each(&pairs, |sample| value(sample).as_secs_f64() * unit)
    };
    let quantity = |name, unit| Quantity { name, unit, better: Better::Less };
    report.limited(quantity("time to ready", "s"), &time(|s| s.ready, 1.0), Bound::AtMost(1.0));
    report.row(quantity("proxy's CPU until ready", "s"), &time(|s| s.ready_cpu, 1.0), None);
    let megabytes = |value: fn(&node::Sample) -> u64| each(&pairs, |s| value(s) as f64 / 1e6);
    report.limited(quantity("memory, peak", "MB"), &megabytes(|s| s.peak), Bound::AtMost(200.0));
    report.limited(
        quantity("memory, settled", "MB"),
        &megabytes(|s| s.settled),
        Bound::AtMost(80.0),
    );
    report.row(quantity("one update, told to acknowledged", "µs"), &time(|s| s.update, 1e6), None);
    report.row(quantity("one update, proxy's CPU", "µs"), &time(|s| s.update_cpu, 1e6), None);
    Ok(())
}

fn decisions(report: &mut Report, sizes: &Sizes, workloads: usize) -> Result<()> {
    report.section(
        &format!("Decisions in a mesh of {workloads} workloads, against one of {FEW}"),
        "In the bench's own process, by the proxy's code, on one thread. An update is the message of one workload, \
         decoded and applied while the version before it is in use. Look-ups are of random keys.",
        &format!("{FEW}"),
        &format!("{workloads}"),
    );
    let (mut few, mut many) = (Decisions::new(FEW)?, Decisions::new(workloads)?);
    let rounds = sizes.changes * 100;
    let pairs = take(sizes.pairs, || few.sample(rounds), || many.sample(rounds))?;
    let nanoseconds = |value: fn(&decisions::Sample) -> Duration| {
        each(&pairs, |sample| value(sample).as_secs_f64() * 1e9)
    };
    let quantity = |name, unit| Quantity { name, unit, better: Better::Less };
    let update = each(&pairs, |sample| sample.update.as_secs_f64() * 1e6);
    report.limited(quantity("one update", "µs"), &update, Bound::AtMost(100.0));
    for (name, value) in [
        ("workload by address", nanoseconds(|s| s.identify)),
        ("route to a service", nanoseconds(|s| s.route_service)),
        ("route to a workload", nanoseconds(|s| s.route_workload)),
    ] {
        report.row(quantity(name, "ns"), &value, Some(FLAT));
    }
    Ok(())
}

fn policies(report: &mut Report, sizes: &Sizes) -> Result<()> {
    // As many as there are services.
    let many_policies = sizes.workloads / 10;
    report.section(
        &format!("A verdict under {many_policies} policies, against one under {FEW_POLICIES}"),
        "As above. Each policy is in force in the whole mesh and names one principal; of two one allows, the other denies.",
        &format!("{FEW_POLICIES}"),
        &format!("{many_policies}"),
    );
    let (few, many) = (decisions::verdicts(FEW_POLICIES)?, decisions::verdicts(many_policies)?);
    let rounds = sizes.changes * 100;
    let pairs = take(sizes.pairs, || Ok(few(rounds)), || Ok(many(rounds)))?;
    let quantity = Quantity { name: "verdict", unit: "ns", better: Better::Less };
    report.row(quantity, &each(&pairs, |took| took.as_secs_f64() * 1e9), Some(FLAT));
    Ok(())
}
