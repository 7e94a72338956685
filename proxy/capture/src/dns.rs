//! A pod's DNS queries: each arrives with the name server that it was sent to, and is answered in that one's name.
//!
//! What to answer is the DNS server's, which takes [`Dns`] from the pod.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::Arc,
};

use culvert_abi::Slot;
use culvert_sys::{
    datagram::{self, Sender},
    netns::Netns,
};
use nix::errno::Errno;
use tokio::io::Interest;

use crate::{
    error::{CaptureError, InNetns as _},
    interfaces::Family,
    listeners::{self, Exhaustion, Listener, Place, Trouble},
    pod::Addresses,
};

/// Longer questions do not exist: RFC 6891 §6.2.5 is about answers.
const LONGEST_QUERY: usize = 4096;

/// What a pod's DNS server listens on.
#[derive(Debug, Default)]
pub struct Dns {
    /// Queries by UDP, one socket a family.
    pub queries: Vec<DnsSocket>,
    /// Connections for queries, one listener a family.
    pub listeners: Vec<Listener>,
}

/// Where the queries of one family arrive. Once it is dropped its slot is empty, and queries are dropped.
#[derive(Debug)]
pub struct DnsSocket {
    slot: Slot,
    addresses: Addresses,
    receiver: Arc<tokio::net::UdpSocket>,
    sender: Sender,
}

/// A query of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// Who asks: an address of the pod.
    pub client: SocketAddr,
    /// Which name server was asked.
    pub server: SocketAddr,
    /// The question, as it was sent.
    pub message: Vec<u8>,
}

impl DnsSocket {
    /// The next query. Those that are not the pod's own are passed over, and while the process is out of memory it waits; an
    /// error means that the socket is of no more use. Cancel-safe.
    pub async fn next(&self) -> io::Result<Query> {
        let mut exhaustion = Exhaustion::default();
        loop {
            let received =
                self.receiver.async_io(Interest::READABLE, || receive(&self.receiver)).await;
            match received {
                Ok(Some(query)) if self.addresses.owns(query.client.ip()) => return Ok(query),
                Ok(query) => tracing::debug!(?query, "a DNS query is of no use"),
                Err(e) => match Trouble::of(&e) {
                    Trouble::Connection => {}
                    Trouble::Exhausted => exhaustion.pause(&e, "receive").await,
                    Trouble::Listener => return Err(e),
                },
            }
        }
    }

    /// Answers a query in the name of the server that was asked. Does not block: what the kernel has no room for is lost,
    /// and asked again.
    pub fn answer(&self, query: &Query, message: &[u8]) -> io::Result<()> {
        self.sender.send(query.server, query.client, message)
    }

    pub(crate) fn place(&self) -> Place {
        Place::of_queries(self.slot, &self.receiver)
    }
}

fn receive(receiver: &tokio::net::UdpSocket) -> io::Result<Option<Query>> {
    let mut buffer = [0; LONGEST_QUERY];
    Ok(datagram::receive(receiver, &mut buffer)?.map(|received| Query {
        client: received.from,
        server: received.to,
        message: buffer.get(..received.length).unwrap_or_default().to_vec(),
    }))
}

/// Opens the pod's sockets for queries; none for IPv6 where the kernel has none. Must run in a tokio runtime.
pub(crate) fn open(netns: &Netns, addresses: &Addresses) -> Result<Vec<DnsSocket>, CaptureError> {
    let pod = netns.inode();
    let mut sockets = Vec::new();
    for family in Family::ALL {
        let addr = SocketAddr::new(listeners::unreachable(family), 0);
        let opened = netns.run(|| Ok((datagram::receiver(addr)?, Sender::open(addr.ip())?)));
        let (receiver, sender) = match opened
            .and_then(|opened: io::Result<(UdpSocket, Sender)>| opened)
        {
            Ok(opened) => opened,
            Err(e)
                if family == Family::V6 && e.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) =>
            {
                continue;
            }
            Err(e) => return Err(e).in_netns(pod, "open a socket for DNS queries"),
        };
        listeners::check_netns(&receiver, netns)
            .in_netns(pod, "check the socket for DNS queries")?;
        let receiver = tokio::net::UdpSocket::from_std(receiver)
            .in_netns(pod, "open a socket for DNS queries")?;
        let slot = match family {
            Family::V4 => Slot::DnsUdpV4,
            Family::V6 => Slot::DnsUdpV6,
        };
        let addresses = addresses.clone();
        sockets.push(DnsSocket { slot, addresses, receiver: Arc::new(receiver), sender });
    }
    Ok(sockets)
}
