//! Descriptors that one process hands to another over a unix socket (`SCM_RIGHTS` of `unix(7)`).

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use nix::{
    cmsg_space,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg},
    unistd::geteuid,
};

/// How many descriptors one message can bring: `SCM_MAX_FD` of the kernel. With less room it would drop what is beyond, and
/// leave those before to nobody.
const MOST: usize = 253;

/// Sends `bytes` and copies of `descriptors`, which arrive with their first byte; gives how many bytes were taken.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL;
    let sent = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)?;
    Ok(sent)
}

/// What was received at one go.
#[derive(Debug)]
pub struct Received {
    /// How many bytes; 0 is the end of a connection, or looks like it.
    pub length: usize,
    /// What came with them, closed when this is dropped.
    pub descriptors: Vec<OwnedFd>,
    /// There was more than fits: bytes of a message that the socket keeps apart from others, or descriptors.
    pub truncated: bool,
}

/// Receives bytes, and what descriptors came with them.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = cmsg_space!([RawFd; MOST]);
    let mut slices = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            descriptors.extend(raw.into_iter().map(owned));
        }
    }
    let truncated = message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
    Ok(Received { length: message.bytes, descriptors, truncated })
}

fn owned(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just given this descriptor to us alone.
    #[expect(unsafe_code, reason = "a raw descriptor has no other way to become an owned one")]
    unsafe {
        OwnedFd::from_raw_fd(raw)
    }
}

/// Whether a process of user `uid` may have what this process has: it is root's, or the same user's.
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::Read as _,
        os::{fd::AsFd as _, unix::net::UnixStream},
    };

    use super::*;

    #[test]
    fn a_descriptor_arrives_with_the_bytes_it_was_sent_with() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = File::open("/proc/self/comm").unwrap();
        assert_eq!(send(ours.as_fd(), b"one", &[file.as_fd()]).unwrap(), 3);
        assert_eq!(send(ours.as_fd(), b"two", &[]).unwrap(), 3);
        drop((ours, file));
        let mut buffer = [0; 3];
        let Received { length, mut descriptors, .. } =
            receive(theirs.as_fd(), &mut buffer).unwrap();
        assert_eq!((length, &buffer), (3, b"one"));
        let mut text = String::new();
        File::from(descriptors.pop().unwrap()).read_to_string(&mut text).unwrap();
        assert!(!text.is_empty() && descriptors.is_empty());
        let Received { length, descriptors, .. } = receive(theirs.as_fd(), &mut buffer).unwrap();
        assert_eq!((length, &buffer, descriptors.len()), (3, b"two", 0));
        assert_eq!(receive(theirs.as_fd(), &mut buffer).unwrap().length, 0);
    }

    #[test]
    fn all_that_one_message_can_bring_arrives() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(ours.as_fd(), b"x", &vec![ours.as_fd(); MOST]).unwrap();
        assert_eq!(receive(theirs.as_fd(), &mut [0]).unwrap().descriptors.len(), MOST);
        assert!(send(ours.as_fd(), b"x", &vec![ours.as_fd(); MOST + 1]).is_err());
    }

    #[test]
    fn root_and_the_own_user_are_trusted() {
        let own = geteuid().as_raw();
        assert!(is_trusted(0) && is_trusted(own));
        assert!(!is_trusted(own.wrapping_add(7)));
    }
}
