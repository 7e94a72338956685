//! Takes a pod's questions, by datagram and by stream, and answers each as the server that was asked.
//!
//! How a question is decided is left to `resolve`, asking others to `forward`. One pod's questions wait for nobody else's,
//! and there are never more of them than is said here.

#[cfg(test)]
mod tests;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use culvert_mesh::workload::Workload;
use futures::stream::{FuturesUnordered, StreamExt as _};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
    task::JoinSet,
    time::Instant,
};

use crate::{
    forward::{self, ForwardError, Forwarder},
    host::{Asked, Datagram, Event, Face, Host, Loss},
    resolve::{self, Kind, Question, Resolution},
    stream,
    wire::{self, Request, Transport, Unfit},
};

/// Questions of a pod by datagram that are not answered yet. What comes beyond is dropped; its sender asks again.
const MOST_DATAGRAMS: usize = 512;
/// Connections of a pod. Those beyond are closed.
const MOST_CONNECTIONS: usize = 64;
/// Questions on a connection that are not answered yet. Those beyond are not read.
const PIPELINED: usize = 32;
/// How long a connection may stay without a question (RFC 7766 §6.2.3).
const IDLE: Duration = Duration::from_secs(10);

/// Answers one pod.
#[derive(Debug)]
pub struct Server<H> {
    host: H,
    forwarder: Forwarder,
    connections: Semaphore,
}

impl<H: Host> Server<H> {
    /// For the pod that `host` tells of.
    pub fn new(host: H) -> Self {
        let connections = Semaphore::new(MOST_CONNECTIONS);
        Self { host, forwarder: Forwarder::new(), connections }
    }

    /// Answers datagrams until `closing` or until their socket fails. What was asked before is answered still; once the
    /// future is dropped it is lost.
    pub async fn datagrams(
        self: Arc<Self>,
        face: impl Face,
        closing: impl Future<Output = ()>,
    ) -> io::Result<()> {
        tokio::pin!(closing);
        let face = Arc::new(face);
        let mut pending = JoinSet::new();
        loop {
            let datagram = tokio::select! {
                datagram = face.next() => datagram?,
                () = &mut closing => break,
                Some(done) = pending.join_next() => {
                    if let Err(error) = done {
                        tracing::error!(%error, "a question was not answered");
                    }
                    continue;
                }
            };
            let request = match Request::parse(&datagram.message) {
                Ok(request) => request,
                Err(unfit) => {
                    self.lose(Loss::Malformed);
                    if let Unfit::Reject(answer) = unfit {
                        self.send(&*face, &datagram, &answer);
                    }
                    continue;
                }
            };
            if pending.len() >= MOST_DATAGRAMS {
                self.lose(Loss::Busy);
                continue;
            }
            let (server, face) = (Arc::clone(&self), Arc::clone(&face));
            pending.spawn(async move {
                let answer = server.answer(&request, datagram.server, Transport::Udp).await;
                if let Some(answer) = answer {
                    server.send(&*face, &datagram, &answer);
                }
            });
        }
        while pending.join_next().await.is_some() {}
        Ok(())
    }

    /// Answers the questions on one connection to the name server `server`, until it ends or idles.
    pub async fn connection(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
        server: SocketAddr,
    ) {
        let Ok(_permit) = self.connections.try_acquire() else { return self.lose(Loss::Busy) };
        if let Err(error) = self.converse(stream, server).await {
            tracing::debug!(%error, %server, "connection of questions failed");
        }
    }

    async fn converse(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
        server: SocketAddr,
    ) -> io::Result<()> {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut frames = stream::Frames::default();
        let mut pending = FuturesUnordered::new();
        let mut last = Instant::now();
        // A zone's transfer has the connection to itself, once all before it is answered.
        let mut transfer = None;
        let mut open = true;
        while open || !pending.is_empty() {
            if let Some(request) = transfer.take_if(|_| pending.is_empty()) {
                self.transfer(&request, server, &mut writer).await?;
                last = Instant::now();
            }
            let more = open && transfer.is_none() && pending.len() < PIPELINED;
            tokio::select! {
                Some(answer) = pending.next() => {
                    if let Some(answer) = answer {
                        let answer: Vec<u8> = answer;
                        stream::write(&mut writer, &answer).await?;
                    }
                    last = Instant::now();
                }
                message = frames.next(&mut reader), if more => match message? {
                    None => open = false,
                    Some(message) => {
                        last = Instant::now();
                        match Request::parse(&message) {
                            Ok(request) if request.is_transfer() => transfer = Some(request),
                            Ok(request) => pending.push(async move {
                                self.answer(&request, server, Transport::Tcp).await
                            }),
                            Err(unfit) => {
                                self.lose(Loss::Malformed);
                                let Unfit::Reject(answer) = unfit else { return Ok(()) };
                                stream::write(&mut writer, &answer).await?;
                            }
                        }
                    }
                },
                () = tokio::time::sleep_until(last + IDLE), if pending.is_empty() => return Ok(()),
            }
        }
        Ok(())
    }

