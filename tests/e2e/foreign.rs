//! Programs of someone else at the hooks of a pod.

use std::process::Command;

use culvert_tests::{
    poll,
    process::Process,
    require,
    topology::{Pod, Topology},
};

/// A program of someone else on `eth0` of a pod. As a filter it stays behind when this is dropped, as a link it goes.
pub(crate) struct Foreign {
    process: Process,
    what: String,
}

/// `TC_ACT_UNSPEC`, which for a tcx link is `TCX_NEXT`: the next one decides.
pub(crate) const NEXT: &str = "-1";
/// `TC_ACT_OK`, which for a tcx link is `TCX_PASS`: the packet passes, and nothing after it is asked.
pub(crate) const OK: &str = "0";

impl Foreign {
    pub(crate) fn attach(topology: &Topology, pod: &Pod, arguments: [&str; 4]) -> Self {
        let [kind, hook, place, verdict] = arguments;
        let mut command = Command::new("/usr/bin/python3");
        command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/foreign.py"))
            .args([kind, "eth0", hook, place, verdict]);
        let what = format!("{kind}-{hook}-{place}");
        let process = Process::spawn(&pod.netns, topology.dir(), &what, &mut command).unwrap();
        let foreign = Self { process, what };
        let counts =
            poll::within(poll::SOON, || foreign.process.log().contains("count").then_some(()));
        assert!(counts.is_some(), "{}: {}", foreign.what, foreign.process.log());
        foreign
    }

    pub(crate) fn count(&self) -> u64 {
        let log = self.process.log();
        let last = log.lines().rev().find_map(|line| line.strip_prefix("count "));
        last.and_then(|count| count.parse().ok()).unwrap_or_default()
    }

    #[track_caller]
    pub(crate) fn counts_beyond(&self, before: u64) {
        poll::until(poll::SOON, &format!("packets at {}", self.what), || {
            (self.count() > before).then_some(())
        });
    }
}

pub(crate) fn have_tools() -> bool {
    require::tool("/usr/bin/python3", &["--version"]) && require::tool("tc", &["-V"])
}

/// Links of others at both hooks, before all that is there, which end the chain.
pub(crate) fn end_the_chain(topology: &Topology, pod: &Pod) -> [Foreign; 2] {
    ["ingress", "egress"].map(|hook| Foreign::attach(topology, pod, ["tcx", hook, "first", OK]))
}
