//! Readiness-based reads and writes of a TCP socket that both directions of a copy share.

use std::{
    io::{self, IoSlice},
    net::Shutdown,
    task::{Context, Poll, ready},
};

use socket2::SockRef;
use tokio::{io::Interest, net::TcpStream};

/// A connected socket. Dropped before [`Socket::close`], its connection is reset, so that the application cannot take
/// what it got for all there was.
pub(super) struct Socket {
    stream: TcpStream,
    closed: bool,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, closed: false }
    }

    /// Reads what is there. `0` is the end of the stream.
    pub(super) fn poll_read(
        &self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            let mut read = None;
            // A short read has emptied the socket: saying so here spares the read that would fail.
            let result = self.stream.try_io(Interest::READABLE, || {
                let n = self.stream.try_read(into)?;
                read = Some(n);
                if 0 < n && n < into.len() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
            });
            match (read, result) {
                (Some(n), _) => return Poll::Ready(Ok(n)),
                (None, Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Poll::Ready(Err(error));
                }
                (None, _) => {}
            }
        }
    }

    /// Writes what fits.
    pub(super) fn poll_write(
        &self,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            let result = match from {
                [one] => self.stream.try_write(one),
                many => self.stream.try_write_vectored(many),
            };
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    /// Sends the end of the stream.
    pub(super) fn shutdown(&self) -> io::Result<()> {
        SockRef::from(&self.stream).shutdown(Shutdown::Write)
    }

    /// Waits until the connection has failed, even while nothing is read or written.
    pub(super) async fn failed(&self) -> io::Error {
        if let Err(error) = self.stream.ready(Interest::ERROR).await {
            return error;
        }
        let error = self.stream.take_error().unwrap_or_else(Some);
        error.unwrap_or_else(|| io::ErrorKind::ConnectionReset.into())
    }

    /// Closes the socket; both directions have ended.
    pub(super) fn close(mut self) {
        self.closed = true;
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !self.closed
            && let Err(error) = culvert_sys::socket::reset_on_close(&self.stream)
        {
            tracing::debug!(%error, "a connection is closed where it should be reset");
        }
    }
}
