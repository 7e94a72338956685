//! HBONE: TCP connections carried as HTTP/2 CONNECT streams over mutual TLS (RFC 9113 §8.5).
//!
//! [`Pool`] dials and shares client connections, [`server`] accepts them, [`headers`] are the metadata beside a CONNECT,
//! and [`Tunnel`] is an open stream of either end, to be copied by [`crate::copy`]. Whom a certificate proves, and
//! whether the authority is ours to deliver to, is the caller's business.

pub mod client;
pub mod headers;
mod keepalive;
mod nested;
mod pool;
mod read_ahead;
pub mod server;
mod tunnel;

pub use pool::{Connect, Key, OpenError, Pool, PoolOptions};
pub use tunnel::Tunnel;

/// Flow control window of each stream, both ends: enough for 1 Gbit/s at 32 ms.
const STREAM_WINDOW: u32 = 4 << 20;
/// Four stream windows, so that one stream which its application does not read cannot starve the others.
const CONNECTION_WINDOW: u32 = 4 * STREAM_WINDOW;
/// The largest DATA frame we accept.
const FRAME_SIZE: u32 = 1 << 20;
/// The most that a stream may have waiting for the connection's turn; the peer's window bounds it as well.
const SEND_BUFFER: usize = 1 << 20;
/// Streams that we have reset and still remember: DATA on its way for a forgotten one counts against the connection.
const RESET_STREAMS: usize = 200;
/// How much ciphertext a connection may have waiting for its socket: enough for one large write.
const TLS_BUFFER: usize = 256 << 10;
