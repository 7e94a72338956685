//! What was measured where: commit, kernel, processor, date.

use std::{fs, process::Command, thread};

use anyhow::Result;
use culvert_tests::culvert;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// The facts, as lines for a report.
pub(crate) fn facts() -> Result<Vec<(&'static str, String)>> {
    Ok(vec![
        ("date", OffsetDateTime::now_utc().replace_nanosecond(0)?.format(&Rfc3339)?),
        ("commit", commit()),
        ("binary", output(Command::new(culvert::binary()?).arg("--version"))),
        (
            "build of this bench",
            if cfg!(debug_assertions) { "debug".into() } else { "release".into() },
        ),
        ("kernel", first_line("/proc/sys/kernel/osrelease")),
        ("CPU", cpu_model()),
        (
            "cores",
            thread::available_parallelism().map_or_else(|e| e.to_string(), |n| n.to_string()),
        ),
        ("load average before (1, 5, 15 min)", first_line("/proc/loadavg")),
        ("iptables", output(Command::new("iptables").arg("--version"))),
    ])
}

fn commit() -> String {
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        // The tree may belong to another user than root, who measures.
        git.args(["-C", env!("CARGO_MANIFEST_DIR"), "-c", "safe.directory=*"]).args(arguments);
        output(&mut git)
    };
    let head = git(&["rev-parse", "--verify", "HEAD"]);
    let dirty = !git(&["status", "--porcelain"]).is_empty();
    if dirty { format!("{head}, with changes not committed") } else { head }
}

/// Trimmed standard output, or why there is none.
fn output(command: &mut Command) -> String {
    match command.output() {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        Ok(output) => format!("unknown ({})", output.status),
        Err(error) => format!("unknown ({error})"),
    }
}

fn first_line(path: &str) -> String {
    match fs::read_to_string(path) {
        Ok(text) => text.lines().next().unwrap_or_default().to_owned(),
        Err(error) => format!("unknown ({error})"),
    }
}

fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(|| "unknown".to_owned(), |(_, model)| model.trim().to_owned())
}
