//! The two directions between a TCP socket and an HTTP/2 stream.

use std::{
    collections::VecDeque,
    future::poll_fn,
    io::{self, IoSlice},
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use tokio::sync::Notify;

use super::{Side, socket::Socket};
use crate::buffer::{Buffer, LARGE, Size};

/// Chunks that one poll may move before other connections of the thread get their turn.
const TURNS: usize = 8;
/// Chunks that one write to the socket takes together.
const FRAMES: usize = 16;
/// Smaller DATA frames are copied together while more than one write waits.
const WORTH_A_CHUNK: usize = 4 << 10;
/// How much they are copied into.
const CHUNK: usize = 16 << 10;
/// A read below this is copied out of its buffer: a large buffer in flight must not hold a few bytes.
const WORTH_A_BUFFER: usize = LARGE / 4;

/// From the socket to the stream; holds at most one buffer beside what the peer's window covers.
pub(super) struct Up {
    size: Size,
    pending: Bytes,
    ended: bool,
    in_flight: Option<Arc<InFlight>>,
    /// The bytes copied so far.
    pub(super) total: u64,
}

impl Up {
    pub(super) fn new() -> Self {
        Self {
            size: Size::Small,
            pending: Bytes::new(),
            ended: false,
            in_flight: Some(Arc::default()),
            total: 0,
        }
    }

    /// Copies until the end of the application's stream, which it carries on as `END_STREAM` unless `cut` says that a
    /// reset follows instead; or until the peer takes no more.
    ///
    /// The error is the application's connection.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &Socket,
        to: &mut SendStream<Bytes>,
        cut: bool,
        copied: impl Fn(usize),
    ) -> Poll<Result<(), (Side, io::Error)>> {
        if self.ended {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..TURNS {
            if self.pending.is_empty() {
                match ready!(self.read(cx, from)).map_err(|e| (Side::From, e))? {
                    0 => {
                        self.ended = true;
                        // A stream that is gone is for the other direction to tell.
                        if !cut && let Err(error) = to.send_data(Bytes::new(), true) {
                            tracing::trace!(%error, "end of a stream that is gone");
                        }
                        return Poll::Ready(Ok(()));
                    }
                    n => to.reserve_capacity(n),
                }
            }
            while !self.pending.is_empty() {
                let mut room = to.capacity();
                if room == 0 {
                    room = match ready!(to.poll_capacity(cx)) {
                        Some(Ok(room)) => room,
                        Some(Err(_)) | None => return self.stopped(),
                    };
                }
                let chunk = self.pending.split_to(room.min(self.pending.len()));
                let n = chunk.len();
                if to.send_data(chunk, false).is_err() {
                    return self.stopped();
                }
                self.total += n as u64;
                copied(n);
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// After the application's connection has failed: passes on what was received before, and returns once all of it
    /// has left the stream's queue, which a reset would empty.
    pub(super) async fn drain(
        &mut self,
        from: &Socket,
        to: &mut SendStream<Bytes>,
        copied: impl Fn(usize) + Send + Sync,
    ) {
        if let Err((_, error)) = poll_fn(|cx| self.poll(cx, from, to, true, &copied)).await {
            tracing::trace!(%error, "all that was received is passed on");
        }
        if let Some(in_flight) = self.in_flight.take() {
            let gone = Arc::clone(&in_flight.gone);
            drop(in_flight);
            gone.notified().await;
        }
    }

    /// The peer takes no more. Why is for the other direction to tell.
    fn stopped(&mut self) -> Poll<Result<(), (Side, io::Error)>> {
        self.ended = true;
        self.pending.clear();
        Poll::Ready(Ok(()))
    }

    fn read(&mut self, cx: &mut Context<'_>, from: &Socket) -> Poll<io::Result<usize>> {
        let mut buffer = Buffer::take(self.size);
        let n = ready!(from.poll_read(cx, buffer.bytes_mut()))?;
        self.size = self.size.next(n);
        let read = buffer.bytes().get(..n).unwrap_or_default();
        let data = if n < WORTH_A_BUFFER { Data::Few(read.into()) } else { Data::Many(buffer) };
        let chunk = Chunk { data, _in_flight: self.in_flight.clone() };
        self.pending = Bytes::from_owner(chunk).slice(..n);
        Poll::Ready(Ok(n))
    }
}

/// What one read brought. HTTP/2 drops it once it is written, or when its stream is gone.
struct Chunk {
    data: Data,
    _in_flight: Option<Arc<InFlight>>,
}

enum Data {
    Few(Box<[u8]>),
    Many(Buffer),
}

impl AsRef<[u8]> for Chunk {
    fn as_ref(&self) -> &[u8] {
        match &self.data {
            Data::Few(bytes) => bytes,
            Data::Many(buffer) => buffer.bytes(),
        }
    }
}

/// Shared by a direction and its chunks; tells when all of them are gone. A last frame without payload would tell too,
/// but peers that guard against floods of empty frames (CVE-2019-9518) close the whole connection at the second.
#[derive(Default)]
struct InFlight {
    gone: Arc<Notify>,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.gone.notify_one();
    }
}

/// From the stream to the socket; holds no more than the window that the peer was given.
///
/// All that arrives is taken at once: HTTP/2 ends a connection in which many small frames wait to be taken, however few
/// bytes they hold, and a slow application must not do that to those it shares the connection with.
pub(super) struct Down {
    pending: VecDeque<Bytes>,
    /// Small frames behind `pending`.
    tail: BytesMut,
    /// The peer's end, seen and not yet carried on.
    end: Option<Result<(), h2::Error>>,
    ended: bool,
    /// The bytes copied so far.
    pub(super) total: u64,
}

impl Down {
    pub(super) fn new() -> Self {
        Self { pending: VecDeque::new(), tail: BytesMut::new(), end: None, ended: false, total: 0 }
    }

    /// Copies until the end of the peer's stream, which it carries on as FIN.
    ///
    /// The error tells which of the two failed: the socket, or the peer by a reset. What the peer sent before its reset
    /// is written as far as it goes without waiting.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        (from, control): (&mut RecvStream, &mut SendStream<Bytes>),
        to: &Socket,
        copied: impl Fn(usize),
    ) -> Poll<Result<(), (Side, io::Error)>> {
        if self.ended {
            return Poll::Ready(Ok(()));
        }
        for _ in 0..TURNS {
            self.fill(cx, from);
            if self.pending.is_empty() {
                self.close_tail();
            }
            if self.pending.is_empty() {
                match self.end.take() {
                    None => return Poll::Pending,
                    Some(Ok(())) => {
                        self.ended = true;
                        return Poll::Ready(to.shutdown().map_err(|e| (Side::To, e)));
                    }
                    Some(Err(error)) => return Poll::Ready(Err((Side::From, into_io(error)))),
                }
            }
            let written = self.write(cx, to);
            if written.is_pending()
                && let Poll::Ready(Err(error)) = poll_reset(cx, control)
            {
                return Poll::Ready(Err((Side::From, error)));
            }
            let n = ready!(written).map_err(|e| (Side::To, e))?;
            self.total += n as u64;
            copied(n);
            // It fails for a stream that is gone, which the next read tells better.
            if let Err(error) = from.flow_control().release_capacity(n) {
                tracing::trace!(%error, "window of a stream that is gone");
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn fill(&mut self, cx: &mut Context<'_>, from: &mut RecvStream) {
        while self.end.is_none() {
            match from.poll_data(cx) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(data))) => self.push(data),
                Poll::Ready(Some(Err(error))) if is_end(&error) => self.end = Some(Ok(())),
                Poll::Ready(Some(Err(error))) => self.end = Some(Err(error)),
                Poll::Ready(None) => self.end = Some(Ok(())),
            }
        }
    }

    fn push(&mut self, data: Bytes) {
        let room = self.pending.len() < FRAMES && self.tail.is_empty();
        if data.len() < WORTH_A_CHUNK && !room {
            self.tail.extend_from_slice(&data);
            if self.tail.len() >= CHUNK {
                self.close_tail();
            }
        } else if !data.is_empty() {
            self.close_tail();
            self.pending.push_back(data);
        }
    }

    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.pending.push_back(std::mem::take(&mut self.tail).freeze());
        }
    }

    fn write(&mut self, cx: &mut Context<'_>, to: &Socket) -> Poll<io::Result<usize>> {
        let mut slices = [IoSlice::new(&[]); FRAMES];
        let mut count = 0;
        for (slice, data) in slices.iter_mut().zip(&self.pending) {
            *slice = IoSlice::new(data);
            count += 1;
        }
        let written = ready!(to.poll_write(cx, slices.get(..count).unwrap_or_default()))?;
        let mut left = written;
        while let Some(first) = self.pending.front_mut() {
            if left < first.len() {
                first.advance(left);
                break;
            }
            left -= first.len();
            self.pending.pop_front();
        }
        Poll::Ready(Ok(written))
    }
}

/// `Ok` when the peer wants nothing more of a stream that is otherwise whole, the error when it reset it.
pub(super) fn poll_reset(
    cx: &mut Context<'_>,
    stream: &mut SendStream<Bytes>,
) -> Poll<Result<(), io::Error>> {
    match ready!(stream.poll_reset(cx)) {
        Ok(Reason::NO_ERROR | Reason::CANCEL) => Poll::Ready(Ok(())),
        Ok(reason) => Poll::Ready(Err(into_io(reason.into()))),
        Err(error) => Poll::Ready(Err(into_io(error))),
    }
}

/// Peers that lose interest say `CANCEL`, and servers that are done say `NO_ERROR`; neither is a broken connection.
fn is_end(error: &h2::Error) -> bool {
    error.is_reset() && matches!(error.reason(), Some(Reason::NO_ERROR | Reason::CANCEL))
}

/// A stream's error as that of a connection that was reset.
fn into_io(error: h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, error)
}
