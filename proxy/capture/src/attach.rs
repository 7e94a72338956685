//! Programs on cgroups: by a pinned link, which a process after this one takes over, or by a link that the kernel ends
//! with the process.

use std::{
    fs::{self, File},
    io,
    os::fd::AsFd as _,
    path::Path,
};

use aya::programs::{
    CgroupAttachMode, CgroupSockAddr, ProgramError, ProgramFd, SockOps, links::FdLink,
};
use culvert_sys::bpf::{self, LinkTarget};

use crate::{error::CaptureError, pins::pin_error};

/// A cgroup to attach to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cgroup<'a> {
    pub(crate) path: &'a Path,
    /// As [`culvert_sys::cgroup::id`] gives it.
    pub(crate) id: u64,
}

/// A loaded program that runs on cgroups.
pub(crate) trait OnCgroup {
    fn loaded(&self) -> Result<&ProgramFd, ProgramError>;

    /// Attaches it for as long as the link lives.
    fn link(&mut self, cgroup: File) -> Result<FdLink, ProgramError>;
}

// A link is always one of many; any other mode than `Single` is EINVAL for links.
impl OnCgroup for SockOps {
    fn loaded(&self) -> Result<&ProgramFd, ProgramError> {
        self.fd()
    }

    fn link(&mut self, cgroup: File) -> Result<FdLink, ProgramError> {
        let id = self.attach(cgroup, CgroupAttachMode::Single)?;
        self.take_link(id)?.try_into().map_err(without_link)
    }
}

impl OnCgroup for CgroupSockAddr {
    fn loaded(&self) -> Result<&ProgramFd, ProgramError> {
        self.fd()
    }

    fn link(&mut self, cgroup: File) -> Result<FdLink, ProgramError> {
        let id = self.attach(cgroup, CgroupAttachMode::Single)?;
        self.take_link(id)?.try_into().map_err(without_link)
    }
}

/// aya attaches without a link before Linux 5.7.
fn without_link(error: impl std::error::Error + Send + Sync + 'static) -> ProgramError {
    ProgramError::IOError(io::Error::other(error))
}

/// Attaches the program by the link pinned at `pin` where that is attached to the cgroup, else anew.
pub(crate) fn pinned(
    program: &mut impl OnCgroup,
    name: &'static str,
    cgroup: Cgroup<'_>,
    pin: &Path,
) -> Result<(), CaptureError> {
    if let Ok(link) = bpf::open_pin(pin)
        && matches!(bpf::link_target(link.as_fd()), Ok(LinkTarget::Cgroup(id)) if id == cgroup.id)
    {
        let fd = program.loaded().map_err(failed(name))?;
        return bpf::link_update(link.as_fd(), fd.as_fd())
            .map_err(ProgramError::IOError)
            .map_err(failed(name));
    }
    let link = make(program, name, cgroup)?;
    let aside = pin.with_file_name(format!("{name}-new"));
    if aside.exists() {
        fs::remove_file(&aside).map_err(pin_error("remove", &aside))?;
    }
    let _pinned = link.pin(&aside).map_err(|e| pin_error("pin", &aside)(io::Error::other(e)))?;
    fs::rename(&aside, pin).map_err(pin_error("pin", pin))
}

/// Attaches the program for as long as the link lives that it gives; only then one that is pinned is taken away.
pub(crate) fn unpinned(
    program: &mut impl OnCgroup,
    name: &'static str,
    cgroup: Cgroup<'_>,
    pin: &Path,
) -> Result<FdLink, CaptureError> {
    let link = make(program, name, cgroup)?;
    remove(pin)?;
    Ok(link)
}

/// Detaches what is pinned at `pin`, if anything is.
pub(crate) fn remove(pin: &Path) -> Result<(), CaptureError> {
    let Ok(link) = bpf::open_pin(pin) else { return Ok(()) };
    // Its cgroup may be gone.
    drop(bpf::link_detach(link.as_fd()));
    fs::remove_file(pin).map_err(pin_error("remove", pin))
}

fn make(
    program: &mut impl OnCgroup,
    name: &'static str,
    cgroup: Cgroup<'_>,
) -> Result<FdLink, CaptureError> {
    let file = File::open(cgroup.path).map_err(pin_error("open cgroup", cgroup.path))?;
    program.link(file).map_err(failed(name))
}

fn failed(program: &'static str) -> impl FnOnce(ProgramError) -> CaptureError {
    move |source| CaptureError::Program { attempt: "attach", program, source }
}
