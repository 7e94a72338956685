//! What each program costs the verifier of this kernel.

use std::{collections::BTreeMap, fs};

use crate::objects;

#[test]
fn every_program_loads_within_its_budget() {
    if !objects::available() {
        return;
    }
    let mut budget = budget();
    let mut faults = Vec::new();
    for object in ["node", "exempt", "pod"] {
        let mut object = objects::open(object);
        for (name, program) in object.programs_mut() {
            let Some(limit) = budget.remove(name) else {
                faults.push(format!("{name}: no budget"));
                continue;
            };
            if !objects::is_for_this_kernel(name) {
                continue;
            }
            if let Err(error) = objects::load(program) {
                faults.push(format!("{name}: {error}"));
                continue;
            }
            let info = program.info().unwrap();
            // Linux 5.16 or newer tells.
            let Some(cost) = info.verified_instruction_count() else { continue };
            println!("{name}: {cost} of {limit} instructions verified");
            if cost > limit {
                faults.push(format!("{name}: {cost} instructions, budget {limit}"));
            }
        }
    }
    faults.extend(
        budget.into_keys().map(|name| format!("{name}: has a budget, but is in no object")),
    );
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn programs_that_log_load_too() {
    if !objects::available() {
        return;
    }
    for name in ["node", "exempt"] {
        let mut loader = objects::loader(name);
        loader.override_global("AYA_LOG_LEVEL", &u8::MAX, true);
        for (name, program) in objects::open_with(loader, name).programs_mut() {
            if !objects::is_for_this_kernel(name) {
                continue;
            }
            objects::load(program).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

fn budget() -> BTreeMap<String, u32> {
    let path = objects::fixtures().join("verifier/budget.txt");
    let text = fs::read_to_string(&path).unwrap();
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [program, limit] => (program.to_owned(), limit.parse().unwrap()),
            _ => panic!("{}: not a program and a number: {line}", path.display()),
        })
        .collect()
}
