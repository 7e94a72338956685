//! A blocking rtnetlink client: one request at a time, on a socket that stays in the namespace it was opened in.
//!
//! Enrolment is a sequence of steps on one thread, so each request waits for its answer. Messages are rtnetlink's own
//! types; what they say is up to `interfaces`, `routing` and `filters`.

use std::io;

use culvert_sys::netns::Netns;
use rtnetlink::{
    packet_core::{
        NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
        NetlinkPayload,
    },
    packet_route::RouteNetlinkMessage,
    sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE},
};

/// How often a dump is taken again because the table changed while it was read.
const DUMP_ATTEMPTS: usize = 8;

pub(crate) struct Rtnl {
    socket: Socket,
    sequence: u32,
}

impl Rtnl {
    /// Opens a client inside `netns`.
    pub(crate) fn open(netns: &Netns) -> io::Result<Self> {
        let mut socket = netns.run(|| Socket::new(NETLINK_ROUTE))??;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // So that the kernel sends only what a dump asks for: of routes, those of one table.
        socket.set_netlink_get_strict_chk(true)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a change and waits until the kernel has made it.
    pub(crate) fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send(message, flags | NLM_F_ACK)?;
        self.receive().map(drop)
    }

    /// Asks for what is no table, and gives what the kernel answers.
    pub(crate) fn ask(
        &mut self,
        request: RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.send(request, NLM_F_ACK)?;
        self.receive().map(|(messages, _)| messages)
    }

    /// Reads a whole table.
    pub(crate) fn dump(
        &mut self,
        request: &RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMP_ATTEMPTS {
            self.send(request.clone(), NLM_F_DUMP)?;
            if let (messages, Consistency::Whole) = self.receive()? {
                return Ok(messages);
            }
        }
        Err(io::Error::new(io::ErrorKind::Interrupted, "the table changes faster than it is read"))
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map(drop)
    }

    fn receive(&mut self) -> io::Result<(Vec<RouteNetlinkMessage>, Consistency)> {
        let mut messages = Vec::new();
        let mut consistency = Consistency::Whole;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while !rest.is_empty() {
                let packet = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
                let length = usize::try_from(packet.header.length).unwrap_or(rest.len());
                // Messages are aligned to four bytes; a length of zero would never end.
                rest = rest.get(length.next_multiple_of(4).max(4)..).unwrap_or_default();
                if packet.header.sequence_number != self.sequence {
                    continue;
                }
                if packet.header.flags & NLM_F_DUMP_INTR != 0 {
                    consistency = Consistency::Torn;
                }
                match packet.payload {
                    NetlinkPayload::InnerMessage(message) => messages.push(message),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(-done.code));
                    }
                    NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => {
                        return Ok((messages, consistency));
                    }
                    _ => {}
                }
            }
        }
    }
}

enum Consistency {
    Whole,
    Torn,
}

/// Takes one answer of the kernel as success: the state asked for is there already.
pub(crate) fn tolerate(result: io::Result<()>, errno: nix::errno::Errno) -> io::Result<()> {
    match result {
        Err(e) if e.raw_os_error() == Some(errno as i32) => Ok(()),
        other => other,
    }
}
