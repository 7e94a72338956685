//! One direction between two TCP sockets.

use std::{
    io::{self, IoSlice},
    task::{Context, Poll, ready},
};

use super::{Side, socket::Socket};
use crate::buffer::{Buffer, Size};

/// Reads that one poll may do before other connections of the thread get their turn.
const TURNS: usize = 8;

/// Copies one direction; holds at most one buffer.
pub(super) struct Pump {
    size: Size,
    /// What has been read and not written: from `.1` to `.2`.
    pending: Option<(Buffer, usize, usize)>,
    ended: bool,
    /// The bytes copied so far.
    pub(super) total: u64,
}

impl Pump {
    pub(super) fn new() -> Self {
        Self { size: Size::Small, pending: None, ended: false, total: 0 }
    }

    /// Copies until the end of the stream, which it carries on unless `cut` says that a reset follows instead.
    ///
    /// The error tells which of the two failed.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&Socket, &Socket),
        cut: bool,
        copied: impl Fn(usize),
    ) -> Poll<Result<(), (Side, io::Error)>> {
        if self.ended {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..TURNS {
            if self.pending.is_none() {
                let mut buffer = Buffer::take(self.size);
                let n =
                    ready!(from.poll_read(cx, buffer.bytes_mut())).map_err(|e| (Side::From, e))?;
                if n == 0 {
                    self.ended = true;
                    return Poll::Ready(if cut {
                        Ok(())
                    } else {
                        to.shutdown().map_err(|e| (Side::To, e))
                    });
                }
                self.size = self.size.next(n);
                self.pending = Some((buffer, 0, n));
            }
            while let Some((buffer, start, end)) = &mut self.pending {
                let rest = buffer.bytes().get(*start..*end).unwrap_or_default();
                let n =
                    ready!(to.poll_write(cx, &[IoSlice::new(rest)])).map_err(|e| (Side::To, e))?;
                self.total += n as u64;
                copied(n);
                *start += n;
                if n == 0 || start >= end {
                    self.pending = None;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
