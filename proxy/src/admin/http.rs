//! A small HTTP/1.1 server: bounded connections, deadlines on headers and replies. What a path means is the caller's.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{sync::Semaphore, time::timeout};

use super::endpoint::Socket;
use crate::tasks::Tasks;

/// Connections served at once by one listener; more wait in the kernel's queue.
const CONNECTIONS: usize = 64;
/// How long a client may take to send a request's header, first byte included.
const HEADER: Duration = Duration::from_secs(5);
/// How long a connection may last: a client that does not read its reply must not keep others out.
const LIFETIME: Duration = Duration::from_mins(1);
/// Pause after accept(2) failed, for instance because no descriptor is free.
const BACK_OFF: Duration = Duration::from_millis(100);

/// What is asked for.
pub(crate) struct Route<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
}

/// What is answered.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) content_type: &'static str,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) const fn new(status: StatusCode, content_type: &'static str, body: String) -> Self {
        Self { status, content_type, body }
    }

    pub(crate) const fn text(status: StatusCode, body: String) -> Self {
        Self::new(status, "text/plain; charset=utf-8", body)
    }

    pub(crate) fn not_found() -> Self {
        Self::text(StatusCode::NOT_FOUND, "not found\n".to_owned())
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n".to_owned())
    }
}

/// Serves `socket`, while it is not lent, until the tasks drain.
pub(crate) fn serve(
    socket: impl Into<Socket>,
    tasks: &Tasks,
    answer: impl Fn(&Route<'_>) -> Reply + Send + Sync + 'static,
) {
    let (tasks, answer, socket) = (tasks.clone(), Arc::new(answer), socket.into());
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    tasks.clone().spawn(async move {
        let draining = tasks.draining();
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                () = draining.cancelled() => return,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(BACK_OFF).await;
                    continue;
                }
            };
            let (answer, draining) = (Arc::clone(&answer), draining.clone());
            tasks.spawn(async move {
                let _permit = permit;
                let service = service_fn(|request: Request<Incoming>| {
                    let reply =
                        answer(&Route { method: request.method(), path: request.uri().path() });
                    std::future::ready(Ok::<_, Infallible>(response(reply)))
                });
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER)
                    .serve_connection(TokioIo::new(stream), service);
                tokio::pin!(connection);
                let end = timeout(LIFETIME, async {
                    tokio::select! {
                        end = connection.as_mut() => end,
                        () = draining.cancelled() => {
                            connection.as_mut().graceful_shutdown();
                            connection.await
                        }
                    }
                });
                match end.await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "http connection ended early"),
                    Err(_elapsed) => tracing::debug!("http connection cut at its deadline"),
                }
            });
        }
    });
}

fn response(reply: Reply) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(reply.body)));
    *response.status_mut() = reply.status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(reply.content_type));
    response
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpSocket,
        runtime::Handle,
    };

    use super::*;
    use crate::admin::Endpoint;

    #[tokio::test(start_paused = true)]
    async fn clients_that_do_not_read_keep_others_out_for_a_while_only() {
        const LARGE: usize = 8 << 20;
        let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = holder.local_addr().unwrap();
        let mut inherited = vec![(Endpoint::Admin, holder)];
        let socket = Socket::open(Endpoint::Admin, addr, &mut inherited).await.unwrap();
        let tasks = Tasks::new(Handle::current());
        serve(socket, &tasks, |route| {
            let length = if route.path == "/large" { LARGE } else { 0 };
            Reply::text(StatusCode::OK, "x".repeat(length))
        });
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut client = TcpSocket::new_v4().unwrap().connect(addr).await.unwrap();
            client.write_all(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            // Its first byte shows that the connection has its place.
            client.read_u8().await.unwrap();
            idle.push(client);
        }
        let mut client = TcpSocket::new_v4().unwrap().connect(addr).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let answered = timeout(LIFETIME * 2, client.read_u8()).await;
        assert_eq!(answered.unwrap().unwrap(), b'H');
    }
}
