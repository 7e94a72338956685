//! A mesh of two nodes on this machine: real HTTP between four pods, the way each call took, and the proof from
//! the wire.
//!
//! Needs root and a built culvert. What it shows is read from access logs, metrics and captures, never assumed.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the output is the program's purpose"
)]

mod calls;
mod interrupt;
mod show;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use culvert_tests::{
    apps::{App, Behaviour},
    culvert::{Mesh, Remains, binary},
    mesh_file::{Action, MeshFile, Policy},
    poll, require,
    tap::{Tap, WIRE},
    topology::{Family, Topology},
};

use crate::{calls::SECRET, interrupt::Interrupt};

/// The port of every demo server.
const PORT: u16 = 8080;

/// Shows a mesh of two nodes and four pods in network namespaces.
#[derive(Debug, Parser)]
#[command(name = "demo")]
struct Options {
    /// Leave the network up after the calls, until Ctrl-C.
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let interrupt = Interrupt::watch()?;
    if let Some(reason) = require::missing_for_mesh() {
        bail!("{reason}");
    }

    let topology = Topology::build()?;
    show::topology(&topology);
    let servers = [&topology.a2, &topology.b1, &topology.x]
        .into_iter()
        .map(|pod| {
            let behaviour = Behaviour::Http(format!("hello from {}", pod.name));
            App::start_on(&pod.netns, PORT, behaviour)
                .with_context(|| format!("start the server of {}", pod.name))
        })
        .collect::<Result<Vec<_>>>()?;
    let policy = Policy::new("no-cart", "bank", Action::Deny).principal(&topology.a2.identity());
    let file = MeshFile::new(&topology).service(&topology.b1, PORT).policy(&policy);
    let (mesh, took) = poll::timed(|| Mesh::start(&topology, &file, Remains::Nothing));
    let mesh = mesh?;
    println!("\n{} runs on both nodes, ready after {} ms\n", binary()?.display(), took.as_millis());

    let wire = Tap::start(&topology.wire, WIRE, &[SECRET.as_bytes()])?;
    println!("Calls");
    for call in calls::script(&topology, PORT) {
        interrupt.check()?;
        let outcome = calls::make(&call, &mesh)?;
        show::call(&call, &outcome);
    }
    show::wire(&wire.stop(), &topology);
    show::counters(&mesh)?;

    if options.keep {
        show::how_to_enter(&topology, PORT);
        println!("\n{}", interrupt.wait()?);
    }
    println!("\nTaking everything down.");
    drop((servers, mesh));
    drop(topology);
    Ok(())
}

/// Both families, as the demo names them.
fn family_name(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}
