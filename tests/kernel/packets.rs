//! Runs the frames of `bpf-fixtures/packets` through `guard`, `hold_in` and `hold_out`.

use aya::{
    Ebpf,
    maps::HashMap,
    programs::{SchedClassifier, TestRun as _, TestRunOptions},
};
use culvert_abi::{Flow, maps};

use crate::{
    cgroup,
    fixture::{self, Expectation, Fixture, Outcome},
    lookups::{Listeners, exemptions, flow, own_addresses},
    objects,
    outcomes::Outcomes,
    settings, test_run,
};

/// `linux/pkt_cls.h`.
const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;
const TC_ACT_REDIRECT: i32 = 7;

#[test]
fn recorded_frames_get_their_verdict_and_are_counted() {
    if !objects::available() {
        return;
    }
    // A frame of a test run belongs to the cgroup of this process.
    let _here = cgroup::stay();
    let mut faults = Vec::new();
    for (when_down, pod) in objects::pods() {
        check(when_down, pod, &mut faults);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn check(when_down: &str, mut pod: Ebpf, faults: &mut Vec<String>) {
    let outcomes = Outcomes::of(&mut pod);
    for (_, program) in pod.programs_mut() {
        objects::load(program).unwrap();
    }
    own_addresses(&mut pod);
    let mut listeners = Listeners::of(&mut pod);
    for fixture in fixture::read_all("packets") {
        let frame = frame(&fixture);
        for expectation in fixture.expectations_of(when_down) {
            listeners.arrange(expectation.setting("listeners", "absent"));
            settings::set(&mut pod, expectation.setting("settings", ""));
            set_owner(&mut pod, expectation.setting("owner", "app"));
            let exempt = exemption(expectation);
            if let Some(flow) = exempt {
                exemptions(&mut pod).insert(flow, 1, 0).unwrap();
            }
            let got = run(&pod, &outcomes, expectation, &frame);
            if let Some(flow) = exempt {
                exemptions(&mut pod).remove(&flow).unwrap();
            }
            if got != expectation.result {
                faults.push(format!("{}: {expectation}\n    got {got:?}", fixture.name));
            }
        }
    }
}

fn run(pod: &Ebpf, outcomes: &Outcomes, expectation: &Expectation, frame: &[u8]) -> Outcome {
    let program = pod
        .program(&expectation.program)
        .unwrap_or_else(|| panic!("no such program: {expectation}"));
    let program: &SchedClassifier = program.try_into().unwrap();
    let context = test_run::sk_buff(expectation.mark());
    let mut verdict = 0;
    let counted = outcomes.of_work(|| {
        let options = TestRunOptions {
            data_in: Some(frame),
            ctx_in: Some(&context),
            ..TestRunOptions::default()
        };
        verdict = program.test_run(options).unwrap().return_value;
    });
    let verdict = match verdict.cast_signed() {
        TC_ACT_UNSPEC => "pass".to_owned(),
        TC_ACT_SHOT => "drop".to_owned(),
        TC_ACT_REDIRECT => "redirect".to_owned(),
        other => other.to_string(),
    };
    Outcome { verdict, counted }
}

fn set_owner(pod: &mut Ebpf, owner: &str) {
    let map = pod.map_mut(maps::OWN_CGROUPS).unwrap();
    let mut cgroups: HashMap<_, u64, u8> = HashMap::try_from(map).unwrap();
    let here = cgroup::own_id();
    match owner {
        "proxy" => cgroups.insert(here, 1, 0).unwrap(),
        "app" => drop(cgroups.remove(&here)),
        other => panic!("no such owner: {other}"),
    }
}

/// The setting `exempt=REMOTE,LOCAL`.
fn exemption(expectation: &Expectation) -> Option<Flow> {
    let (remote, local) = expectation.setting("exempt", "").split_once(',')?;
    Some(flow(remote.parse().unwrap(), local.parse().unwrap()))
}

/// The recorded frame of that name.
pub(crate) fn frame_of(name: &str) -> Vec<u8> {
    let fixtures = fixture::read_all("packets");
    frame(fixtures.iter().find(|fixture| fixture.name == name).expect("a name in the folder"))
}

fn frame(fixture: &Fixture) -> Vec<u8> {
    let bytes = fixture.input.iter().flat_map(|line| line.split_whitespace());
    bytes
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()
        .unwrap_or_else(|error| panic!("{}: {error}", fixture.name))
}
