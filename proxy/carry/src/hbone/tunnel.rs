//! One open HBONE stream, of either end.
//!
//! It carries no bytes itself: [`crate::copy::tunnel`] does.

use std::{fmt, net::IpAddr};

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};

use super::pool::Slot;

/// An open CONNECT stream.
///
/// Dropped before both directions have ended, it resets the stream with `CONNECT_ERROR` (RFC 9113 §8.5), so that the
/// other end cannot take what it got for all there was.
pub struct Tunnel {
    pub(crate) send: SendStream<Bytes>,
    pub(crate) recv: RecvStream,
    ended: bool,
    /// The address that its connection was dialled from, if that was ours to dial.
    local: Option<IpAddr>,
    /// Counts this stream against its connection's limit.
    _slot: Option<Slot>,
}

impl Tunnel {
    pub(super) fn client(
        send: SendStream<Bytes>,
        recv: RecvStream,
        local: Option<IpAddr>,
        slot: Slot,
    ) -> Self {
        Self { send, recv, ended: false, local, _slot: Some(slot) }
    }

    pub(super) fn server(send: SendStream<Bytes>, recv: RecvStream) -> Self {
        Self { send, recv, ended: false, local: None, _slot: None }
    }

    pub(super) fn local(&self) -> Option<IpAddr> {
        self.local
    }

    /// The stream needs no reset any more: both directions have ended, or it has been reset.
    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    /// Tells the other end that the application's connection was reset.
    pub(crate) fn reset(&mut self) {
        self.ended = true;
        self.send.send_reset(Reason::CONNECT_ERROR);
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if !self.ended {
            self.reset();
        }
    }
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnel").field("stream", &self.send.stream_id()).finish_non_exhaustive()
    }
}
