//! The calls of the demo, and how the nodes' access logs say that each one travelled.

use std::{net::SocketAddr, process::Command, time::Duration};

use anyhow::{Context as _, Result};
use culvert_tests::{
    culvert::{Culvert, Mesh},
    flow_log::{Direction, Flow},
    http,
    mesh_file::{VIP_PORT, VIP_V4},
    poll,
    process::finish,
    topology::{Family, Pod, Topology},
};

use crate::family_name;

/// Part of every request's path: nobody on the way between mesh pods may read it.
pub(crate) const SECRET: &str = "swordfish";

/// One HTTP request from a pod.
#[derive(Debug)]
pub(crate) struct Call<'t> {
    pub(crate) from: &'t Pod,
    pub(crate) to: SocketAddr,
    pub(crate) what: String,
}

/// What came of a call.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The first line of the reply, or what the client said instead.
    pub(crate) reply: String,
    /// The way it took, by the access logs.
    pub(crate) path: String,
}

/// The demo's calls in order.
pub(crate) fn script(topology: &Topology, port: u16) -> Vec<Call<'_>> {
    let Topology { a1, a2, b1, x, .. } = topology;
    let mut calls = Vec::new();
    for (from, to) in [(a1, b1), (a1, a2), (a1, x), (x, b1), (a2, b1)] {
        for family in Family::BOTH {
            let what = format!("{} -> {} by {}", from.name, to.name, family_name(family));
            calls.push(Call { from, to: to.at(family, port), what });
        }
    }
    if let Ok(vip) = VIP_V4.parse() {
        let what = format!("{} -> service ledger", a1.name);
        calls.insert(2, Call { from: a1, to: SocketAddr::new(vip, VIP_PORT), what });
    }
    calls
}

/// Makes the call and reads from both nodes' logs how it went.
pub(crate) fn make(call: &Call<'_>, mesh: &Mesh<'_>) -> Result<Outcome> {
    let nodes = [&mesh.a, &mesh.b];
    let before = nodes.map(|node| node.flows().len());
    let reply = request(call)?;
    let fresh = || {
        nodes.iter().zip(before).flat_map(|(node, seen)| {
            node.flows().into_iter().skip(seen).map(|flow| (node.node().to_owned(), flow))
        })
    };
    // The line is written when the connection has ended, which the client does not wait for.
    let path = poll::within(Duration::from_secs(3), || path(&fresh().collect::<Vec<_>>()));
    Ok(Outcome { reply, path: path.unwrap_or_else(|| "no node saw it".to_owned()) })
}

/// `None` while the lines that must come are not all there.
fn path(flows: &[(String, Flow)]) -> Option<String> {
    let find = |direction| flows.iter().find(move |(_, flow)| flow.goes(direction));
    let outbound = find(Direction::Outbound);
    let inbound = find(Direction::Inbound);
    if let Some((node, flow)) = inbound
        && let Some(error) = flow.error()
    {
        return Some(format!("refused by {node}: {error}"));
    }
    match (outbound, inbound) {
        (Some((_, flow)), _) if flow.error().is_some() => flow.error(),
        (Some((source, flow)), Some((target, _))) => {
            let (from, to) = flow.identities()?;
            let way = if source == target { "on one node" } else { "between the nodes" };
            Some(format!("HBONE {way}\n      {from}\n      {to}"))
        }
        (Some((_, flow)), None) if flow.identities().is_none() => {
            Some(format!("plaintext passthrough to {}", flow.field("dst.addr")?))
        }
        (None, Some((_, flow))) if flow.identities().is_none() => {
            Some(format!("plaintext let in to {}", flow.field("dst.addr")?))
        }
        // HBONE, of which the other end's line is still to come.
        (Some(_), None) | (None, Some(_) | None) => None,
    }
}

/// By curl where there is one: a client that knows nothing of the harness.
fn request(call: &Call<'_>) -> Result<String> {
    let path = format!("/accounts?secret={SECRET}");
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--max-time", "5"])
        .arg(format!("http://{}{path}", call.to));
    let reply = match finish(&call.from.netns, &mut curl, Duration::from_secs(10)) {
        Ok(finished) if finished.code == 0 => finished.stdout,
        Ok(finished) => finished.stderr,
        Err(_) => call
            .from
            .netns
            .run(|| http::request("GET", call.to, &path))
            .map_or_else(|error| format!("{error:#}"), |reply| reply.body),
    };
    Ok(reply.lines().next().context("no reply at all")?.to_owned())
}

/// The counters of a node's BPF programs: program, outcome, count.
pub(crate) fn counters(node: &Culvert<'_>) -> Result<Vec<(String, String, f64)>> {
    let metrics = node.metrics()?;
    let label = |labels: &std::collections::BTreeMap<String, String>, key: &str| {
        labels.get(key).cloned().unwrap_or_default()
    };
    Ok(metrics
        .find("culvert_bpf_outcomes_total", &[])
        .map(|one| (label(&one.labels, "program"), label(&one.labels, "outcome"), one.value))
        .filter(|(_, _, count)| *count > 0.0)
        .collect())
}
