//! A server between real sockets on loopback: a client on one side, a name server with a mind of its own on the other.

use std::{
    net::{IpAddr, Ipv4Addr, UdpSocket as StdUdpSocket},
    path::Path,
    sync::Mutex,
};

use culvert_mesh::Snapshot;
use hickory_proto::{
    op::{Message, MessageType},
    rr::{Name, RData, Record, rdata::A},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    net::{TcpListener, TcpSocket, TcpStream, UdpSocket},
};

use super::*;
use crate::{
    resolve::{SearchPath, Zone},
    stream::Frames,
    testing::{NAME, query},
};

const MESH: &str = "web.shop.svc.cluster.local.";
const LOOPBACK: (IpAddr, u16) = (IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// The server that clients ask; where it is really is the host's business.
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53)), 53);

struct TestHost {
    mesh: Arc<Snapshot>,
    client: Option<Arc<Workload>>,
    zone: Zone,
    upstream: Upstream,
    events: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone, Copy)]
struct Upstream {
    udp: SocketAddr,
    tcp: SocketAddr,
}

impl Host for TestHost {
    type Stream = TcpStream;

    async fn workload(&self) -> Option<Arc<Workload>> {
        self.client.clone()
    }

    fn mesh(&self) -> Arc<Snapshot> {
        Arc::clone(&self.mesh)
    }

    fn search(&self) -> Arc<SearchPath> {
        Arc::new(SearchPath::of_cluster("shop", &self.zone.domain))
    }

    fn zone(&self) -> &Zone {
        &self.zone
    }

    fn dial_udp(&self, _server: SocketAddr) -> io::Result<StdUdpSocket> {
        let socket = StdUdpSocket::bind(LOOPBACK)?;
        socket.set_nonblocking(true)?;
        socket.connect(self.upstream.udp)?;
        Ok(socket)
    }

    async fn dial_tcp(&self, _server: SocketAddr) -> io::Result<TcpStream> {
        TcpSocket::new_v4()?.connect(self.upstream.tcp).await
    }

    fn observe(&self, event: Event<'_>) {
        let text = match event {
            Event::Request(asked) => {
                let client = asked.client.map_or("nobody", |client| &client.name);
                format!("{client} asks {} by {}", asked.record_type, asked.transport.as_str())
            }
            Event::Upstream(_) => "upstream".to_owned(),
            Event::UpstreamFailed(_) => "failed".to_owned(),
            Event::UpstreamAnswered(..) => "answered".to_owned(),
            Event::Lost(loss) => loss.as_str().to_owned(),
        };
        self.events.lock().unwrap().push(text);
    }
}

/// A face that is an ordinary socket: the server that was asked is itself.
struct Plain(UdpSocket);

impl Face for Plain {
    async fn next(&self) -> io::Result<Datagram> {
        let mut message = vec![0; 4096];
        let (len, client) = self.0.recv_from(&mut message).await?;
        message.truncate(len);
        Ok(Datagram { client, server: self.0.local_addr()?, message })
    }

    fn answer(&self, question: &Datagram, answer: &[u8]) -> io::Result<()> {
        self.0.try_send_to(answer, question.client).map(drop)
    }
}

struct World {
    server: Arc<Server<TestHost>>,
    events: Arc<Mutex<Vec<String>>>,
    udp: UdpSocket,
    tcp: TcpListener,
    tasks: Mutex<JoinSet<()>>,
}

