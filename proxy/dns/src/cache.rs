//! Answers of name servers, kept for as long as they say.

use std::{net::SocketAddr, num::NonZeroUsize};

use lru::LruCache;
use tokio::time::Instant;

use crate::wire::{self, Life};

/// Kept for a pod.
const MOST_ENTRIES: NonZeroUsize = NonZeroUsize::new(2048).expect("it is not zero");
/// The same, in bytes of answers.
const MOST_BYTES: usize = 1 << 20;
/// A longer answer is not kept.
const LONGEST: usize = 8 << 10;

/// Whose answer, and to what.
pub(crate) type Key = (SocketAddr, Box<[u8]>);

/// What one pod has been told. Least recently used answers make room.
#[derive(Debug)]
pub(crate) struct Cache {
    entries: LruCache<Key, Entry>,
    /// The length of all answers.
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    answer: Box<[u8]>,
    life: Life,
    since: Instant,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self { entries: LruCache::new(MOST_ENTRIES), bytes: 0 }
    }

    /// The answer as it would be given now, if it is no longer than `limit`.
    pub(crate) fn get(&mut self, key: &Key, limit: usize) -> Option<Vec<u8>> {
        let entry = self.entries.get(key)?;
        let passed = entry.since.elapsed();
        if passed >= entry.life.span {
            self.forget(key);
            return None;
        }
        let mut answer = (entry.answer.len() <= limit).then(|| entry.answer.to_vec())?;
        wire::age(&mut answer, &entry.life, passed);
        Some(answer)
    }

    /// Keeps an answer that was just received.
    pub(crate) fn put(&mut self, key: Key, answer: &[u8], life: Life) {
        self.forget(&key);
        if answer.len() > LONGEST {
            return;
        }
        let room = |cache: &Self| {
            cache.bytes + answer.len() <= MOST_BYTES && cache.entries.len() < MOST_ENTRIES.get()
        };
        while !room(self)
            && let Some((_, entry)) = self.entries.pop_lru()
        {
            self.bytes -= entry.answer.len();
        }
        self.bytes += answer.len();
        self.entries.put(key, Entry { answer: answer.into(), life, since: Instant::now() });
    }

    fn forget(&mut self, key: &Key) {
        if let Some(entry) = self.entries.pop(key) {
            self.bytes -= entry.answer.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing;

    fn key(n: u32) -> Key {
        (([192, 0, 2, 1], 53).into(), n.to_be_bytes().into())
    }

    fn put(cache: &mut Cache, n: u32, answer: &[u8]) {
        cache.put(key(n), answer, wire::life(answer).unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_ages_and_ends() {
        let mut cache = Cache::new();
        let answer = testing::reply(&[20, 10]);
        put(&mut cache, 1, &answer);
        assert_eq!(cache.get(&key(1), answer.len()), Some(answer.clone()));
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(cache.get(&key(1), 4096), Some(testing::reply(&[11, 1])));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&key(1), 4096), None);
        assert_eq!((cache.bytes, cache.entries.len()), (0, 0));
    }

    #[tokio::test]
    async fn an_answer_that_the_client_cannot_take_is_not_given() {
        let mut cache = Cache::new();
        let answer = testing::reply(&[20]);
        put(&mut cache, 1, &answer);
        assert_eq!(cache.get(&key(1), answer.len() - 1), None);
        assert_eq!(cache.get(&key(2), 4096), None);
        assert!(cache.get(&key(1), 4096).is_some());
    }

    #[tokio::test]
    async fn it_is_bounded_in_answers_and_in_bytes() {
        let mut cache = Cache::new();
        let answer = testing::reply(&[20]);
        for n in 0..2500 {
            put(&mut cache, n, &answer);
        }
        assert_eq!(cache.entries.len(), MOST_ENTRIES.get());
        assert_eq!(cache.bytes, MOST_ENTRIES.get() * answer.len());
        assert!(cache.get(&key(2499), 4096).is_some() && cache.get(&key(0), 4096).is_none());

        let long = testing::reply(&[20; 200]);
        for n in 0..1000 {
            put(&mut cache, n, &long);
            put(&mut cache, n, &long);
        }
        assert_eq!(cache.entries.len(), MOST_BYTES / long.len());
        assert_eq!(cache.bytes, cache.entries.len() * long.len());
        let longer = testing::reply(&[20; 600]);
        put(&mut cache, 1, &longer);
        assert!(cache.get(&key(1), usize::MAX).is_none());
    }
}
