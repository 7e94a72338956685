//! How many bytes a flow carried, counted by its copy loop and read at any time.

use std::sync::atomic::{AtomicU64, Ordering};

/// A flow's byte counts, each way. Shared between the copy loop, the record and scrapes.
#[derive(Debug, Default)]
pub struct Transferred {
    request: AtomicU64,
    response: AtomicU64,
}

impl Transferred {
    /// Counts bytes from the end that opened the connection to the other.
    pub fn add_request(&self, bytes: u64) {
        self.request.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes back to the end that opened the connection.
    pub fn add_response(&self, bytes: u64) {
        self.response.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes from the end that opened the connection, so far.
    pub fn request(&self) -> u64 {
        self.request.load(Ordering::Relaxed)
    }

    /// Bytes to the end that opened the connection, so far.
    pub fn response(&self) -> u64 {
        self.response.load(Ordering::Relaxed)
    }
}
