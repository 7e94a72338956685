//! Large reads beneath TLS, which by itself reads one record of at most 16 KiB at a time.
//!
//! Writes go through as they are: TLS gathers records by itself.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use crate::buffer::{Buffer, Size};

/// A socket whose reads are served from a buffer, which it holds only while there is something in it.
#[derive(Debug)]
pub(super) struct ReadAhead {
    tcp: TcpStream,
    size: Size,
    /// What has been read and not taken: from `.1` to `.2`.
    ahead: Option<(Buffer, usize, usize)>,
}

impl ReadAhead {
    pub(super) fn new(tcp: TcpStream) -> Self {
        Self { tcp, size: Size::Small, ahead: None }
    }
}

impl AsyncRead for ReadAhead {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.ahead.is_none() {
            let mut buffer = Buffer::take(this.size);
            let mut read = ReadBuf::new(buffer.bytes_mut());
            ready!(Pin::new(&mut this.tcp).poll_read(cx, &mut read))?;
            let n = read.filled().len();
            this.size = this.size.next(n);
            this.ahead = (n > 0).then_some((buffer, 0, n));
        }
        if let Some((buffer, start, end)) = &mut this.ahead {
            let rest = buffer.bytes().get(*start..*end).unwrap_or_default();
            let taken = rest.get(..into.remaining()).unwrap_or(rest);
            into.put_slice(taken);
            *start += taken.len();
            if start >= end {
                this.ahead = None;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ReadAhead {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
