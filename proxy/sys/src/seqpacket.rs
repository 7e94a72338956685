//! Unix sockets that keep messages apart and carry descriptors (`SOCK_SEQPACKET` of `unix(7)`). What they say is the
//! caller's business.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixAddr, bind, connect as connect_to, listen as listen_on, recvmsg, sendmsg, socket,
};

/// How many connections wait to be accepted; clients dial again.
const BACKLOG: i32 = 16;
/// Descriptors that a message may bring before the kernel cuts it. Every protocol here has at most one; a second must be
/// seen to be refused.
const DESCRIPTORS: usize = 4;

const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

/// One message that was received.
#[derive(Debug)]
pub struct Message {
    /// Its length in bytes; 0 is also what the end of a connection looks like.
    pub length: usize,
    /// What it brought.
    pub descriptors: Vec<OwnedFd>,
    /// It was longer than the buffer, or brought more than it may.
    pub truncated: bool,
}

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

/// Sends `bytes` as one message, with `descriptor` beside it.
pub fn send(
    connection: BorrowedFd<'_>,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let descriptors = descriptor.map(|descriptor| [descriptor.as_raw_fd()]);
    let rights = descriptors.as_ref().map(|descriptors| ControlMessage::ScmRights(descriptors));
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_EOR;
    let sent = sendmsg::<()>(
        connection.as_raw_fd(),
        &[IoSlice::new(bytes)],
        rights.as_slice(),
        flags,
        None,
    )?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives the next message into `buffer`. Whatever descriptors it brings are closed with the returned value.
pub fn receive(connection: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Message> {
    let mut space = nix::cmsg_space!([libc::c_int; DESCRIPTORS]);
    let mut buffers = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = recvmsg::<()>(connection.as_raw_fd(), &mut buffers, Some(&mut space), flags)?;
    let cut = MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC;
    let mut truncated = received.flags.intersects(cut);
    let mut descriptors = Vec::new();
    match received.cmsgs() {
        Ok(messages) => {
            for message in messages {
                let ControlMessageOwned::ScmRights(rights) = message else { continue };
                descriptors.extend(rights.into_iter().map(owned));
            }
        }
        Err(_more_than_fits) => truncated = true,
    }
    Ok(Message { length: received.bytes, descriptors, truncated })
}

/// This process's effective user.
pub fn own_user() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// A descriptor that the kernel has just made for this process, and that nobody else was told of.
fn owned(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the caller got it from the kernel in the line before, and keeps no copy.
    #[expect(unsafe_code, reason = "nix gives the number alone")]
    let owned = unsafe { OwnedFd::from_raw_fd(descriptor) };
    owned
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
        send(client.as_fd(), b"one", Some(file.as_fd())).unwrap();
        send(client.as_fd(), b"two", None).unwrap();
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
        send(client.as_fd(), &[0; 17], None).unwrap();
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
