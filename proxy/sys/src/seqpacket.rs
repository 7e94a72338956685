//! Unix sockets that keep messages apart (`SOCK_SEQPACKET` of `unix(7)`). What goes over them is `handoff`'s.

use std::{
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect as connect_to,
    listen as listen_on, socket,
};

/// How many connections wait to be accepted; clients dial again.
const BACKLOG: i32 = 16;
const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

/// Opens a non-blocking listener at `path`, which must not exist.
///
/// Accepting from it gives sockets of its own type, whatever the standard library calls them.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = seqpacket()?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen_on(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener.into())
}

/// Connects to the listener at `path`. A full backlog is `WouldBlock`.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let connection = seqpacket()?;
    connect_to(connection.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(connection.into())
}

fn seqpacket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, FLAGS, None)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::Read as _,
        os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    };

    use super::*;
    use crate::handoff::{receive, send};

    fn connected() -> (UnixStream, UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = listen(&path).unwrap();
        let client = connect(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        (client, server)
    }

    #[test]
    fn messages_are_kept_apart_and_bring_their_descriptor() {
        let (client, server) = connected();
        let file = File::open("/proc/self/status").unwrap();
        send(client.as_fd(), b"one", &[file.as_fd()]).unwrap();
        send(client.as_fd(), b"two", &[]).unwrap();
        let mut buffer = [0; 16];
        let one = receive(server.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..one.length], one.truncated), (&b"one"[..], false));
        let [descriptor] = <[OwnedFd; 1]>::try_from(one.descriptors).unwrap();
        let mut brought = File::from(descriptor);
        assert_eq!(brought.metadata().unwrap().ino(), file.metadata().unwrap().ino());
        assert!(brought.read(&mut [0; 16]).unwrap() > 0);
        let two = receive(server.as_fd(), &mut buffer).unwrap();
        assert_eq!((&buffer[..two.length], two.descriptors.len()), (&b"two"[..], 0));
    }

    #[test]
    fn a_message_that_does_not_fit_is_told_from_one_that_does() {
        let (client, server) = connected();
        send(client.as_fd(), &[0; 17], &[]).unwrap();
        assert!(receive(server.as_fd(), &mut [0; 16]).unwrap().truncated);
    }

    #[test]
    fn the_end_of_a_connection_is_a_message_of_no_bytes() {
        let (client, server) = connected();
        let waits = receive(server.as_fd(), &mut [0; 16]).unwrap_err();
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
        drop(client);
        assert_eq!(receive(server.as_fd(), &mut [0; 16]).unwrap().length, 0);
    }
}
