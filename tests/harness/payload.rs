//! Bytes for bulk transfers: a source in which every block differs, and a digest to compare ends by.

use std::{collections::hash_map::DefaultHasher, hash::Hasher as _};

const BLOCK: usize = 64 * 1024;

/// A given number of bytes; each block starts with its number, so that a lost or swapped one changes the digest.
#[derive(Debug)]
pub struct Source {
    block: Vec<u8>,
    number: u64,
    left: usize,
}

impl Source {
    /// `length` bytes, the same for the same length.
    pub fn new(length: usize) -> Self {
        let block = (0..BLOCK).map(|i| u8::try_from(i % 251).unwrap_or_default()).collect();
        Self { block, number: 0, left: length }
    }

    /// The next bytes; `None` at the end.
    pub fn next_chunk(&mut self) -> Option<&[u8]> {
        let length = self.left.min(BLOCK);
        if length == 0 {
            return None;
        }
        self.left -= length;
        for (to, from) in self.block.iter_mut().zip(self.number.to_be_bytes()) {
            *to = from;
        }
        self.number += 1;
        self.block.get(..length)
    }

    /// The digest of the whole source.
    pub fn digest(length: usize) -> Digest {
        let mut source = Self::new(length);
        let mut digest = Digest::default();
        while let Some(chunk) = source.next_chunk() {
            digest.update(chunk);
        }
        digest
    }
}

/// Length and hash of a stream of bytes, however it was cut into chunks.
#[derive(Debug, Clone, Default)]
pub struct Digest {
    length: usize,
    hasher: DefaultHasher,
}

impl Digest {
    /// Takes in the next bytes.
    pub fn update(&mut self, chunk: &[u8]) {
        self.length += chunk.len();
        self.hasher.write(chunk);
    }

    /// Both as text: equal texts mean equal streams.
    pub fn report(&self) -> String {
        format!("{} bytes {:016x}\n", self.length, self.hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_does_not_depend_on_chunking() {
        let mut source = Source::new(200_000);
        let mut digest = Digest::default();
        while let Some(chunk) = source.next_chunk() {
            for part in chunk.chunks(777) {
                digest.update(part);
            }
        }
        assert_eq!(digest.report(), Source::digest(200_000).report());
    }

    #[test]
    fn blocks_differ() {
        let mut source = Source::new(2 * BLOCK);
        let first = source.next_chunk().unwrap().to_vec();
        assert_ne!(first, source.next_chunk().unwrap());
    }
}
