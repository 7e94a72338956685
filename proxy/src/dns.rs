//! A pod's names: its questions from capture, the mesh's state and sockets in the pod's namespace, joined for
//! `culvert-dns`, which answers.

mod search;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use culvert_capture::{Captured, DnsSocket, Query};
use culvert_carry::dial::Leg;
use culvert_dns::{Asked, Datagram, Event, Face, Host, SearchPath, Server, Zone};
use culvert_mesh::{
    Snapshot,
    route::{self, Place, Route},
    workload::Workload,
};
use culvert_observe::DnsQuestion;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::Notify,
};

use crate::{context::PodContext, enroll::LAST_CALL, error::chain, outbound, tasks::Tasks};

/// How long until a pod's processes are looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What answers one pod's questions.
pub(crate) type Names = Server<PodNames>;

/// One pod, as those who answer it see it.
pub(crate) struct PodNames {
    context: Arc<PodContext>,
    search: Arc<Search>,
    /// Where connections to name servers of the mesh are carried.
    tasks: Tasks,
}

/// Answers what the pod asks by datagram, until `tasks` drain. What it gives answers connections.
pub(crate) fn serve(
    sockets: Vec<DnsSocket>,
    context: &Arc<PodContext>,
    tasks: &Tasks,
) -> Arc<Names> {
    let domain = &context.node.zone.domain;
    let search = Arc::new(Search {
        path: ArcSwap::from_pointee(SearchPath::of_cluster(&context.pod.namespace, domain)),
        asked: Notify::new(),
    });
    tasks.spawn(Arc::clone(&search).learn(context.dialer.netns.inode(), tasks.clone()));
    let context = Arc::clone(context);
    let names = Arc::new(Server::new(PodNames { context, search, tasks: tasks.clone() }));
    for socket in sockets {
        let (names, draining) = (Arc::clone(&names), tasks.draining());
        tasks.spawn(async move {
            // What the kernel has queued is still to be read.
            let closing = async {
                draining.cancelled().await;
                tokio::time::sleep(LAST_CALL).await;
            };
            if let Err(error) = names.datagrams(Questions(socket), closing).await {
                let error = chain(&error);
                tracing::error!(error, "a pod's DNS questions are taken no more");
            }
        });
    }
    names
}

/// Answers the questions on one captured connection.
pub(crate) async fn connection(names: Arc<Names>, ctx: Arc<PodContext>, captured: Captured) {
    if let Some(Captured { stream, orig_dst, .. }) = outbound::of_pod(&ctx, captured).await {
        names.connection(stream, orig_dst).await;
    }
}

/// Where the pod's resolver searches.
struct Search {
    /// What Kubernetes gives to pods, until more is known.
    path: ArcSwap<SearchPath>,
    asked: Notify,
}

impl Search {
    /// Learns what the pod's own files say. They are there once it has a process, which it has when it asks.
    async fn learn(self: Arc<Self>, netns: u32, tasks: Tasks) {
        let draining = tasks.draining();
        let learning = async {
            loop {
                self.asked.notified().await;
                if let Ok(Some(path)) = tasks.blocking(move || search::find(netns)).await {
                    tracing::debug!(?path, netns, "a pod's own search domains");
                    return self.path.store(Arc::new(path));
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        tokio::select! {
            () = learning => {}
            () = draining.cancelled() => {}
        }
    }
}

struct Questions(DnsSocket);

impl Face for Questions {
    async fn next(&self) -> io::Result<Datagram> {
        let Query { client, server, message } = self.0.next().await?;
        Ok(Datagram { client, server, message })
    }

    fn answer(&self, question: &Datagram, answer: &[u8]) -> io::Result<()> {
        let Datagram { client, server, .. } = *question;
        self.0.answer(&Query { client, server, message: Vec::new() }, answer)
    }
}

impl Host for PodNames {
    type Stream = TcpStream;

    async fn workload(&self) -> Option<Arc<Workload>> {
        self.context.node.state.identify(&self.context.pod).await.ok()
    }

    fn mesh(&self) -> Arc<Snapshot> {
        Arc::clone(&self.context.node.state.load())
    }

    fn search(&self) -> Arc<SearchPath> {
        self.search.asked.notify_one();
        self.search.path.load_full()
    }

    fn zone(&self) -> &Zone {
        &self.context.node.zone
    }

    fn dial_udp(&self, server: SocketAddr) -> io::Result<UdpSocket> {
        self.context.dialer.datagrams(server)
    }

    async fn dial_tcp(&self, server: SocketAddr) -> io::Result<TcpStream> {
        let source = self.context.node.state.identify(&self.context.pod).await;
        let source = source.map_err(io::Error::other)?;
        let request = route::Request::new(&source, server);
        let route = route::route(&self.mesh(), &request, &mut rand::rng());
        match route {
            Route::Direct { dst: Place::Address(dst), .. } if dst == server => {
                let dialled = self.context.dialer.dial(server, Leg::Passthrough).await;
                dialled.map_err(io::Error::other)
            }
            _ => self.carried(&source, server).await,
        }
    }

    fn observe(&self, event: Event<'_>) {
        let dns = &self.context.node.dns;
        match event {
            Event::Request(asked) => dns.request(&question(asked)),
            Event::Upstream(asked) => dns.upstream_request(&question(asked)),
            Event::UpstreamFailed(asked) => dns.upstream_failure(&question(asked)),
            Event::UpstreamAnswered(asked, took) => dns.upstream_answer(&question(asked), took),
            Event::Lost(loss) => dns.dropped(loss.as_str()),
        }
    }
}

impl PodNames {
    /// A connection to a name server of the mesh, which is reached as the mesh has promised: as if the pod had made it.
    async fn carried(&self, source: &Workload, server: SocketAddr) -> io::Result<TcpStream> {
        let same_family = |ip: &&IpAddr| ip.is_ipv4() == server.is_ipv4();
        let no_address = || io::Error::other("the pod has no address of the name server's family");
        let peer = source.addresses.iter().find(same_family).ok_or_else(no_address)?;
        let (near, far) = pair().await?;
        let captured = Captured { stream: far, peer: SocketAddr::new(*peer, 0), orig_dst: server };
        self.tasks.spawn(outbound::carry(Arc::clone(&self.context), captured));
        Ok(near)
    }
}

/// Two ends of a connection within this process.
async fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let near = TcpSocket::new_v4()?.connect(listener.local_addr()?).await?;
    let (far, peer) = listener.accept().await?;
    if peer != near.local_addr()? {
        return Err(io::Error::other("somebody else connected"));
    }
    Ok((near, far))
}

fn question(asked: Asked<'_>) -> DnsQuestion {
    let source = asked
        .client
        .map(|client| (Arc::clone(&client.canonical_name), Arc::clone(&client.canonical_revision)));
    DnsQuestion {
        record_type: asked.record_type.into(),
        transport: asked.transport.as_str(),
        source: source.unwrap_or_default(),
    }
}
