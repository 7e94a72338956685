use http::Version;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    time::{Instant, sleep},
};

use super::*;
use crate::testing::{LONG, Tls, dial, listen, read_all, tls};

/// A peer made of the bare HTTP/2 library, and what `serve` returned.
struct Peer {
    send: h2::client::SendRequest<Bytes>,
    tasks: JoinSet<()>,
    phase: watch::Sender<Phase>,
    end: JoinSet<Result<(), ServeError>>,
}

impl Peer {
    async fn new<H, F>(handler: H) -> Self
    where
        H: Fn(Incoming) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (near, far) = duplex(1 << 20);
        let (phase, phases) = watch::channel(Phase::Serving);
        let mut end = JoinSet::new();
        end.spawn(async move { serve(far, phases, &Timeouts::default(), handler).await });
        let (send, connection) = h2::client::handshake(near).await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { drop(connection.await) });
        Self { send, tasks, phase, end }
    }

    /// Sends a request and gives its answer.
    async fn ask(&mut self, request: Request<()>) -> Result<Response<RecvStream>, h2::Error> {
        let (response, stream) = self.send.send_request(request, false)?;
        let response = timeout(LONG, response).await.unwrap();
        drop(stream);
        response
    }

    async fn ended(&mut self) -> Result<(), ServeError> {
        timeout(LONG, self.end.join_next()).await.unwrap().unwrap().unwrap()
    }
}

fn connect(authority: &str) -> Request<()> {
    let request = Request::builder().method(Method::CONNECT).version(Version::HTTP_2);
    request.uri(authority).body(()).unwrap()
}

/// 400 for what is not a plain CONNECT, as the binary does it, and else a tunnel until the peer's end.
async fn accept(Incoming { method, authority, respond, .. }: Incoming) {
    if method != Method::CONNECT || authority.is_none() {
        return respond.refuse(StatusCode::BAD_REQUEST);
    }
    let mut tunnel = respond.accept(HeaderMap::new()).unwrap();
    while tunnel.recv.data().await.is_some_and(|data| data.is_ok()) {}
    tunnel.end();
}

#[tokio::test]
async fn a_plain_connect_is_accepted_and_anything_else_is_not() {
    let mut peer = Peer::new(accept).await;
    let get = Request::get("http://10.0.0.1/").version(Version::HTTP_2).body(()).unwrap();
    for (request, status) in [(connect("10.0.0.1:80"), 200), (get, 400)] {
        assert_eq!(peer.ask(request).await.unwrap().status(), status);
    }
}

