//! What a pod's names need from the rest of the node: who the pod is, the mesh, ways to its name servers, and somebody
//! who counts.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use culvert_mesh::{Snapshot, workload::Workload};
use hickory_proto::rr::RecordType;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{
    resolve::{SearchPath, Zone},
    wire::Transport,
};

/// The pod that asks.
pub trait Host: Send + Sync + 'static {
    /// A connection to a name server.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send;

    /// The pod's own record, for which some time may be waited. `None`: there is none, and nothing is answered.
    fn workload(&self) -> impl Future<Output = Option<Arc<Workload>>> + Send;

    /// The mesh as of now.
    fn mesh(&self) -> Arc<Snapshot>;

    /// The domains that the pod's resolver searches.
    fn search(&self) -> Arc<SearchPath>;

    /// What holds for all pods.
    fn zone(&self) -> &Zone;

    /// A new non-blocking socket in the pod's network namespace, connected to `server`, of a random port.
    fn dial_udp(&self, server: SocketAddr) -> io::Result<UdpSocket>;

    /// A connection to `server` from the pod's network namespace. It has a deadline.
    fn dial_tcp(&self, server: SocketAddr)
    -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// Told of everything that happens. Must not block.
    fn observe(&self, event: Event<'_>);
}

/// A question that came as a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Who asks.
    pub client: SocketAddr,
    /// Which name server was asked.
    pub server: SocketAddr,
    /// The question.
    pub message: Vec<u8>,
}

/// Where a pod's datagrams arrive, and whence answers to them leave.
pub trait Face: Send + Sync + 'static {
    /// The next question, which is the pod's own. An error means that no other will come. Cancel-safe.
    fn next(&self) -> impl Future<Output = io::Result<Datagram>> + Send;

    /// Sends `answer` to whoever asked `question`, in the name of the server that was asked. Must not block.
    fn answer(&self, question: &Datagram, answer: &[u8]) -> io::Result<()>;
}

/// A question, for those who count.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Who asks; `None` if the pod has no record.
    pub client: Option<&'a Workload>,
    /// What type of records is asked for.
    pub record_type: RecordType,
    /// How the question came.
    pub transport: Transport,
}

/// Something that happened.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A question came.
    Request(Asked<'a>),
    /// A name server is asked.
    Upstream(Asked<'a>),
    /// It did not answer.
    UpstreamFailed(Asked<'a>),
    /// It has answered.
    UpstreamAnswered(Asked<'a>, Duration),
    /// Something is not answered as a question.
    Lost(Loss),
}

/// Why something is not answered as a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// It is none, or it cannot be read.
    Malformed,
    /// The pod has too many that are not answered yet.
    Busy,
    /// The answer could not be sent.
    Unsent,
}

impl Loss {
    /// Its name as a label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Busy => "busy",
            Self::Unsent => "unsent",
        }
    }
}
