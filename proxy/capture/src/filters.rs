//! tc filters: one a hook, at a priority and handle of our own, replaced atomically; and the clsact qdiscs they need.
//! A foreign qdisc or filter is never touched.
//!
//! For kernels before 6.6, which have no tcx links. They are found again after a crash by what is attached, not by what
//! we remember.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use nix::errno::Errno;
use rtnetlink::{
    packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL, Nla as _, NlasIterator},
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage, TcOption},
    },
};

use crate::rtnl::{Rtnl, tolerate};

/// Early, so that another filter's `TC_ACT_OK` cannot pass what `guard` would drop.
const PRIORITY: u16 = 11;
const HANDLE: u32 = 1;

/// `linux/pkt_cls.h`.
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// A place where filters run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    const fn parent(self) -> TcHandle {
        let minor = match self {
            Self::Ingress => TcHandle::MIN_INGRESS,
            Self::Egress => TcHandle::MIN_EGRESS,
        };
        TcHandle { major: u16::MAX, minor }
    }
}

/// Which packets reach the filter, as `protocol` of `tc-filter(8)`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Packets {
    All = 0x0003,
    Ipv6 = 0x86dd,
}

/// One of our filters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filter {
    /// The program, whose name the filter bears.
    pub(crate) name: &'static str,
    pub(crate) hook: Hook,
    pub(crate) packets: Packets,
}

/// Adds a clsact qdisc; an existing one stays as it is.
///
/// An `ingress` qdisc in its place is an error: it would take `guard` for a filter of what comes in.
pub(crate) fn add_qdisc(rtnl: &mut Rtnl, interface: u32) -> io::Result<Qdisc> {
    let request = RouteNetlinkMessage::NewQueueDiscipline(qdisc(interface)?);
    match rtnl.change(request, NLM_F_CREATE | NLM_F_EXCL) {
        Ok(()) => Ok(Qdisc::Made),
        Err(e) if e.raw_os_error() == Some(Errno::EEXIST as i32) => {
            if is_clsact(rtnl, interface)? {
                return Ok(Qdisc::Found);
            }
            Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "an ingress qdisc is in its place, which takes no egress filter; replace that by clsact",
            ))
        }
        Err(e) => Err(e),
    }
}

fn is_clsact(rtnl: &mut Rtnl, interface: u32) -> io::Result<bool> {
    let request = qdisc(interface)?;
    let (index, parent) = (request.header.index, request.header.parent);
    let clsact = TcAttribute::Kind("clsact".to_owned());
    // The kernel lists those of every interface.
    let all = rtnl.dump(&RouteNetlinkMessage::GetQueueDiscipline(request))?;
    Ok(all.iter().any(|message| match message {
        RouteNetlinkMessage::NewQueueDiscipline(found) => {
            (found.header.index, found.header.parent) == (index, parent)
                && found.attributes.contains(&clsact)
        }
        _ => false,
    }))
}

/// Whose qdisc it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Qdisc {
    Made,
    Found,
}

/// Attaches `program`, in place of our filter at that hook if there is one: packets see the old or the new, never
/// neither or both.
pub(crate) fn attach(
    rtnl: &mut Rtnl,
    interface: u32,
    filter: Filter,
    program: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut message = TcMessage::with_index(index(interface)?);
    message.header.parent = filter.hook.parent();
    message.header.handle = HANDLE.into();
    message.header.info = info(filter.packets);
    let name = [filter.name.as_bytes(), b"\0"].concat();
    message.attributes = vec![
        TcAttribute::Kind("bpf".to_owned()),
        TcAttribute::Options(vec![
            option(TCA_BPF_FD, program.as_raw_fd().to_ne_bytes().to_vec()),
            option(TCA_BPF_NAME, name),
            option(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes().to_vec()),
        ]),
    ];
    rtnl.change(RouteNetlinkMessage::NewTrafficFilter(message), NLM_F_CREATE)
}

/// Whether our filter is at the hook.
pub(crate) fn is_attached(rtnl: &mut Rtnl, interface: u32, filter: Filter) -> io::Result<bool> {
    Ok(list(rtnl, interface, filter.hook)?.iter().any(|found| found.is(filter)))
}

/// Whether our filter is at the hook, and runs the program of this id.
pub(crate) fn runs(
    rtnl: &mut Rtnl,
    interface: u32,
    filter: Filter,
    program: u32,
) -> io::Result<bool> {
    let found = list(rtnl, interface, filter.hook)?;
    Ok(found.iter().any(|found| found.is(filter) && found.program == Some(program)))
}

