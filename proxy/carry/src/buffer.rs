//! Buffers for reading sockets, reused while they are warm in the cache.
//!
//! A direction holds a buffer only while bytes wait in it, so that idle connections hold none.

use std::cell::RefCell;

/// Reads of a connection that is not busy.
pub(crate) const SMALL: usize = 16 << 10;
/// Reads of a connection whose small reads come back full.
pub(crate) const LARGE: usize = 256 << 10;

/// Free buffers that one thread keeps of each size: 1.1 MB.
const KEPT: usize = 4;

thread_local! {
    static FREE: RefCell<[Vec<Box<[u8]>>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// How much a direction reads at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Small,
    Large,
}

impl Size {
    fn bytes(self) -> usize {
        match self {
            Self::Small => SMALL,
            Self::Large => LARGE,
        }
    }

    /// The size for the next read, after one that brought `n` bytes.
    pub(crate) fn next(self, n: usize) -> Self {
        match self {
            Self::Small if n == SMALL => Self::Large,
            Self::Large if n <= SMALL => Self::Small,
            same => same,
        }
    }
}

/// A buffer from the thread's free ones; the thread that drops it keeps it.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
}

impl Buffer {
    pub(crate) fn take(size: Size) -> Self {
        let kept = FREE.with_borrow_mut(|[small, large]| match size {
            Size::Small => small.pop(),
            Size::Large => large.pop(),
        });
        Self { bytes: kept.unwrap_or_else(|| vec![0; size.bytes()].into_boxed_slice()) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        // A thread that ends has no free list any more.
        let kept = FREE.try_with(|free| {
            let [small, large] = &mut *free.borrow_mut();
            let free = if bytes.len() == SMALL { small } else { large };
            if free.len() < KEPT {
                free.push(bytes);
            }
        });
        if kept.is_err() {
            tracing::trace!("a buffer outlived its thread");
        }
    }
}
