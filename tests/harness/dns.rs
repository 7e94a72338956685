//! Name servers that run in a namespace, and clients that ask them.
//!
//! A server knows a few names of its own, denies all others, and remembers what it was asked. What culvert makes of the
//! questions is left to scenarios.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
};

use anyhow::{Context as _, Result};
use hickory_proto::{
    op::{Message, MessageType, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata::TXT},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::oneshot,
};

use crate::{client, netns::Netns, poll};

/// A name that the server has its own addresses for, so that the answer tells which server gave it.
pub const WHO: &str = "who.test.";
/// A name whose texts do not fit into a datagram.
pub const BIG: &str = "big.test.";
/// How many texts those are.
pub const BIG_TEXTS: usize = 64;

/// A question that a server got.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The name, as it was written.
    pub name: String,
    /// The type of the records.
    pub record_type: RecordType,
    /// Whether it came by TCP.
    pub tcp: bool,
    /// From where.
    pub client: SocketAddr,
}

#[derive(Debug)]
struct Known {
    names: Vec<(String, IpAddr)>,
    asked: Mutex<Vec<Asked>>,
}

/// A running name server; dropping it closes its sockets.
#[derive(Debug)]
pub struct NameServer {
    known: Arc<Known>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl NameServer {
    /// Serves port 53 of `addresses` by UDP and TCP.
    pub fn start(netns: &Netns, addresses: &[IpAddr]) -> Result<Self> {
        Self::knowing(netns, addresses, &[])
    }

    /// The same, and the server has addresses for further names, such as `a.test.`.
    pub fn knowing(netns: &Netns, addresses: &[IpAddr], names: &[(&str, IpAddr)]) -> Result<Self> {
        let sockets = netns.run(|| {
            let open = |ip: &IpAddr| {
                let udp = UdpSocket::bind((*ip, 53))?;
                let tcp = TcpListener::bind((*ip, 53))?;
                udp.set_nonblocking(true)?;
                tcp.set_nonblocking(true)?;
                Ok((udp, tcp))
            };
            addresses.iter().map(open).collect::<io::Result<Vec<_>>>()
        });
        let sockets = sockets.context("bind the name server")?;
        let names = names.iter().map(|(name, ip)| ((*name).to_owned(), *ip)).collect();
        let asked = Arc::new(Known { names, asked: Mutex::default() });
        let (stop, stopped) = oneshot::channel();
        let log = Arc::clone(&asked);
        let thread = netns.start(move || run(sockets, &log, stopped));
        Ok(Self { known: asked, stop: Some(stop), thread: Some(thread) })
    }

    /// What it was asked so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.known.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What it was asked about `name`.
    pub fn asked_about(&self, name: &str) -> Vec<Asked> {
        let mut asked = self.asked();
        asked.retain(|one| one.name.eq_ignore_ascii_case(name));
        asked
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("a name server panicked");
        }
    }
}

fn run(sockets: Vec<(UdpSocket, TcpListener)>, asked: &Arc<Known>, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime needs only file descriptors");
    runtime.block_on(async {
        for (udp, tcp) in sockets {
            tokio::spawn(datagrams(udp, Arc::clone(asked)));
            tokio::spawn(connections(tcp, Arc::clone(asked)));
        }
        stopped.await.unwrap_or_default();
    });
}

async fn datagrams(socket: UdpSocket, asked: Arc<Known>) -> io::Result<()> {
    let own = socket.local_addr()?.ip();
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    let mut buffer = vec![0; 4096];
    loop {
        let (length, client) = socket.recv_from(&mut buffer).await?;
        let question = buffer.get(..length).unwrap_or_default();
        if let Some(answer) = answer(question, own, client, false, &asked) {
            socket.send_to(&answer, client).await?;
        }
    }
}

async fn connections(listener: TcpListener, asked: Arc<Known>) -> io::Result<()> {
    let own = listener.local_addr()?.ip();
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let (mut stream, client) = listener.accept().await?;
        let asked = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok(length) = stream.read_u16().await {
                let mut question = vec![0; length.into()];
                stream.read_exact(&mut question).await?;
                if let Some(answer) = answer(&question, own, client, true, &asked) {
                    stream.write_all(&framed(&answer)).await?;
                }
            }
            io::Result::Ok(())
        });
    }
}