impl World {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut TestHost)) -> Self {
        let text = include_str!("../resolve/tests/mesh.yaml");
        let mesh = culvert_mesh::file::parse(Path::new("mesh.yaml"), text).unwrap();
        let udp = UdpSocket::bind(LOOPBACK).await.unwrap();
        let tcp = TcpListener::bind(LOOPBACK).await.unwrap();
        let events = Arc::default();
        let mut host = TestHost {
            client: mesh.find_workload("client").cloned(),
            mesh: Arc::new(mesh),
            zone: Zone::default(),
            upstream: Upstream { udp: udp.local_addr().unwrap(), tcp: tcp.local_addr().unwrap() },
            events: Arc::clone(&events),
        };
        change(&mut host);
        let tasks = Mutex::default();
        Self { server: Arc::new(Server::new(host)), events, udp, tcp, tasks }
    }

    /// Serves datagrams, and gives a socket to ask by.
    async fn client(&self) -> UdpSocket {
        let face = UdpSocket::bind(LOOPBACK).await.unwrap();
        let client = UdpSocket::bind(LOOPBACK).await.unwrap();
        client.connect(face.local_addr().unwrap()).await.unwrap();
        let server = Arc::clone(&self.server);
        self.tasks.lock().unwrap().spawn(async move {
            server.datagrams(Plain(face), std::future::pending()).await.unwrap();
        });
        client
    }

    /// Serves a connection.
    fn connect(&self) -> DuplexStream {
        let (near, far) = tokio::io::duplex(1 << 16);
        let server = Arc::clone(&self.server);
        self.tasks.lock().unwrap().spawn(async move { server.connection(far, SERVER).await });
        near
    }

    /// What the name server is asked next by datagram, and by whom.
    async fn asked(&self) -> (Message, SocketAddr) {
        let mut buffer = vec![0; 4096];
        let (len, from) = self.udp.recv_from(&mut buffer).await.unwrap();
        (Message::from_vec(&buffer[..len]).unwrap(), from)
    }

    async fn ask(&self, message: &Message, transport: Transport) -> Message {
        let request = Request::parse(&message.to_vec().unwrap()).unwrap();
        let answer = self.server.answer(&request, SERVER, transport).await.unwrap();
        Message::from_vec(&answer).unwrap()
    }

    fn events(&self) -> Vec<String> {
        std::mem::take(&mut self.events.lock().unwrap())
    }
}

async fn receive(client: &UdpSocket) -> Message {
    let mut buffer = vec![0; 4096];
    let len = client.recv(&mut buffer).await.unwrap();
    Message::from_vec(&buffer[..len]).unwrap()
}

/// An address for whatever is asked, good for a minute.
fn answered(mut question: Message) -> Message {
    question.metadata.message_type = MessageType::Response;
    let name = question.queries[0].name.clone();
    question.add_answer(Record::from_rdata(name, 60, RData::A(A(Ipv4Addr::new(198, 51, 100, 1)))));
    question
}

fn code(question: &Message, code: ResponseCode) -> Message {
    let mut answer = question.clone();
    answer.metadata.message_type = MessageType::Response;
    answer.metadata.response_code = code;
    answer
}

async fn send(world: &World, answer: &Message, to: SocketAddr) {
    world.udp.send_to(&answer.to_vec().unwrap(), to).await.unwrap();
}

#[tokio::test]
async fn a_name_of_the_mesh_is_answered_whichever_server_is_asked() {
    let world = World::new().await;
    let client = world.client().await;
    client.send(&query(MESH, RecordType::A, None).to_vec().unwrap()).await.unwrap();
    let answer = receive(&client).await;
    assert_eq!(answer.metadata.id, 7);
    assert_eq!(answer.answers[0].to_string(), format!("{MESH} 30 IN A 10.1.0.1"));
    assert_eq!(world.events(), ["client asks A by udp"]);
}

#[tokio::test]
async fn other_names_are_forwarded_as_they_were_asked_and_kept() {
    let world = World::new().await;
    let client = world.client().await;
    let question = query("wWw.example.org.", RecordType::A, None);
    client.send(&question.to_vec().unwrap()).await.unwrap();
    let (asked, from) = world.asked().await;
    assert!(asked.queries[0].name.eq_case(&question.queries[0].name));
    send(&world, &answered(asked), from).await;
    let mut want = answered(question);
    assert_eq!(receive(&client).await, want);
    assert_eq!(world.events(), ["client asks A by udp", "upstream", "answered"]);

    let again = query("www.EXAMPLE.org.", RecordType::A, None);
    client.send(&again.to_vec().unwrap()).await.unwrap();
    want.queries = again.queries;
    assert_eq!(receive(&client).await, want);
    assert_eq!(world.events(), ["client asks A by udp"]);
}

#[tokio::test]
async fn what_one_server_said_is_not_said_for_another() {
    let world = World::new().await;
    let question = query(NAME, RecordType::A, None);
    let ask = |server: SocketAddr| {
        let request = Request::parse(&question.to_vec().unwrap()).unwrap();
        let world = &world;
        async move {
            let answering = async {
                let (asked, from) = world.asked().await;
                send(world, &answered(asked), from).await;
            };
            tokio::join!(world.server.answer(&request, server, Transport::Udp), answering)
        }
    };
    ask(SERVER).await;
    ask("192.0.2.54:53".parse().unwrap()).await;
    assert_eq!(world.events().iter().filter(|event| *event == "upstream").count(), 2);
}

