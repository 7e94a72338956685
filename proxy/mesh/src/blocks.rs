//! Ordered lists that versions of the mesh share block by block.

use std::sync::Arc;

/// What a list is ordered by.
pub(crate) trait Keyed {
    /// Unique in a list.
    fn key(&self) -> &str;
}

/// Values in the order of their keys. Cloning is cheap; a change copies one block and the list of
/// blocks, as far as other versions share them.
///
/// A tree would copy less of 100,000 values. This is smaller for the few that most lists have,
/// reads without an allocation, and finds the n-th value.
#[derive(Clone, Debug)]
pub(crate) struct Blocks<T> {
    /// None is empty; ordered within and among each other.
    #[expect(clippy::rc_buffer, reason = "grows in place until a version shares it")]
    blocks: Arc<Vec<Arc<Vec<T>>>>,
    len: usize,
}

impl<T> Default for Blocks<T> {
    fn default() -> Self {
        Self { blocks: Arc::default(), len: 0 }
    }
}

impl<T> Blocks<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.blocks.iter().flat_map(|block| block.iter())
    }

    /// The value at `index` of the order.
    pub(crate) fn get(&self, mut index: usize) -> Option<&T> {
        for block in self.blocks.iter() {
            match block.get(index) {
                Some(value) => return Some(value),
                None => index -= block.len(),
            }
        }
        None
    }
}

impl<T: Keyed + Clone> Blocks<T> {
    pub(crate) fn find(&self, key: &str) -> Option<&T> {
        let block = self.blocks.get(self.block_of(key))?;
        block.get(place(block, key).ok()?)
    }

    /// Adds `value`, and returns the one whose place it takes.
    pub(crate) fn insert(&mut self, value: T) -> Option<T> {
        let index = self.block_of(value.key());
        let blocks = Arc::make_mut(&mut self.blocks);
        let Some(block) = blocks.get_mut(index) else {
            self.len += 1;
            blocks.reserve_exact(1);
            blocks.push(Arc::new(vec![value]));
            return None;
        };
        let block = Arc::make_mut(block);
        match place(block, value.key()) {
            Ok(place) => block.get_mut(place).map(|old| std::mem::replace(old, value)),
            Err(place) => {
                // Most lists are short and rarely grow: no room for more than there is.
                block.reserve_exact(1);
                block.insert(place, value);
                self.len += 1;
                if block.len() > BLOCK {
                    let upper = block.split_off(BLOCK / 2);
                    blocks.insert(index + 1, Arc::new(upper));
                }
                None
            }
        }
    }

    /// Removes the value of this key, and returns it.
    pub(crate) fn remove(&mut self, key: &str) -> Option<T> {
        let index = self.block_of(key);
        let place = place(self.blocks.get(index)?, key).ok()?;
        let blocks = Arc::make_mut(&mut self.blocks);
        let block = Arc::make_mut(blocks.get_mut(index)?);
        let old = block.remove(place);
        self.len -= 1;
        if block.is_empty() {
            blocks.remove(index);
        }
        Some(old)
    }

    /// The block that holds `key`, or would.
    fn block_of(&self, key: &str) -> usize {
        let starts_before =
            |block: &Arc<Vec<T>>| block.first().is_some_and(|first| first.key() <= key);
        self.blocks.partition_point(starts_before).saturating_sub(1)
    }
}

fn place<T: Keyed>(block: &[T], key: &str) -> Result<usize, usize> {
    block.binary_search_by(|value| value.key().cmp(key))
}

/// A change among 10,000 values then copies about as much for its block as for the list of blocks.
const BLOCK: usize = 128;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

    use super::*;

    impl Keyed for (String, u32) {
        fn key(&self) -> &str {
            &self.0
        }
    }

    #[test]
    fn any_sequence_of_changes_leaves_what_a_map_would_hold() {
        let mut rng = StdRng::seed_from_u64(5);
        let mut blocks: Blocks<(String, u32)> = Blocks::default();
        let mut want: BTreeMap<String, u32> = BTreeMap::new();
        for step in 0..6000 {
            let key = format!("w-{}", rng.random_range(0..900));
            // Growing first, then shrinking.
            if rng.random_ratio(if step < 4000 { 4 } else { 1 }, 5) {
                let old = blocks.insert((key.clone(), step));
                assert_eq!(old.map(|(_, old)| old), want.insert(key, step));
            } else {
                assert_eq!(blocks.remove(&key).map(|(_, old)| old), want.remove(&key));
            }
        }
        assert!(blocks.iter().cloned().eq(want.clone()) && blocks.len() == want.len());
        for (index, key) in want.keys().enumerate() {
            assert_eq!(blocks.get(index).unwrap().key(), key);
            assert_eq!(blocks.find(key).unwrap().key(), key);
        }
        assert!(blocks.get(want.len()).is_none() && blocks.find("w-x").is_none());
        for key in want.keys() {
            blocks.remove(key);
        }
        assert!(blocks.is_empty() && blocks.blocks.is_empty());
    }

    #[test]
    fn versions_share_all_blocks_but_the_changed_one() {
        let mut old = Blocks::default();
        for i in 0..10_000 {
            old.insert((format!("w-{i:05}"), i));
        }
        let mut new = old.clone();
        new.remove("w-05000");
        let same = |block: &&Arc<_>| new.blocks.iter().any(|b| Arc::ptr_eq(b, block));
        assert_eq!(old.blocks.iter().filter(same).count(), old.blocks.len() - 1);
        assert_eq!((old.len(), new.len()), (10_000, 9_999));
    }
}