    async fn transfer(
        &self,
        request: &Request,
        server: SocketAddr,
        writer: &mut (impl AsyncWrite + Unpin + Send),
    ) -> io::Result<()> {
        let client = self.host.workload().await;
        let asked = asked(request, client.as_deref(), Transport::Tcp);
        self.host.observe(Event::Request(asked));
        self.host.observe(Event::Upstream(asked));
        let passed = forward::transfer(&self.host, server, request, writer).await;
        passed.map_err(|error| {
            self.host.observe(Event::UpstreamFailed(asked));
            io::Error::other(error)
        })
    }

    /// The answer to one question that was put to `server`.
    async fn answer(
        &self,
        request: &Request,
        server: SocketAddr,
        transport: Transport,
    ) -> Option<Vec<u8>> {
        let client = self.host.workload().await;
        let asked = asked(request, client.as_deref(), transport);
        self.host.observe(Event::Request(asked));
        let Some(client) = &client else {
            tracing::debug!(target: "dns", domain = %request.name(), "no record of the pod that asks");
            return encoded(request.failure(ResponseCode::ServFail));
        };
        let resolution = self.decide(request, client);
        let (answer, result, addresses) = match &resolution {
            Resolution::Local(answer) => {
                let domain = &self.host.zone().domain;
                let encoded = encoded(request.answer(answer, domain, transport));
                (encoded, Ok("mesh"), answer.addresses.len())
            }
            Resolution::Forward | Resolution::ForwardExisting => {
                match self.forwarder.ask(&self.host, server, request, asked).await {
                    Ok(mut answer) => {
                        if resolution == Resolution::ForwardExisting {
                            wire::exists(&mut answer);
                        }
                        (Some(answer), Ok("server"), 0)
                    }
                    Err(error) => (encoded(request.failure(ResponseCode::ServFail)), Err(error), 0),
                }
            }
        };
        log(client, request, result, addresses);
        answer
    }

    fn decide(&self, request: &Request, client: &Workload) -> Resolution {
        let Some(name) = request.host().filter(|_| !request.is_for_server()) else {
            return Resolution::Forward;
        };
        let question = Question {
            client,
            search: &self.host.search(),
            name: &name,
            kind: match request.record_type() {
                RecordType::A => Kind::A,
                RecordType::AAAA => Kind::Aaaa,
                _ => Kind::Other,
            },
        };
        resolve::resolve(&self.host.mesh(), self.host.zone(), &question, &mut rand::rng())
    }

    fn send(&self, face: &impl Face, question: &Datagram, answer: &[u8]) {
        if let Err(error) = face.answer(question, answer) {
            let Datagram { client, server, .. } = question;
            tracing::debug!(%error, %client, %server, "answer not sent");
            self.lose(Loss::Unsent);
        }
    }

    fn lose(&self, loss: Loss) {
        self.host.observe(Event::Lost(loss));
    }
}

fn asked<'a>(request: &Request, client: Option<&'a Workload>, transport: Transport) -> Asked<'a> {
    Asked { client, record_type: request.record_type(), transport }
}

/// Contract: the fields are those of ztunnel's log of questions.
fn log(
    client: &Workload,
    request: &Request,
    result: Result<&'static str, ForwardError>,
    addresses: usize,
) {
    let error: Option<&(dyn std::error::Error + 'static)> = match &result {
        Ok(_) => None,
        Err(error) => Some(error),
    };
    tracing::debug!(
        target: "dns",
        {
            src.workload = &*client.workload_name,
            src.namespace = client.namespace(),
            query = %request.record_type(),
            domain = %request.name(),
            result = result.as_ref().copied().unwrap_or("failed"),
            endpoints = addresses,
            error,
        },
        "question answered"
    );
}

/// What cannot be encoded is not sent: there is no smaller answer to give.
fn encoded(bytes: Result<Vec<u8>, hickory_proto::ProtoError>) -> Option<Vec<u8>> {
    bytes.inspect_err(|error| tracing::error!(%error, "an answer cannot be encoded")).ok()
}
