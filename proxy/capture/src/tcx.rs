//! tcx links (Linux 6.6): one of ours a hook, pinned, and ahead of everybody else's, whose verdict could end the chain
//! before ours is asked. A foreign link is never touched.
//!
//! Which program belongs where, and what to do on kernels without tcx, is the business of `hooks`.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use culvert_sys::{bpf, chain, netns::Netns};
use nix::errno::Errno;

use crate::{
    error::{CaptureError, InNetns as _},
    filters::Hook,
    pins::{PodPins, pin_error},
};

/// A hook of an interface, and the program of ours that belongs there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// Where the interface is.
    pub(crate) netns: &'a Netns,
    /// Its index there.
    pub(crate) interface: u32,
    pub(crate) hook: Hook,
    /// The program's name.
    pub(crate) name: &'static str,
    pub(crate) pins: &'a PodPins,
}

/// How our link stands in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The kernel has no tcx.
    Unsupported,
    /// It is not there.
    Absent,
    /// Before all that are not ours; the id of its program.
    First(u32),
    /// Behind somebody else's; the id of its program.
    Behind(u32),
}

impl Place<'_> {
    /// Looks at the chain.
    pub(crate) fn standing(&self) -> Result<Standing, CaptureError> {
        self.settle()?;
        let attempt = || format!("list the tcx links of interface {}", self.interface);
        let chain = match self.run(|| chain::attached(self.interface, self.hook.into())) {
            Err(e) if e.raw_os_error() == Some(Errno::EINVAL as i32) => {
                return Ok(Standing::Unsupported);
            }
            chain => chain.in_netns(self.netns.inode(), attempt())?,
        };
        let ours = self.ours()?;
        let link = bpf::open_pin(&self.pin()).and_then(|link| bpf::link_ids(link.as_fd())).ok();
        let place = link.and_then(|link| chain.iter().position(|other| other.link == link.link));
        Ok(match place.and_then(|place| chain.split_at_checked(place)) {
            Some((before, [link, ..])) if before.iter().all(|other| ours.contains(&other.link)) => {
                Standing::First(link.program)
            }
            Some((_, [link, ..])) => Standing::Behind(link.program),
            _ => Standing::Absent,
        })
    }

    /// Gives our link another program: packets see the old or the new, never neither or both.
    pub(crate) fn update(&self, program: BorrowedFd<'_>) -> Result<(), CaptureError> {
        bpf::open_pin(&self.pin())
            .and_then(|link| bpf::link_update(link.as_fd(), program))
            .in_netns(self.netns.inode(), format!("update the link of {}", self.name))
    }

    /// Attaches `program` before all others; only then what is pinned is detached. It must not be in the chain already.
    pub(crate) fn attach(&self, program: BorrowedFd<'_>) -> Result<(), CaptureError> {
        let attempt = format!("attach {} to interface {}", self.name, self.interface);
        let link = self
            .run(|| chain::attach_first(program, self.interface, self.hook.into()))
            .in_netns(self.netns.inode(), attempt)?;
        let aside = self.aside();
        bpf::pin(link.as_fd(), &aside).map_err(pin_error("pin", &aside))?;
        self.settle()
    }

    /// The second step of [`Self::attach`], also of one that a process before could not finish.
    fn settle(&self) -> Result<(), CaptureError> {
        let (pin, aside) = (self.pin(), self.aside());
        if !aside.exists() {
            return Ok(());
        }
        let former = bpf::open_pin(&pin);
        fs::rename(&aside, &pin).map_err(pin_error("pin", &pin))?;
        if let Ok(former) = former {
            detach(&former);
        }
        Ok(())
    }

    fn ours(&self) -> Result<BTreeSet<u32>, CaptureError> {
        let pins = self.pins.tc_links()?;
        let here = pins.into_iter().filter(|pin| pin.interface == self.interface);
        let ids = here.filter_map(|pin| bpf::link_ids(bpf::open_pin(&pin.path).ok()?.as_fd()).ok());
        Ok(ids.map(|ids| ids.link).collect())
    }

    fn run<T>(&self, f: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.netns.run(f)?
    }

    fn pin(&self) -> PathBuf {
        self.pins.tc_link(self.interface, self.name)
    }

    fn aside(&self) -> PathBuf {
        self.pins.tc_link(self.interface, &format!("{}-new", self.name))
    }
}

/// Detaches what is pinned at `pin`, if anything is.
pub(crate) fn remove(pin: &Path) -> Result<(), CaptureError> {
    let Ok(link) = bpf::open_pin(pin) else { return Ok(()) };
    detach(&link);
    fs::remove_file(pin).map_err(pin_error("remove", pin))
}

fn detach(link: &OwnedFd) {
    // Its interface may be gone.
    drop(bpf::link_detach(link.as_fd()));
}

impl From<Hook> for chain::Hook {
    fn from(hook: Hook) -> Self {
        match hook {
            Hook::Ingress => Self::Ingress,
            Hook::Egress => Self::Egress,
        }
    }
}