#[tokio::test]
async fn a_guess_is_not_taken_for_the_answer() {
    let world = World::new().await;
    let client = world.client().await;
    client.send(&query(NAME, RecordType::A, None).to_vec().unwrap()).await.unwrap();
    let (asked, from) = world.asked().await;
    let mut other_id = code(&asked, ResponseCode::NXDomain);
    other_id.metadata.id ^= 1;
    let mut other_name = code(&asked, ResponseCode::NXDomain);
    other_name.queries[0].set_name(Name::from_ascii("other.example.org.").unwrap());
    for guess in [other_id, other_name, asked.clone()] {
        send(&world, &guess, from).await;
    }
    // Nor is what another socket says.
    let other = UdpSocket::bind(LOOPBACK).await.unwrap();
    let denial = code(&asked, ResponseCode::NXDomain).to_vec().unwrap();
    other.send_to(&denial, from).await.unwrap();
    send(&world, &answered(asked), from).await;
    assert_eq!(receive(&client).await.metadata.response_code, ResponseCode::NoError);
}

#[tokio::test]
async fn each_question_has_a_port_and_an_identifier_of_its_own() {
    let world = World::new().await;
    let client = world.client().await;
    let (mut ports, mut ids) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        client.send(&query(NAME, RecordType::A, None).to_vec().unwrap()).await.unwrap();
        let (asked, from) = world.asked().await;
        ports.push(from.port());
        ids.push(asked.metadata.id);
    }
    ports.sort_unstable();
    ports.dedup();
    ids.dedup();
    assert_eq!(ports.len(), 8);
    assert!(ids.len() > 1);
}