#[tokio::test]
async fn an_extended_connect_is_refused() {
    let mut peer = Peer::new(accept).await;
    let mut request = connect("http://10.0.0.1/");
    request.extensions_mut().insert(h2::ext::Protocol::from_static("websocket"));
    let answer = peer.ask(request).await;
    assert!(answer.as_ref().is_err() || answer.is_ok_and(|answer| answer.status() == 400));
    // The connection serves on.
    assert_eq!(peer.ask(connect("10.0.0.1:80")).await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_header_list_beyond_the_limit_gets_no_tunnel() {
    let mut peer = Peer::new(accept).await;
    let mut request = connect("10.0.0.1:80");
    request.headers_mut().insert("baggage", "x".repeat(100 << 10).parse().unwrap());
    let answer = peer.ask(request).await;
    assert!(answer.is_err() || answer.is_ok_and(|answer| answer.status() == 431));
}

#[tokio::test(start_paused = true)]
async fn draining_takes_no_new_requests_and_lets_tunnels_end() {
    let mut peer = Peer::new(accept).await;
    let (response, mut stream) = peer.send.send_request(connect("10.0.0.1:80"), false).unwrap();
    assert_eq!(response.await.unwrap().status(), 200);
    peer.phase.send_replace(Phase::Draining);
    sleep(Duration::from_mins(1)).await;
    assert!(peer.end.try_join_next().is_none());
    assert!(peer.send.clone().ready().await.is_err());
    stream.send_data(Bytes::new(), true).unwrap();
    peer.ended().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_has_arrived_is_delivered_after_the_connection_has_ended() {
    let (told, mut delivered) = tokio::sync::mpsc::channel(1);
    let mut peer = Peer::new(move |incoming| {
        let told = told.clone();
        async move {
            let mut tunnel = incoming.respond.accept(HeaderMap::new()).unwrap();
            tunnel.send.send_data(Bytes::new(), true).unwrap();
            sleep(Duration::from_hours(1)).await;
            told.send(tunnel.recv.data().await.unwrap().unwrap()).await.unwrap();
            tunnel.end();
        }
    })
    .await;
    let (response, mut stream) = peer.send.send_request(connect("10.0.0.1:80"), false).unwrap();
    stream.send_data(Bytes::from_static(b"late"), true).unwrap();
    let mut body = response.await.unwrap().into_body();
    while body.data().await.is_some() {}
    peer.tasks.abort_all();
    assert_eq!(delivered.recv().await.unwrap(), "late");
    peer.ended().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn cutting_resets_tunnels_with_connect_error() {
    let mut peer = Peer::new(accept).await;
    let (response, _stream) = peer.send.send_request(connect("10.0.0.1:80"), false).unwrap();
    let mut body = response.await.unwrap().into_body();
    peer.phase.send_replace(Phase::Cut);
    let error = timeout(LONG, body.data()).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(h2::Reason::CONNECT_ERROR));
    peer.ended().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_gives_up_resets_its_request_only() {
    let mut peer = Peer::new(|_| async {}).await;
    for _ in 0..2 {
        assert!(peer.ask(connect("10.0.0.1:80")).await.unwrap_err().is_reset());
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_learns_that_its_request_was_withdrawn() {
    let (told, mut withdrawn) = tokio::sync::mpsc::channel(1);
    let mut peer = Peer::new(move |mut incoming| {
        let told = told.clone();
        async move {
            incoming.respond.withdrawn().await;
            told.send(()).await.unwrap();
        }
    })
    .await;
    let request = peer.send.send_request(connect("10.0.0.1:80"), false).unwrap();
    assert!(timeout(Duration::from_mins(1), withdrawn.recv()).await.is_err());
    drop(request);
    timeout(LONG, withdrawn.recv()).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_reset_do_not_pile_up() {
    let running = Arc::new(());
    let count = Arc::downgrade(&running);
    let mut peer = Peer::new(move |incoming| {
        let running = Arc::clone(&running);
        async move {
            sleep(Duration::from_hours(1)).await;
            drop((incoming, running));
        }
    })
    .await;
    for _ in 0..3 * HANDLERS {
        drop(peer.send.send_request(connect("10.0.0.1:80"), false).unwrap());
        sleep(Duration::from_millis(1)).await;
    }
    // One is the handler's own.
    assert_eq!(count.strong_count(), HANDLERS + 1);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_stops_answering_pings_is_dropped() {
    let mut peer = Peer::new(accept).await;
    sleep(Duration::from_hours(1)).await;
    assert!(peer.end.try_join_next().is_none());
    // The peer's end stays open, and nobody runs it.
    let before = Instant::now();
    let (near, far) = duplex(1 << 20);
    let silent = hold_after_preface(near);
    let (_phase, phases) = watch::channel(Phase::Serving);
    let timeouts = Timeouts::default();
    let serving = serve(far, phases, &timeouts, accept);
    let end = tokio::select! { end = serving => end, () = silent => unreachable!() };
    assert!(matches!(end, Err(ServeError::Silent(_))), "{end:?}");
    assert_eq!(before.elapsed().as_secs(), 30);
    peer.tasks.abort_all();
}

async fn hold_after_preface(mut io: DuplexStream) {
    io.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    sleep(Duration::from_hours(24)).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_without_a_preface_is_dropped() {
    let (_near, far) = duplex(1024);
    let (_phase, phases) = watch::channel(Phase::Serving);
    let end = serve(far, phases, &Timeouts::default(), accept).await;
    assert!(matches!(end, Err(ServeError::H2Timeout(_))), "{end:?}");
}

#[tokio::test]
async fn plain_http_fails_the_handshake_and_is_closed() {
    let Tls { server, .. } = tls();
    let (listener, addr) = listen();
    let (client, accepted) = tokio::join!(dial(addr), listener.accept());
    let mut client = client.unwrap();
    client.write_all(b"CONNECT 10.0.0.1:80 HTTP/1.1\r\n\r\n").await.unwrap();
    let error = handshake(accepted.unwrap().0, server, &Timeouts::default()).await.unwrap_err();
    assert!(matches!(error, AcceptError::Tls(_)), "{error:?}");
    // An alert may come first; then the connection is closed.
    read_all(&mut client).await;
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused() {
    let Tls { server, anonymous, .. } = tls();
    let (listener, addr) = listen();
    let timeouts = Timeouts::default();
    let accepting = async {
        let (tcp, _) = listener.accept().await.unwrap();
        handshake(tcp, server, &timeouts).await
    };
    let connecting = async {
        let tls = tokio_rustls::TlsConnector::from(anonymous);
        let mut stream =
            tls.connect("127.0.0.1".try_into().unwrap(), dial(addr).await.unwrap()).await?;
        stream.read_u8().await
    };
    let (accepted, connected) = tokio::join!(accepting, connecting);
    assert!(accepted.is_err() && connected.is_err());
}
