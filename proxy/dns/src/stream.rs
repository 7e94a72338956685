//! Messages on a stream, each after its length (RFC 1035 §4.2.2).

use std::io;

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};

use crate::forward::PATIENCE;

/// Length of a message's length.
const PREFIX: usize = 2;
/// Read at a time: questions are short.
const CHUNK: usize = 4096;

/// What has come of a stream and was not taken yet: no more than a message and what came with its end.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    buffer: Vec<u8>,
}

impl Frames {
    /// The next message; `None` if the stream has ended before one began. Nothing is lost if it is dropped.
    pub(crate) async fn next(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
    ) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(message) = self.take() {
                return Ok(Some(message));
            }
            self.buffer.reserve(CHUNK);
            if stream.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    fn take(&mut self) -> Option<Vec<u8>> {
        let prefix = self.buffer.first_chunk::<PREFIX>()?;
        let end = PREFIX + usize::from(u16::from_be_bytes(*prefix));
        let message = self.buffer.get(PREFIX..end)?.to_vec();
        self.buffer.drain(..end);
        Some(message)
    }
}

/// Writes one message, within a deadline.
pub(crate) async fn write(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &[u8],
) -> io::Result<()> {
    let len = u16::try_from(message.len()).map_err(|_too_long| io::ErrorKind::InvalidInput)?;
    // At once: some read no further than the first segment.
    let framed = [&len.to_be_bytes(), message].concat();
    let writing = async {
        stream.write_all(&framed).await?;
        stream.flush().await
    };
    timeout(PATIENCE, writing).await.map_err(|_elapsed| io::ErrorKind::TimedOut)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_whole_however_they_are_cut() {
        let (mut near, mut far) = tokio::io::duplex(1);
        let messages = [&b""[..], b"a", &[7; 5000]];
        let writing = async {
            for message in messages {
                write(&mut far, message).await.unwrap();
            }
            drop(far);
        };
        let reading = async {
            let mut frames = Frames::default();
            for message in messages {
                assert_eq!(frames.next(&mut near).await.unwrap().as_deref(), Some(message));
            }
            assert_eq!(frames.next(&mut near).await.unwrap(), None);
        };
        tokio::join!(writing, reading);
    }

    #[tokio::test]
    async fn a_message_that_is_cut_short_is_an_error() {
        let mut frames = Frames::default();
        let error = frames.next(&mut &[0, 2, 1][..]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn a_message_longer_than_its_length_can_say_is_not_sent() {
        let error = write(&mut tokio::io::sink(), &vec![0; 1 << 16]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_read_is_given_up() {
        let (mut near, _far) = tokio::io::duplex(1);
        let error = write(&mut near, b"message").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