/// Removes our filter from the hook, if it is there; one of another name at our priority is not ours.
pub(crate) fn detach(rtnl: &mut Rtnl, interface: u32, filter: Filter) -> io::Result<()> {
    if !is_attached(rtnl, interface, filter)? {
        return Ok(());
    }
    let mut message = TcMessage::with_index(index(interface)?);
    message.header.parent = filter.hook.parent();
    message.header.handle = HANDLE.into();
    message.header.info = info(filter.packets);
    tolerate(rtnl.change(RouteNetlinkMessage::DelTrafficFilter(message), 0), Errno::ENOENT)
}

/// Removes the clsact qdisc, unless a filter is left on it; whether it is gone.
pub(crate) fn remove_qdisc_if_unused(rtnl: &mut Rtnl, interface: u32) -> io::Result<bool> {
    for hook in [Hook::Ingress, Hook::Egress] {
        if !list(rtnl, interface, hook)?.is_empty() {
            return Ok(false);
        }
    }
    let request = RouteNetlinkMessage::DelQueueDiscipline(qdisc(interface)?);
    let removed = tolerate(rtnl.change(request, 0), Errno::ENOENT);
    tolerate(removed, Errno::EINVAL).map(|()| true)
}

#[derive(Debug)]
struct Found {
    priority: u16,
    handle: u32,
    name: Option<String>,
    /// The id of the program.
    program: Option<u32>,
}

impl Found {
    fn is(&self, filter: Filter) -> bool {
        (self.priority, self.handle) == (PRIORITY, HANDLE)
            && self.name.as_deref() == Some(filter.name)
    }
}

fn list(rtnl: &mut Rtnl, interface: u32, hook: Hook) -> io::Result<Vec<Found>> {
    let mut request = TcMessage::with_index(index(interface)?);
    request.header.parent = hook.parent();
    let filters = match rtnl.dump(&RouteNetlinkMessage::GetTrafficFilter(request)) {
        Ok(filters) => filters,
        // The interface went away, and its filters with it.
        Err(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let found = filters.iter().filter_map(|filter| {
        let RouteNetlinkMessage::NewTrafficFilter(filter) = filter else { return None };
        let handle = u32::from(filter.header.handle);
        // Each priority is also listed by itself, with no handle.
        let priority = u16::try_from(filter.header.info >> 16).ok()?;
        (handle != 0).then(|| {
            let program = option_of(filter, TCA_BPF_ID).and_then(|id| id.try_into().ok());
            let program = program.map(u32::from_ne_bytes);
            Found { priority, handle, name: name(filter), program }
        })
    });
    Ok(found.collect())
}

fn name(filter: &TcMessage) -> Option<String> {
    let name = option_of(filter, TCA_BPF_NAME)?;
    let name = name.strip_suffix(b"\0").unwrap_or(&name).to_vec();
    String::from_utf8(name).ok()
}

/// One of the `TCA_BPF_*`, which rtnetlink leaves undecoded inside `TCA_OPTIONS`.
fn option_of(filter: &TcMessage, kind: u16) -> Option<Vec<u8>> {
    let options = filter.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => options.first(),
        _ => None,
    })?;
    let TcOption::Other(options) = options else { return None };
    let mut bytes = vec![0; options.value_len()];
    options.emit_value(&mut bytes);
    let option = NlasIterator::new(bytes.as_slice())
        .filter_map(Result::ok)
        .find(|option| option.kind() == kind)?;
    Some(option.value().to_vec())
}

fn option(kind: u16, value: Vec<u8>) -> TcOption {
    TcOption::Other(DefaultNla::new(kind, value))
}

fn qdisc(interface: u32) -> io::Result<TcMessage> {
    let mut message = TcMessage::with_index(index(interface)?);
    message.header.handle = TcHandle { major: u16::MAX, minor: 0 };
    message.header.parent = TcHandle::CLSACT;
    message.attributes = vec![TcAttribute::Kind("clsact".to_owned())];
    Ok(message)
}

fn info(packets: Packets) -> u32 {
    let protocol = (packets as u16).to_be();
    u32::from(PRIORITY) << 16 | u32::from(protocol)
}

fn index(interface: u32) -> io::Result<i32> {
    i32::try_from(interface).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
}
