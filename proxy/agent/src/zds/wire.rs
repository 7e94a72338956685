//! Messages on a socket: one a packet, at most [`MESSAGE`] bytes, with at most one descriptor.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use culvert_sys::handoff;
use prost::Message;
use tokio::{io::Interest, net::UnixStream};

/// The longest message that peers take; longer ones are cut there, and end the connection.
pub(super) const MESSAGE: usize = 1024;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed.
    #[error("exchange messages with the peer")]
    Socket(#[source] io::Error),
    /// The peer is gone.
    #[error("the peer closed the connection")]
    Closed,
    /// It sent more than the protocol allows.
    #[error("a message is longer than {MESSAGE} bytes, or brings too many descriptors")]
    TooLong,
    /// It sent more descriptors than one.
    #[error("a message brings {count} descriptors; at most one is allowed")]
    Descriptors {
        /// How many.
        count: usize,
    },
    /// It sent something else.
    #[error("a message is not of this protocol")]
    Malformed(#[source] prost::DecodeError),
    /// It took too long.
    #[error("the peer did not answer in time")]
    Late,
}

/// A connection on which messages go both ways.
#[derive(Debug)]
pub(super) struct Connection {
    socket: UnixStream,
}

impl Connection {
    /// Takes over a connected socket that keeps messages apart.
    pub(super) fn new(socket: UnixStream) -> Self {
        Self { socket }
    }

    /// Sends `message`, with `descriptor` beside it. Cancel-safe: it is sent whole or not at all.
    pub(super) async fn send(
        &self,
        message: &impl Message,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), WireError> {
        let bytes = message.encode_to_vec();
        if bytes.len() > MESSAGE {
            return Err(WireError::TooLong);
        }
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, || {
                handoff::send(self.socket.as_fd(), &bytes, descriptor.as_slice())
            })
            .await;
        match sent {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) => Err(WireError::Socket(io::ErrorKind::WriteZero.into())),
            Err(error) => Err(match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => WireError::Closed,
                _ => WireError::Socket(error),
            }),
        }
    }

    /// Receives the next message with the descriptor that it brings. Cancel-safe.
    pub(super) async fn receive<M: Message + Default>(
        &self,
    ) -> Result<(M, Option<OwnedFd>), WireError> {
        let mut buffer = [0; MESSAGE];
        let received = self
            .socket
            .async_io(Interest::READABLE, || handoff::receive(self.socket.as_fd(), &mut buffer))
            .await;
        let received = received.map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionReset => WireError::Closed,
            _ => WireError::Socket(error),
        })?;
        if received.truncated {
            return Err(WireError::TooLong);
        }
        // No message of the protocol is empty: each says at least what it is.
        let bytes = buffer.get(..received.length).filter(|bytes| !bytes.is_empty());
        let bytes = bytes.ok_or(WireError::Closed)?;
        let mut descriptors = received.descriptors.into_iter();
        let (descriptor, more) = (descriptors.next(), descriptors.len());
        if more > 0 {
            return Err(WireError::Descriptors { count: more + 1 });
        }
        let message = M::decode(bytes).map_err(WireError::Malformed)?;
        Ok((message, descriptor))
    }
}

/// `text`, cut to what is left of a message for it.
pub(super) fn short(text: &str) -> String {
    let mut end = text.len().min(MESSAGE / 2);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().to_owned()
}
