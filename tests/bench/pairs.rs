//! Interleaved pairs: each sample of what is measured has one of the reference beside it, taken within seconds.
//!
//! A machine's speed drifts by more than most of the differences looked for; the ratio within a pair does not.

use anyhow::Result;

/// One sample of the reference, one of culvert.
pub(crate) type Pair<T> = (T, T);

/// Takes `count` pairs, after one that warms up and is dropped. Each pair begins with the other side than the last.
pub(crate) fn take<T>(
    count: usize,
    mut reference: impl FnMut() -> Result<T>,
    mut ours: impl FnMut() -> Result<T>,
) -> Result<Vec<Pair<T>>> {
    reference()?;
    ours()?;
    let mut pairs = Vec::with_capacity(count);
    for index in 0..count {
        pairs.push(if index % 2 == 0 {
            let first = reference()?;
            (first, ours()?)
        } else {
            let first = ours()?;
            (reference()?, first)
        });
    }
    Ok(pairs)
}

/// One value out of each sample.
pub(crate) fn each<T>(pairs: &[Pair<T>], value: impl Fn(&T) -> f64) -> Vec<Pair<f64>> {
    pairs.iter().map(|(reference, ours)| (value(reference), value(ours))).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn sides_take_turns_at_going_first_after_a_warm_up() {
        let order = RefCell::new(String::new());
        let sample = |name: char| {
            order.borrow_mut().push(name);
            Ok(name)
        };
        let pairs = take(3, || sample('r'), || sample('o')).unwrap();
        assert_eq!(pairs, [('r', 'o'); 3]);
        assert_eq!(order.into_inner(), "roroorro");
    }

    #[test]
    fn a_failed_sample_ends_the_measurement() {
        assert!(take(3, || anyhow::bail!("gone"), || Ok(1)).is_err());
    }
}
