//! Between pods of two nodes: culvert against no mesh at all, and against itself behind iptables.

use anyhow::{Context as _, Result};
use culvert_tests::{
    ca::Ca,
    culvert::{Culvert, Remains, mesh_path},
    flow_log::{Direction, Flow},
    mesh_file::{MeshFile, Protocol},
    poll,
    topology::Topology,
};

use crate::{
    path::{Bounds, Connections, Path, compare},
    redirect,
    report::Report,
    sizes::Sizes,
    stats::Bound,
};

/// With a mesh and without, between the same two nodes.
pub(crate) fn against_direct(report: &mut Report, sizes: &Sizes) -> Result<()> {
    let topology = Topology::build()?;
    let Topology { a1, a2, b1, x, a, b, .. } = &topology;
    let file =
        MeshFile::default().workload(a1, a, Protocol::Hbone).workload(b1, b, Protocol::Hbone);
    file.write(&mesh_path(&topology))?;
    let ca = Ca::create(&topology.dir().join("ca"))?;
    let on_a = Culvert::start(&topology, a, &[a1], &ca, Remains::Nothing)?;
    let on_b = Culvert::start(&topology, b, &[b1], &ca, Remains::Nothing)?;
    let proxies = [on_a.pid(), on_b.pid()];

    let direct = Path::new(a2, x, &[])?;
    report.section(
        "HBONE across nodes, against direct",
        "From a1 on node a to b1 on node b, both in the mesh: two proxies, mutual TLS and HTTP/2 between them. \
         Direct: from a2 on node a to x on node b, both outside the mesh, over the same nodes and wire. \
         The client's threads are pinned to the first CPU, the server's to the last; the proxies are not pinned.",
        "direct",
        "HBONE",
    );
    let hbone = Path::new(a1, b1, &proxies)?;
    compare(report, sizes, (&direct, &hbone), Bounds::default(), Connections::Measured)?;
    seen(&on_b, |flow| flow.goes(Direction::Inbound) && flow.identities().is_some())?;

    report.section(
        "Passthrough across nodes, against direct",
        "From a1 on node a, in the mesh, to x on node b, outside it: one proxy, plain TCP. Direct and pinning: as above.",
        "direct",
        "passthrough",
    );
    let passthrough = Path::new(a1, x, &proxies)?;
    compare(report, sizes, (&direct, &passthrough), Bounds::default(), Connections::Measured)?;
    seen(&on_a, |flow| flow.goes(Direction::Outbound) && flow.identities().is_none())
}

/// The same binary behind iptables REDIRECT and behind its own steering, each between two nodes of its own.
pub(crate) fn against_redirect(report: &mut Report, sizes: &Sizes) -> Result<()> {
    let topologies = [Topology::build()?, Topology::build()?];
    let [redirected, steered] = &topologies;
    redirect::install(&redirected.a1.netns)?;
    let behind_iptables = client_node(redirected, &["--steering", "redirect"])?;
    let behind_bpf = client_node(steered, &["--steering", "ebpf"])?;

    report.section(
        "Passthrough across nodes, against the same proxy behind iptables REDIRECT",
        "From a1 on node a, in the mesh, to x on node b, outside it: one proxy, plain TCP. The reference is the same \
         binary with `--steering redirect` and Istio's in-pod rules, on a copy of the network. Pinning: the client's \
         threads on the first CPU, the server's on the last. New connections are left out: behind REDIRECT they stall \
         on ports that conntrack still holds.",
        "REDIRECT",
        "eBPF",
    );
    let reference = Path::new(&redirected.a1, &redirected.x, &[behind_iptables.pid()])?;
    let ours = Path::new(&steered.a1, &steered.x, &[behind_bpf.pid()])?;
    let bounds = Bounds {
        round_trip: Some(Bound::AtMost(1.0)),
        bulk: Some(Bound::AtLeast(1.0)),
        proxies: Some(Bound::AtMost(0.9)),
    };
    compare(report, sizes, (&reference, &ours), bounds, Connections::Left)?;
    seen(&behind_iptables, |flow| flow.goes(Direction::Outbound))?;
    seen(&behind_bpf, |flow| flow.goes(Direction::Outbound))
}

/// Numbers of connections that went past the proxy would look good.
fn seen(culvert: &Culvert<'_>, wanted: impl Fn(&Flow) -> bool) -> Result<()> {
    poll::within(poll::SOON, || culvert.flows().iter().any(&wanted).then_some(())).with_context(
        || format!("the load did not go through the proxy of {} as it should", culvert.node()),
    )
}

fn client_node<'t>(topology: &'t Topology, steering: &[&str]) -> Result<Culvert<'t>> {
    let Topology { a1, a, .. } = topology;
    MeshFile::default().workload(a1, a, Protocol::Hbone).write(&mesh_path(topology))?;
    let ca = Ca::create(&topology.dir().join("ca"))?;
    Culvert::start_with(topology, a, &[a1], &ca, Remains::Nothing, steering)
}
