//! What the demo prints.

use anyhow::Result;
use culvert_tests::{
    culvert::{Mesh, mesh_path},
    mesh_file::{VIP_PORT, VIP_V4},
    tap::{Report, Segment},
    topology::{Family, Topology},
};

use crate::calls::{self, Call, Outcome, SECRET};

/// The network.
pub(crate) fn topology(topology: &Topology) {
    println!("Two nodes, four pods, one wire between the nodes\n");
    for (node, pods) in
        [(&topology.a, [&topology.a1, &topology.a2]), (&topology.b, [&topology.b1, &topology.x])]
    {
        println!("  node {}", node.name);
        for pod in pods {
            let role = if pod.name == topology.x.name {
                "outside the mesh".to_owned()
            } else {
                pod.identity()
            };
            let (v4, v6) = (pod.ip(Family::V4), pod.ip(Family::V6));
            println!("    {:<3} {v4:<12} {v6:<16} {role}", pod.name);
        }
    }
}

/// One call.
pub(crate) fn call(call: &Call<'_>, outcome: &Outcome) {
    println!("  {:<24} {}", call.what, outcome.reply);
    println!("    {}", outcome.path);
}

/// What passed between the nodes meanwhile.
pub(crate) fn wire(report: &Report, topology: &Topology) {
    println!("\nThe wire between the nodes");
    let hbone = report.hbone().count();
    println!(
        "  port 15008: {hbone} segments, {} complete TLS records, {} with \"{SECRET}\" in them",
        report.tls_records(),
        report.hbone().filter(|segment| segment.needle).count(),
    );
    let not_tls = report.not_tls();
    if not_tls.is_empty() {
        println!("  port 15008: nothing but TLS records in either direction");
    }
    for line in not_tls {
        println!("  port 15008: NOT TLS: {line}");
    }
    let to_x = Family::BOTH.map(|family| topology.x.ip(family));
    let (outside, inside): (Vec<&Segment>, Vec<&Segment>) = report
        .plaintext()
        .partition(|one| to_x.contains(&one.src.ip()) || to_x.contains(&one.dst.ip()));
    println!(
        "  with pod x, outside the mesh: {} plaintext segments, {} with \"{SECRET}\" in them",
        outside.len(),
        outside.iter().filter(|segment| segment.needle).count(),
    );
    println!("  between pods of the mesh: {} plaintext segments", inside.len());
    if report.missed > 0 {
        println!("  the tap missed {} frames", report.missed);
    }
}

/// What the BPF programs counted.
pub(crate) fn counters(mesh: &Mesh<'_>) -> Result<()> {
    println!("\nBPF programs");
    for node in [&mesh.a, &mesh.b] {
        println!("  node {}", node.node());
        for (program, outcome, count) in calls::counters(node)? {
            println!("    {program:<16} {outcome:<24} {count}");
        }
    }
    Ok(())
}

/// How to look around while everything is up.
pub(crate) fn how_to_enter(topology: &Topology, port: u16) {
    println!("\nEverything stays up until Ctrl-C. To call from pod a1:");
    let enter =
        |netns: &culvert_tests::netns::Netns| format!("nsenter --net={}", netns.path().display());
    let b1 = topology.b1.ip(Family::V4);
    println!("  {} curl http://{b1}:{port}/", enter(&topology.a1.netns));
    println!("  {} curl http://{VIP_V4}:{VIP_PORT}/", enter(&topology.a1.netns));
    println!("To see a node's metrics, its log and the wire:");
    println!("  {} curl http://127.0.0.1:15020/metrics", enter(&topology.a.netns));
    println!("  tail -f {}", topology.a.dir.join("culvert.log").display());
    println!("  {} tcpdump -ni to-a", enter(&topology.wire));
    println!("Policies and workloads can be edited in {}.", mesh_path(topology).display());
}
