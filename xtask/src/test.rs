//! `cargo xtask test`: everything that shows whether culvert works, from a bare machine to a summary.
//!
//! Test programs are built by cargo and run one by one from here: each gets a time limit, and a hanging scenario
//! costs its program, not the summary.

pub(crate) mod libtest;
mod programs;
mod promises;
mod report;

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;

pub(crate) use self::programs::build_binaries;
use self::programs::{BUILD_LIMIT, Program};
use crate::command::{self, stopwatch};
use crate::setup::Purpose;
use crate::tally::{Stage, Tally};
use crate::vm::{self, Kernel};
use crate::{build_ebpf, lint, setup};

/// Install what is missing, build, and run all tests: units, kernel fixtures, scenarios in network namespaces.
#[derive(Args)]
pub(crate) struct Options {
    /// Run only the tests whose names contain this.
    #[arg(long)]
    filter: Option<String>,
    /// Leave out what needs root and network namespaces.
    #[arg(long)]
    no_netns: bool,
    /// On which kernels to run; others than this machine's are booted under QEMU, with the kernel tests and some
    /// scenarios, with `--full` all those about steering. Several are separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "no_netns")]
    kernel: Vec<Kernel>,
    /// Run long scenarios as well, by default on all kernels, build the BPF objects twice to see that they are
    /// reproducible, and write docs/TESTED.md.
    #[arg(long)]
    full: bool,
    /// Install nothing.
    #[arg(long)]
    no_setup: bool,
    /// First check all that `cargo xtask lint` checks.
    #[arg(long)]
    lint: bool,
}

impl Options {
    fn runs_on(&self, kernel: Kernel) -> bool {
        match (self.kernel.is_empty(), kernel) {
            (true, Kernel::Native) => true,
            (true, _) => self.full && !self.no_netns,
            (false, kernel) => self.kernel.contains(&kernel) || self.kernel.contains(&Kernel::All),
        }
    }

    /// The kernels to boot.
    fn guests(&self) -> Vec<Kernel> {
        Kernel::GUESTS.into_iter().filter(|kernel| self.runs_on(*kernel)).collect()
    }
}

/// How many scenarios run at once: each has two proxies and their load, and waits are measured in seconds.
const SCENARIOS_AT_ONCE: &str = "2";

/// What a test may not skip for want of, where the machine was set up for it.
const REQUIRED: &str = "bpf,netns,tools";

const UNIT_LIMIT: Duration = Duration::from_mins(5);
const SCENARIOS_LIMIT: Duration = Duration::from_mins(12);
const FULL_LIMIT: Duration = Duration::from_hours(1);
const GUEST_LIMIT: Duration = Duration::from_mins(20);
/// All that steering promises: each scenario takes about ten times as long as on a machine.
const FULL_GUEST_LIMIT: Duration = Duration::from_hours(2);

/// The scenarios for other kernels: each thing that culvert asks of a kernel, once.
const GUEST_SCENARIOS: [&str; 12] = [
    "captured::a_captured_pod_reaches_one_on_the_other_node_and_the_wire_carries_only_tls",
    "captured::captured_pods_on_one_node_speak_with_identities_and_nothing_leaves_the_pod_in_plaintext",
    "captured::ipv4_ipv6_and_v4_mapped_sockets_are_all_captured",
    "captured::the_app_sees_the_address_of_the_client",
    "captured::a_socket_bound_to_its_interface_is_captured_too",
    "endings::a_reset_by_the_app_resets_the_client",
    "endings::whoever_closes_first_no_packet_escapes_and_no_socket_lingers",
    "plaintext::a_captured_pod_reaches_one_outside_the_mesh_in_plaintext",
    "plaintext::a_pod_outside_the_mesh_reaches_a_captured_one_where_policy_allows_it",
    "plaintext::connections_inside_a_pod_stay_inside",
    "restart::a_proxy_that_is_stopped_leaves_the_pods_closed_and_cleanup_opens_them",
    "restart::connects_to_and_from_the_pods_of_a_killed_proxy_wait_for_the_next_one",
];

const BPFFS: &str = "/sys/fs/bpf";

