//! The sysctls that capture needs in a pod's namespace, and their values before. Never one of an interface but `lo`.

use std::{fs, io};

use culvert_abi::Saved;
use culvert_sys::netns::Netns;

const TCP_FWMARK_ACCEPT: &str = "/proc/sys/net/ipv4/tcp_fwmark_accept";
const FWMARK_REFLECT_V4: &str = "/proc/sys/net/ipv4/fwmark_reflect";
const FWMARK_REFLECT_V6: &str = "/proc/sys/net/ipv6/fwmark_reflect";
const LO_ACCEPT_LOCAL: &str = "/proc/sys/net/ipv4/conf/lo/accept_local";

/// What an enrolled pod has:
/// replies of the application to a delivered connection carry its mark, and so find their way to `lo`;
/// a reset from a closed port carries the mark of the SYN, or it would go to the real client and our dial would hang;
/// `lo` takes packets from the pod's own address.
pub(crate) const WANTED: Saved =
    Saved { tcp_fwmark_accept: 1, fwmark_reflect_v4: 1, fwmark_reflect_v6: 1, lo_accept_local: 1 };

/// Reads the settings as they are.
pub(crate) fn read(netns: &Netns) -> io::Result<Saved> {
    netns.run(|| {
        Ok(Saved {
            tcp_fwmark_accept: read_one(TCP_FWMARK_ACCEPT)?,
            fwmark_reflect_v4: read_one(FWMARK_REFLECT_V4)?,
            fwmark_reflect_v6: read_one(FWMARK_REFLECT_V6)?,
            lo_accept_local: read_one(LO_ACCEPT_LOCAL)?,
        })
    })?
}

/// The settings that are there and not as an enrolled pod has them.
pub(crate) fn astray(now: Saved) -> Vec<&'static str> {
    let all = [
        (TCP_FWMARK_ACCEPT, now.tcp_fwmark_accept, WANTED.tcp_fwmark_accept),
        (FWMARK_REFLECT_V4, now.fwmark_reflect_v4, WANTED.fwmark_reflect_v4),
        (FWMARK_REFLECT_V6, now.fwmark_reflect_v6, WANTED.fwmark_reflect_v6),
        (LO_ACCEPT_LOCAL, now.lo_accept_local, WANTED.lo_accept_local),
    ];
    let astray = all.into_iter().filter(|(_, now, wanted)| *now != Saved::ABSENT && now != wanted);
    astray.map(|(path, ..)| path).collect()
}

/// Writes the settings; absent ones are passed over.
pub(crate) fn write(netns: &Netns, settings: Saved) -> io::Result<()> {
    netns.run(|| {
        write_one(TCP_FWMARK_ACCEPT, settings.tcp_fwmark_accept)?;
        write_one(FWMARK_REFLECT_V4, settings.fwmark_reflect_v4)?;
        write_one(FWMARK_REFLECT_V6, settings.fwmark_reflect_v6)?;
        write_one(LO_ACCEPT_LOCAL, settings.lo_accept_local)
    })?
}

fn read_one(path: &str) -> io::Result<u8> {
    match fs::read_to_string(path) {
        Ok(text) => text.trim().parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Saved::ABSENT),
        Err(e) => Err(e),
    }
}

fn write_one(path: &str, value: u8) -> io::Result<()> {
    if value == Saved::ABSENT {
        return Ok(());
    }
    match fs::write(path, value.to_string()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
