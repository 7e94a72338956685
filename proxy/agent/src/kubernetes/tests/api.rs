//! A server that speaks as much of the Kubernetes API as watching pods and annotating them takes: lists with a version,
//! watches from one, in chunks, and how these fail.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::mpsc::{UnboundedSender, unbounded_channel},
};

type Body = BoxBody<Bytes, Infallible>;

/// A running server; it stops with the test's runtime.
#[derive(Clone)]
pub(super) struct ApiServer {
    pub(super) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    version: u64,
    /// By the last part of their path, and name.
    objects: BTreeMap<(String, String), Value>,
    /// Every change, with its version.
    log: Vec<(u64, String, Value)>,
    watches: Vec<(String, UnboundedSender<Bytes>)>,
    requests: Vec<String>,
    patches: Vec<(String, Value)>,
    forbidden: bool,
}

impl ApiServer {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self { address, state: Arc::default() };
        let serving = server.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let server = serving.clone();
                let service = service_fn(move |request| {
                    let server = server.clone();
                    async move { Ok::<_, Infallible>(server.answer(request).await) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        server
    }

    /// Creates or changes an object of `kind` (`pods`, `namespaces`).
    pub(super) fn put(&self, kind: &str, mut object: Value) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let before = state.objects.insert((kind.to_owned(), name), object.clone());
        let event = if before.is_some() { "MODIFIED" } else { "ADDED" };
        state.tell(kind, json!({"type": event, "object": object}));
    }

    pub(super) fn delete(&self, kind: &str, name: &str) {
        let mut state = self.state.lock().unwrap();
        let object = state.objects.remove(&(kind.to_owned(), name.to_owned())).unwrap();
        state.version += 1;
        state.tell(kind, json!({"type": "DELETED", "object": object}));
    }

    /// Deletes it while nobody is told: the watches are cut, and what they missed is forgotten.
    pub(super) fn delete_and_forget(&self, kind: &str, name: &str) {
        let mut state = self.state.lock().unwrap();
        state.objects.remove(&(kind.to_owned(), name.to_owned())).unwrap();
        state.version += 1;
        state.log.clear();
        let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410,
            "reason": "Expired", "message": "too old resource version"});
        let line = format!("{}\n", json!({"type": "ERROR", "object": gone}));
        for (_, watch) in state.watches.drain(..) {
            watch.send(line.clone().into()).unwrap();
        }
    }

    /// Cuts every watch in the middle of a line.
    pub(super) fn cut(&self) {
        for (_, watch) in self.state.lock().unwrap().watches.drain(..) {
            watch.send(Bytes::from_static(b"{\"type\":\"ADD")).unwrap();
        }
    }

    /// Whether to refuse whatever is asked.
    pub(super) fn forbid(&self, forbidden: bool) {
        self.state.lock().unwrap().forbidden = forbidden;
    }

    pub(super) fn bookmark(&self) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": state.version.to_string()}});
        state.tell("pods", json!({"type": "BOOKMARK", "object": object}));
    }

    /// Paths and queries so far.
    pub(super) fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }

    /// What was patched, and how.
    pub(super) fn patches(&self) -> Vec<(String, Value)> {
        self.state.lock().unwrap().patches.clone()
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let body = body.collect().await.unwrap().to_bytes();
        let mut state = self.state.lock().unwrap();
        state.requests.push(format!("{path}?{query}"));
        if state.forbidden {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                "code": 403, "reason": "Forbidden", "message": "may not"});
            return json_response(StatusCode::FORBIDDEN, &status);
        }
        if parts.method == Method::PATCH {
            let patch: Value = serde_json::from_slice(&body).unwrap();
            state.patches.push((path.clone(), patch));
            let name = path.split('/').nth(6).unwrap().to_owned();
            let object = state.objects.get(&("pods".to_owned(), name)).cloned();
            return json_response(
                StatusCode::OK,
                &object.unwrap_or_else(|| json!({"metadata": {}})),
            );
        }
        let kind = path.rsplit('/').next().unwrap().to_owned();
        if query.contains("watch=true") {
            return state.watch(&kind, &query);
        }
        let items: Vec<_> = state
            .objects
            .iter()
            .filter(|((of, _), _)| *of == kind)
            .map(|(_, object)| object)
            .collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items,
            "metadata": {"resourceVersion": state.version.to_string()}});
        json_response(StatusCode::OK, &list)
    }
}

impl State {
    fn tell(&mut self, kind: &str, event: Value) {
        let line = Bytes::from(format!("{event}\n"));
        self.log.push((self.version, kind.to_owned(), event));
        self.watches.retain(|(of, watch)| of != kind || watch.send(line.clone()).is_ok());
    }

    fn watch(&mut self, kind: &str, query: &str) -> Response<Body> {
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        let from: u64 = from.unwrap().parse().unwrap();
        let (sender, mut receiver) = unbounded_channel();
        for (version, of, event) in &self.log {
            if of == kind && *version > from {
                sender.send(Bytes::from(format!("{event}\n"))).unwrap();
            }
        }
        self.watches.push((kind.to_owned(), sender));
        let chunks = stream::poll_fn(move |context| receiver.poll_recv(context));
        let body = BodyExt::boxed(StreamBody::new(chunks.map(|chunk| Ok(Frame::data(chunk)))));
        Response::builder().header("content-type", "application/json").body(body).unwrap()
    }
}

fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(Full::from(value.to_string()).boxed())
        .unwrap()
}