fn answer(
    question: &[u8],
    own: IpAddr,
    client: SocketAddr,
    tcp: bool,
    known: &Known,
) -> Option<Vec<u8>> {
    let mut message = Message::from_vec(question).ok()?;
    let query = message.queries.first()?.clone();
    let (name, record_type) = (query.name.to_ascii(), query.query_type);
    let one = Asked { name: name.clone(), record_type, tcp, client };
    known.asked.lock().unwrap_or_else(PoisonError::into_inner).push(one);
    message.metadata.message_type = MessageType::Response;
    message.metadata.recursion_available = true;
    let record = |data| Record::from_rdata(query.name.clone(), 60, data);
    match (name.to_ascii_lowercase().as_str(), record_type, own) {
        (WHO, RecordType::A, IpAddr::V4(ip)) => {
            message.add_answer(record(RData::A(ip.into())));
        }
        (WHO, RecordType::AAAA, IpAddr::V6(ip)) => {
            message.add_answer(record(RData::AAAA(ip.into())));
        }
        (BIG, RecordType::TXT, _) if tcp => {
            let text = |n| record(RData::TXT(TXT::new(vec![format!("{n:0100}")])));
            message.add_answers((0..BIG_TEXTS).map(text));
        }
        (BIG, RecordType::TXT, _) => message.metadata.truncation = true,
        (WHO | BIG, ..) => {}
        (name, ..) if known.names.iter().any(|(known, _)| known == name) => {
            let of_name = known.names.iter().filter(|(known, _)| known == name);
            message.add_answers(of_name.filter_map(|(_, ip)| match (record_type, ip) {
                (RecordType::A, IpAddr::V4(ip)) => Some(record(RData::A((*ip).into()))),
                (RecordType::AAAA, IpAddr::V6(ip)) => Some(record(RData::AAAA((*ip).into()))),
                _ => None,
            }));
        }
        _ => message.metadata.response_code = ResponseCode::NXDomain,
    }
    message.to_vec().ok()
}

/// A message as it goes on a stream (RFC 1035 §4.2.2).
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len()).unwrap_or(u16::MAX);
    [&length.to_be_bytes(), message].concat()
}

/// A question with a random identifier.
#[must_use]
pub fn question(name: &str, record_type: RecordType) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    let name = Name::from_ascii(name).expect("scenarios write names that can be");
    message.add_query(hickory_proto::op::Query::query(name, record_type));
    message
}

/// A socket for questions, from the calling thread's namespace, with a deadline on its answers.
pub fn socket(server: IpAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = if server.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_read_timeout(Some(poll::patient(client::LIMIT)))?;
    Ok(socket)
}

/// Asks by a socket that is not connected; gives who has answered, too.
pub fn ask_from(
    socket: &UdpSocket,
    server: IpAddr,
    question: &Message,
) -> Result<(SocketAddr, Message)> {
    socket.send_to(&question.to_vec()?, (server, 53))?;
    let mut buffer = vec![0; 4096];
    let (length, from) = socket.recv_from(&mut buffer)?;
    Ok((from, Message::from_vec(buffer.get(..length).unwrap_or_default())?))
}

/// Asks by a connected socket, which takes answers of the server that was asked only.
pub fn ask(server: IpAddr, question: &Message) -> Result<Message> {
    let socket = socket(server)?;
    socket.connect((server, 53))?;
    socket.send(&question.to_vec()?)?;
    let mut buffer = vec![0; 4096];
    let length = socket.recv(&mut buffer)?;
    Ok(Message::from_vec(buffer.get(..length).unwrap_or_default())?)
}

/// Asks all questions on one connection before it reads any answer.
pub fn ask_by_tcp(server: IpAddr, questions: &[Message]) -> Result<Vec<Message>> {
    let mut stream: TcpStream = client::dial((server, 53).into())?;
    for question in questions {
        stream.write_all(&framed(&question.to_vec()?))?;
    }
    let read = |_| {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut answer = vec![0; u16::from_be_bytes(length).into()];
        stream.read_exact(&mut answer)?;
        Ok(Message::from_vec(&answer)?)
    };
    questions.iter().map(read).collect()
}

/// The addresses in an answer.
#[must_use]
pub fn addresses(answer: &Message) -> Vec<IpAddr> {
    let address = |record: &Record| match &record.data {
        RData::A(ip) => Some(IpAddr::V4(ip.0)),
        RData::AAAA(ip) => Some(IpAddr::V6(ip.0)),
        _ => None,
    };
    answer.answers.iter().filter_map(address).collect()
}