#[tokio::test]
async fn a_name_of_the_mesh_is_not_denied_for_want_of_other_records() {
    let world = World::new().await;
    let client = world.client().await;
    for (name, want) in [(MESH, ResponseCode::NoError), (NAME, ResponseCode::NXDomain)] {
        client.send(&query(name, RecordType::HTTPS, None).to_vec().unwrap()).await.unwrap();
        let (asked, from) = world.asked().await;
        send(&world, &code(&asked, ResponseCode::NXDomain), from).await;
        assert_eq!(receive(&client).await.metadata.response_code, want, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_told_as_a_failure() {
    let world = World::new().await;
    let start = Instant::now();
    let question = query(NAME, RecordType::A, Some(1232));
    let answer = world.ask(&question, Transport::Udp).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(answer.edns.is_some());
    assert_eq!(start.elapsed().as_secs(), 5);
    assert_eq!(world.events(), ["client asks A by udp", "upstream", "failed"]);
}

#[tokio::test]
async fn an_unreachable_server_is_told_at_once() {
    let gone = StdUdpSocket::bind(LOOPBACK).unwrap().local_addr().unwrap();
    let world = World::with(|host| host.upstream = Upstream { udp: gone, tcp: gone }).await;
    for transport in [Transport::Udp, Transport::Tcp] {
        let request = query(NAME, RecordType::A, None).to_vec().unwrap();
        let request = Request::parse(&request).unwrap();
        let client = world.server.host.client.as_deref();
        let asked = asked(&request, client, transport);
        let asking = world.server.forwarder.ask(&world.server.host, SERVER, &request, asked);
        let error = asking.await.unwrap_err();
        assert!(matches!(error, ForwardError::Unreachable { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_pod_without_a_record_is_told_to_try_later() {
    let world = World::with(|host| host.client = None).await;
    for name in [MESH, NAME] {
        let answer = world.ask(&query(name, RecordType::A, None), Transport::Udp).await;
        assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    }
    assert_eq!(world.events(), ["nobody asks A by udp"; 2]);
}

#[tokio::test]
async fn what_is_no_question_is_counted_and_answers_are_not_answered() {
    let world = World::new().await;
    let client = world.client().await;
    let question = query(MESH, RecordType::A, None).to_vec().unwrap();
    let answer = code(&query(MESH, RecordType::A, None), ResponseCode::NoError).to_vec().unwrap();
    for bad in [&answer[..], &[], &question[..14]] {
        client.send(bad).await.unwrap();
    }
    assert_eq!(receive(&client).await.metadata.response_code, ResponseCode::FormErr);
    client.send(&question).await.unwrap();
    assert_eq!(receive(&client).await.metadata.response_code, ResponseCode::NoError);
    let events = world.events();
    assert_eq!(events.iter().filter(|event| *event == "malformed").count(), 3, "{events:?}");
}

#[tokio::test]
async fn a_pod_has_so_many_questions_open_and_no_more() {
    let world = World::new().await;
    let client = world.client().await;
    let question = query(NAME, RecordType::A, None).to_vec().unwrap();
    let (mut taken, mut busy) = (0, 0);
    // One at a time, so that the socket's own buffer loses none.
    for _ in 0..MOST_DATAGRAMS + 10 {
        client.send(&question).await.unwrap();
        while taken + busy < MOST_DATAGRAMS + 10 {
            let events = world.events();
            busy += events.iter().filter(|event| *event == "busy").count();
            let new = events.iter().filter(|event| *event == "upstream").count();
            taken += new;
            if new > 0 || !events.is_empty() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    assert_eq!((taken, busy), (MOST_DATAGRAMS, 10));
    // The mesh's own names wait, too: the bound is the pod's.
    let mut buffer = [0; 512];
    let (_, from) = world.udp.recv_from(&mut buffer).await.unwrap();
    let asked = Message::from_vec(&buffer).unwrap();
    send(&world, &answered(asked), from).await;
    receive(&client).await;
    client.send(&query(MESH, RecordType::A, None).to_vec().unwrap()).await.unwrap();
    assert_eq!(receive(&client).await.answers.len(), 1);
}

#[tokio::test]
async fn what_was_asked_before_the_end_is_answered() {
    let world = World::new().await;
    let face = UdpSocket::bind(LOOPBACK).await.unwrap();
    let client = UdpSocket::bind(LOOPBACK).await.unwrap();
    client.connect(face.local_addr().unwrap()).await.unwrap();
    let (close, closing) = tokio::sync::oneshot::channel::<()>();
    let closing = async move { drop(closing.await) };
    let serving = Arc::clone(&world.server).datagrams(Plain(face), closing);
    let asking = async {
        client.send(&query(NAME, RecordType::A, None).to_vec().unwrap()).await.unwrap();
        let (asked, from) = world.asked().await;
        drop(close);
        send(&world, &answered(asked), from).await;
        receive(&client).await
    };
    let (served, answer) = tokio::join!(serving, asking);
    served.unwrap();
    assert_eq!(answer.answers.len(), 1);
}

#[tokio::test]
async fn a_truncated_answer_passes_and_is_asked_for_again_by_stream() {
    let world = World::new().await;
    let client = world.client().await;
    let question = query(NAME, RecordType::A, None);
    client.send(&question.to_vec().unwrap()).await.unwrap();
    let (asked, from) = world.asked().await;
    let mut cut = code(&asked, ResponseCode::NoError);
    cut.metadata.truncation = true;
    send(&world, &cut, from).await;
    assert!(receive(&client).await.metadata.truncation);

    let mut connection = world.connect();
    stream::write(&mut connection, &question.to_vec().unwrap()).await.unwrap();
    let (mut upstream, _) = world.tcp.accept().await.unwrap();
    let asked = Frames::default().next(&mut upstream).await.unwrap().unwrap();
    let whole = answered(Message::from_vec(&asked).unwrap()).to_vec().unwrap();
    stream::write(&mut upstream, &whole).await.unwrap();
    let answer = Frames::default().next(&mut connection).await.unwrap().unwrap();
    assert_eq!(Message::from_vec(&answer).unwrap(), answered(question));
}

#[tokio::test]
async fn questions_on_a_connection_do_not_wait_for_each_other() {
    let world = World::new().await;
    let mut connection = world.connect();
    let mut slow = query(NAME, RecordType::A, None);
    slow.metadata.id = 1;
    stream::write(&mut connection, &slow.to_vec().unwrap()).await.unwrap();
    for id in 2..=40 {
        let mut question = query(MESH, RecordType::A, None);
        question.metadata.id = id;
        stream::write(&mut connection, &question.to_vec().unwrap()).await.unwrap();
    }
    let mut frames = Frames::default();
    for id in 2..=40 {
        let answer = frames.next(&mut connection).await.unwrap().unwrap();
        assert_eq!(Message::from_vec(&answer).unwrap().metadata.id, id);
    }
    let (mut upstream, _) = world.tcp.accept().await.unwrap();
    let asked = Frames::default().next(&mut upstream).await.unwrap().unwrap();
    let answer = answered(Message::from_vec(&asked).unwrap()).to_vec().unwrap();
    stream::write(&mut upstream, &answer).await.unwrap();
    let answer = frames.next(&mut connection).await.unwrap().unwrap();
    assert_eq!(Message::from_vec(&answer).unwrap().metadata.id, 1);
}

#[tokio::test]
async fn a_connection_has_so_many_questions_open_and_no_more() {
    let world = World::new().await;
    let mut connection = world.connect();
    let question = query(NAME, RecordType::A, None).to_vec().unwrap();
    for _ in 0..PIPELINED + 5 {
        stream::write(&mut connection, &question).await.unwrap();
    }
    let mut upstreams = Vec::new();
    for _ in 0..PIPELINED {
        upstreams.push(world.tcp.accept().await.unwrap().0);
    }
    let accepted = tokio::time::timeout(Duration::from_millis(50), world.tcp.accept()).await;
    assert!(accepted.is_err(), "more than {PIPELINED} questions are open");
    let first = upstreams.first_mut().unwrap();
    let asked = Frames::default().next(first).await.unwrap().unwrap();
    let answer = answered(Message::from_vec(&asked).unwrap()).to_vec().unwrap();
    stream::write(first, &answer).await.unwrap();
    // The next ones know the answer already.
    let mut frames = Frames::default();
    for _ in 0..=5 {
        frames.next(&mut connection).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_transfer_passes_in_all_its_messages() {
    let world = World::new().await;
    let mut connection = world.connect();
    let transfer = query("example.org.", RecordType::AXFR, None).to_vec().unwrap();
    stream::write(&mut connection, &transfer).await.unwrap();
    let (mut upstream, _) = world.tcp.accept().await.unwrap();
    assert_eq!(Frames::default().next(&mut upstream).await.unwrap().unwrap(), transfer);
    let mut frames = Frames::default();
    for message in [&b"one"[..], b"two", b"three"] {
        stream::write(&mut upstream, message).await.unwrap();
        assert_eq!(frames.next(&mut connection).await.unwrap().unwrap(), message);
    }
    drop(upstream);
    // The connection is good for another question.
    let question = query(MESH, RecordType::A, None).to_vec().unwrap();
    stream::write(&mut connection, &question).await.unwrap();
    frames.next(&mut connection).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_and_so_is_one_that_never_finishes_a_question() {
    let world = World::new().await;
    for begun in [&[][..], &[0, 20, 1]] {
        let mut connection = world.connect();
        connection.write_all(begun).await.unwrap();
        let start = Instant::now();
        assert_eq!(connection.read(&mut [0; 1]).await.unwrap(), 0);
        assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());
    }
}

#[tokio::test]
async fn half_of_a_connection_is_enough_for_the_answers() {
    let world = World::new().await;
    let mut connection = world.connect();
    let question = query(MESH, RecordType::A, None).to_vec().unwrap();
    stream::write(&mut connection, &question).await.unwrap();
    connection.shutdown().await.unwrap();
    let mut frames = Frames::default();
    assert!(frames.next(&mut connection).await.unwrap().is_some());
    assert!(frames.next(&mut connection).await.unwrap().is_none());
}

#[tokio::test]
async fn a_pod_has_so_many_connections_and_no_more() {
    let world = World::new().await;
    let question = query(MESH, RecordType::A, None).to_vec().unwrap();
    let mut open = Vec::new();
    for _ in 0..MOST_CONNECTIONS {
        let mut connection = world.connect();
        stream::write(&mut connection, &question).await.unwrap();
        Frames::default().next(&mut connection).await.unwrap().unwrap();
        open.push(connection);
    }
    assert_eq!(world.connect().read(&mut [0; 1]).await.unwrap(), 0);
    assert!(world.events().contains(&"busy".to_owned()));
    open.pop();
    loop {
        let mut connection = world.connect();
        if stream::write(&mut connection, &question).await.is_ok()
            && let Ok(Some(_)) = Frames::default().next(&mut connection).await
        {
            break;
        }
        tokio::task::yield_now().await;
    }
}
