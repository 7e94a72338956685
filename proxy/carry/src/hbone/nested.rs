//! A tunnel as the ground of another connection: its bytes as a stream that TLS and HTTP/2 run over.
//!
//! What is connected within, and by whose certificate, is [`super::client`]'s.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Tunnel;

/// Both directions of a tunnel. Dropped before both have ended, it resets the tunnel.
#[derive(Debug)]
pub(super) struct TunnelStream {
    tunnel: Tunnel,
    /// What has arrived and not been taken; its part of the window is given back as it is.
    arrived: Bytes,
    read_ended: bool,
    write_ended: bool,
}

impl TunnelStream {
    pub(super) fn new(tunnel: Tunnel) -> Self {
        Self { tunnel, arrived: Bytes::new(), read_ended: false, write_ended: false }
    }

    fn settle(&mut self) {
        if self.read_ended && self.write_ended {
            self.tunnel.end();
        }
    }
}

impl AsyncRead for TunnelStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.arrived.is_empty() && !this.read_ended {
            if let Some(data) = ready!(this.tunnel.recv.poll_data(cx)) {
                this.arrived = data.map_err(io::Error::other)?;
            } else {
                this.read_ended = true;
                this.settle();
            }
        }
        let n = this.arrived.len().min(into.remaining());
        into.put_slice(this.arrived.get(..n).unwrap_or_default());
        this.arrived.advance(n);
        if n > 0 {
            this.tunnel.recv.flow_control().release_capacity(n).map_err(io::Error::other)?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TunnelStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        if from.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let send = &mut self.get_mut().tunnel.send;
        send.reserve_capacity(from.len());
        let mut room = send.capacity();
        while room == 0 {
            room = match ready!(send.poll_capacity(cx)) {
                Some(room) => room.map_err(io::Error::other)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            };
        }
        let chunk = from.get(..room.min(from.len())).unwrap_or_default();
        send.send_data(Bytes::copy_from_slice(chunk), false).map_err(io::Error::other)?;
        Poll::Ready(Ok(chunk.len()))
    }

    /// What is written is with the outer connection, whose own task sends it.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.write_ended {
            this.write_ended = true;
            this.settle();
            if let Err(error) = this.tunnel.send.send_data(Bytes::new(), true) {
                tracing::trace!(%error, "end of a stream that is gone");
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests;
