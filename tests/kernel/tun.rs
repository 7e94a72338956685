//! A device without link-layer headers, whose other end is this process.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::Path,
};

use crate::netns::ip;

/// Its name.
pub(crate) const NAME: &str = "tun0";

/// `struct ifreq`, as `TUNSETIFF` reads it.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// The process's end.
pub(crate) struct Tun(File);

impl Tun {
    /// Makes the device in the namespace of the calling thread, with addresses and routes of its own.
    pub(crate) fn new() -> Self {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open("/dev/net/tun").unwrap();
        let mut request = Request {
            name: [0; libc::IFNAMSIZ],
            flags: i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI).unwrap(),
            rest: [0; 22],
        };
        request.name[..NAME.len()].copy_from_slice(NAME.as_bytes());
        // SAFETY: the descriptor is open, and `request` is of the layout and size that this request reads and writes.
        #[expect(unsafe_code, reason = "the only way to make a tun device is an ioctl")]
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        assert_eq!(rc, 0, "TUNSETIFF: {}", io::Error::last_os_error());
        ip("link set tun0 up");
        ip("route add 203.0.113.0/24 dev tun0");
        ip("-6 route add 2001:db8:1::/64 dev tun0");
        Self(file)
    }

    /// Whether the kernel lets this process have one.
    pub(crate) fn available() -> bool {
        let there = Path::new("/dev/net/tun").exists();
        if !there {
            println!("skipped: /dev/net/tun is missing");
        }
        there
    }

    /// A packet comes in by the device.
    pub(crate) fn receive(&self, packet: &[u8]) {
        (&self.0).write_all(packet).unwrap();
    }

    /// The TCP segments among the packets that have left by the device.
    pub(crate) fn sent(&self) -> usize {
        let mut packet = [0; 2048];
        let mut segments = 0;
        while let Ok(length) = (&self.0).read(&mut packet) {
            let protocol = if packet[0] >> 4 == 4 { packet[9] } else { packet[6] };
            segments += usize::from(length > 0 && protocol == 6);
        }
        segments
    }
}
