//! Reads the counters of the map `outcomes`.

use aya::{
    Ebpf,
    maps::{MapData, PerCpuArray},
};
use culvert_abi::{Outcome, maps};

/// The counters of a loaded object.
pub(crate) struct Outcomes(PerCpuArray<MapData, u64>);

impl Outcomes {
    /// Takes the map out of `object`.
    pub(crate) fn of(object: &mut Ebpf) -> Self {
        let map = object.take_map(maps::OUTCOMES).expect("every object has the map outcomes");
        Self(map.try_into().expect("outcomes is a per-CPU array"))
    }

    /// What `work` counted: `program/outcome`, as often as it was counted, in the order of the map.
    pub(crate) fn of_work(&self, work: impl FnOnce()) -> Vec<String> {
        let before = self.read();
        work();
        let after = self.read();
        let counted = |(outcome, (after, before)): (&Outcome, (&u64, &u64))| {
            let (program, label) = outcome.labels();
            std::iter::repeat_n(
                format!("{program}/{label}"),
                usize::try_from(after - before).unwrap(),
            )
        };
        Outcome::ALL.iter().zip(after.iter().zip(&before)).flat_map(counted).collect()
    }

    /// The counter of one outcome, over all CPUs.
    pub(crate) fn total(&self, outcome: Outcome) -> u64 {
        let values = self.0.get(&(outcome as u32), 0).expect("every outcome has a counter");
        values.iter().sum()
    }

    fn read(&self) -> Vec<u64> {
        Outcome::ALL.iter().map(|outcome| self.total(*outcome)).collect()
    }
}
