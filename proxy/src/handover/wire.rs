//! What the two processes of a node say to each other: lines of words, some with descriptors.

use std::{
    fmt, io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use culvert_sys::handoff;
use tokio::{io::Interest, net::UnixStream};

use crate::admin::Endpoint;

/// Of the language. A process answers no other.
const VERSION: &str = "1";
/// The longest line, by far.
const LONGEST: usize = 256;

/// What is asked of the elder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// A successor is there.
    Hello(Hello),
    /// Let go of the node and its pods.
    Take,
    /// The successor is ready: every pod's connections are its.
    Ready,
    /// The successor ends before the elder: take the node back.
    Leave,
    /// Drain and stop, as at SIGTERM. Whoever may connect may ask it.
    Drain,
}

/// Who the successor is, and what it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Inode number of its network namespace.
    pub(super) netns: u32,
    /// The endpoints whose listening sockets it wants, each with its port.
    pub(super) ports: Vec<(Endpoint, u16)>,
}

/// What the elder answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// To `hello`: a listening socket for each of these endpoints.
    Sockets(Vec<Endpoint>),
    /// To `hello`: another successor is there.
    Taken,
    /// To `hello`: the elder is in another network namespace.
    Elsewhere,
    /// To `take` and `leave`: it is done.
    Done,
    /// To `leave` and `drain`: it ends, and takes nothing.
    Draining,
    /// To whatever it does not understand, or not now.
    No,
}

impl Request {
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let request = match words.next()? {
            "hello" => {
                if words.next()? != VERSION {
                    return None;
                }
                let netns = words.next()?.strip_prefix("netns=")?.parse().ok()?;
                let ports = words.by_ref().map(|word| {
                    let (name, port) = word.split_once('=')?;
                    Some((Endpoint::parse(name)?, port.parse().ok()?))
                });
                Self::Hello(Hello { netns, ports: ports.collect::<Option<_>>()? })
            }
            "take" => Self::Take,
            "ready" => Self::Ready,
            "leave" => Self::Leave,
            "drain" => Self::Drain,
            _ => return None,
        };
        words.next().is_none().then_some(request)
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello(Hello { netns, ports }) => {
                write!(f, "hello {VERSION} netns={netns}")?;
                ports
                    .iter()
                    .try_for_each(|(endpoint, port)| write!(f, " {}={port}", endpoint.name()))
            }
            Self::Take => f.write_str("take"),
            Self::Ready => f.write_str("ready"),
            Self::Leave => f.write_str("leave"),
            Self::Drain => f.write_str("drain"),
        }
    }
}

impl Reply {
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let reply = match words.next()? {
            "sockets" => Self::Sockets(words.by_ref().map(Endpoint::parse).collect::<Option<_>>()?),
            "taken" => Self::Taken,
            "elsewhere" => Self::Elsewhere,
            "done" => Self::Done,
            "draining" => Self::Draining,
            "no" => Self::No,
            _ => return None,
        };
        words.next().is_none().then_some(reply)
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sockets(endpoints) => {
                f.write_str("sockets")?;
                endpoints.iter().try_for_each(|endpoint| write!(f, " {}", endpoint.name()))
            }
            Self::Taken => f.write_str("taken"),
            Self::Elsewhere => f.write_str("elsewhere"),
            Self::Done => f.write_str("done"),
            Self::Draining => f.write_str("draining"),
            Self::No => f.write_str("no"),
        }
    }
}

/// A connection between the two.
#[derive(Debug)]
pub(super) struct Lines {
    stream: UnixStream,
    unread: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Lines {
    /// Fails where the other end is neither root's nor of our own user.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        let uid = stream.peer_cred()?.uid();
        if !handoff::is_trusted(uid) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("the other end is of user {uid}"),
            ));
        }
        Ok(Self { stream, unread: Vec::new(), descriptors: Vec::new() })
    }

    /// Sends a line; the descriptors go with its first byte.
    pub(super) async fn send(
        &self,
        line: &(impl fmt::Display + Sync),
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let line = format!("{line}\n");
        let (mut rest, mut descriptors) = (line.as_bytes(), descriptors);
        while !rest.is_empty() {
            let send = || handoff::send(self.stream.as_fd(), rest, descriptors);
            let sent = self.stream.async_io(Interest::WRITABLE, send).await?;
            rest = rest.get(sent..).unwrap_or_default();
            descriptors = &[];
        }
        Ok(())
    }

    /// The next line, and what descriptors have come so far; `None` at the end. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<Option<(String, Vec<OwnedFd>)>> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line = self.unread.drain(..=end).take(end).collect();
                let line = String::from_utf8(line)
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                return Ok(Some((line, std::mem::take(&mut self.descriptors))));
            }
            if self.unread.len() >= LONGEST {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is too long"));
            }
            let mut buffer = [0; LONGEST];
            let receive = || handoff::receive(self.stream.as_fd(), &mut buffer);
            let received = self.stream.async_io(Interest::READABLE, receive).await?;
            if received.length == 0 {
                return Ok(None);
            }
            self.descriptors.extend(received.descriptors);
            self.unread.extend_from_slice(buffer.get(..received.length).unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let requests = [
            Request::Hello(Hello { netns: 7, ports: Vec::new() }),
            Request::Hello(Hello {
                netns: u32::MAX,
                ports: vec![(Endpoint::Admin, 15000), (Endpoint::Readiness, 1)],
            }),
            Request::Take,
            Request::Ready,
            Request::Leave,
            Request::Drain,
        ];
        for request in requests {
            assert_eq!(Request::parse(&request.to_string()), Some(request));
        }
        let replies = [
            Reply::Sockets(vec![Endpoint::Stats]),
            Reply::Taken,
            Reply::Elsewhere,
            Reply::Done,
            Reply::Draining,
            Reply::No,
        ];
        for reply in replies {
            assert_eq!(Reply::parse(&reply.to_string()), Some(reply));
        }
    }

    #[test]
    fn what_is_not_ours_is_not_understood() {
        let hello =
            ["hello", "hello 2 netns=1", "hello 1", "hello 1 admin=1", "hello 1 netns=1 admin"];
        let more = [
            "hello 1 netns=1 x=1",
            "hello 1 netns=1 admin=70000",
            "hello 1 netns=-1",
            "",
            "take it",
        ];
        for line in hello.into_iter().chain(more) {
            assert_eq!(Request::parse(line), None, "{line}");
        }
        for line in ["", "sockets x", "done it"] {
            assert_eq!(Reply::parse(line), None, "{line}");
        }
    }

    #[tokio::test]
    async fn lines_arrive_one_by_one_and_a_long_one_ends_it() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, mut theirs) = (Lines::new(ours).unwrap(), Lines::new(theirs).unwrap());
        ours.send(&"one\ntwo", &[ours.stream.as_fd()]).await.unwrap();
        let (line, descriptors) = theirs.next().await.unwrap().unwrap();
        assert_eq!((line.as_str(), descriptors.len()), ("one", 1));
        let (line, descriptors) = theirs.next().await.unwrap().unwrap();
        assert_eq!((line.as_str(), descriptors.len()), ("two", 0));
        ours.send(&"x".repeat(2 * LONGEST), &[]).await.unwrap();
        assert_eq!(theirs.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