pub(crate) fn run(options: Options) -> ExitCode {
    let mut tally = Tally::default();
    let native = options.runs_on(Kernel::Native);
    let guests = options.guests();
    if !options.no_setup {
        let purpose = if guests.is_empty() { Purpose::OwnKernel } else { Purpose::AllKernels };
        tally.step("setup", || setup::ensure(purpose));
    }
    tally.step("BPF objects", build_ebpf::build_or_reference);
    tally.step("reference objects", build_ebpf::check_reference);
    if options.full {
        tally.step("reproducible objects", build_ebpf::check_reproducible);
    }
    if options.lint {
        lint::check_all(&mut tally);
    }
    let mut culvert = None;
    let mut programs = Vec::new();
    tally.step("build", || {
        culvert = Some(programs::build_culvert()?);
        programs = programs::build_programs()?;
        Ok(())
    });
    if !options.no_netns {
        tally.step("bpffs", mount_bpffs);
    }
    let mut ran = 0;
    if native {
        for program in programs.iter().filter(|program| !(options.no_netns && program.netns)) {
            let stage = run_program(program, &options, culvert.as_deref());
            ran += stage.passed + stage.failures.len();
            tally.add(stage);
        }
        if options.filter.is_none() && !programs.is_empty() {
            tally.add(doc_tests());
        }
    }
    if let Some(culvert) = &culvert
        && !programs.is_empty()
        && !guests.is_empty()
    {
        println!("\n=== other kernels");
        match run_in_guests(&guests, &programs, &options, culvert) {
            Ok(stages) => {
                for stage in stages {
                    ran += stage.passed + stage.failures.len();
                    tally.add(stage);
                }
            }
            Err(error) => {
                tally.step("other kernels", || Err(error));
            }
        }
    }
    if let Some(filter) = &options.filter
        && ran == 0
    {
        tally.step("filter", || bail!("no test has {filter} in its name"));
    }
    if options.full && options.filter.is_none() && !options.no_netns {
        let written = report::write(tally.stages(), tally.totals());
        tally.step("report", || written);
    }
    tally.finish()
}

/// The programs that ask something of the kernel, on each of `guests`.
fn run_in_guests(
    guests: &[Kernel],
    programs: &[Program],
    options: &Options,
    culvert: &Path,
) -> Result<Vec<Stage>> {
    let programs: Vec<_> = programs
        .iter()
        .filter(|program| program.netns)
        .map(|program| (program.name(), program))
        .collect();
    let steering = if options.full { promises::document()? } else { String::new() };
    let (scenarios, limit) = if options.full {
        (promises::scenarios(&steering), FULL_GUEST_LIMIT)
    } else {
        (GUEST_SCENARIOS.to_vec(), GUEST_LIMIT)
    };
    let suites: Vec<_> = programs
        .iter()
        .map(|(name, program)| vm::Suite {
            name,
            program: &program.executable,
            folder: &program.folder,
            tests: match &options.filter {
                Some(filter) => vm::Tests::Like(filter),
                None if program.target == "test e2e" => vm::Tests::Named(&scenarios),
                None => vm::Tests::All,
            },
        })
        .collect();
    Ok(vm::run(guests, &suites, culvert, limit))
}

/// Mounts bpffs where culvert pins, unless it is there.
pub(crate) fn mount_bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("read /proc/self/mounts")?;
    if mounts.lines().any(|line| line.split(' ').skip(1).take(2).eq([BPFFS, "bpf"])) {
        return Ok(());
    }
    command::run(command::as_root("mount", &[])?.args(["-t", "bpf", "bpf", BPFFS]))
}

fn run_program(program: &Program, options: &Options, culvert: Option<&Path>) -> Stage {
    let name = program.name();
    println!("\n=== {name}");
    let elapsed = stopwatch();
    let mut counts = libtest::Counts::default();
    let ended = (|| {
        let mut set: Vec<(&str, &OsStr)> = vec![("CARGO_MANIFEST_DIR", program.folder.as_os_str())];
        if !options.no_netns {
            set.push(("CULVERT_REQUIRE", OsStr::new(REQUIRED)));
        }
        if options.full {
            set.push(("CULVERT_FULL", OsStr::new("1")));
        }
        set.extend(culvert.map(|culvert| ("CULVERT_BIN", culvert.as_os_str())));
        let mut test = if options.no_netns {
            let mut test = Command::new(&program.executable);
            test.envs(set);
            test
        } else {
            command::as_root(&program.executable, &set)?
        };
        test.current_dir(&program.folder).args(&options.filter);
        if program.netns {
            // Shown, because there they say what they had to leave out.
            test.args(["--show-output", "--test-threads", SCENARIOS_AT_ONCE]);
        }
        let limit = match (options.full, program.netns) {
            (true, _) => FULL_LIMIT,
            (false, true) => SCENARIOS_LIMIT,
            (false, false) => UNIT_LIMIT,
        };
        command::follow(&mut test, limit, |line| {
            println!("{line}");
            counts.read(line);
        })
    })();
    let mut stage = counts.into_stage(name, elapsed(), ended);
    stage.kernel = program.netns.then(report::own_kernel);
    stage
}

fn doc_tests() -> Stage {
    println!("\n=== doc tests");
    let elapsed = stopwatch();
    let mut counts = libtest::Counts::default();
    let mut test = command::cargo("test");
    let ended =
        command::follow(test.args(["--workspace", "--doc", "--quiet"]), BUILD_LIMIT, |line| {
            println!("{line}");
            counts.read(line);
        });
    counts.into_stage("doc tests".into(), elapsed(), ended)
}
