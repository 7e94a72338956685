//! A server that speaks as much of the Kubernetes API as watching objects and annotating pods takes: lists with a version
//! and in pages, watches from one, in chunks, and how these fail.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]
#![expect(clippy::disallowed_methods, reason = "the server ends with the test's runtime")]

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
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
#[derive(Clone, Debug)]
pub struct ApiServer {
    /// Where it listens, on loopback.
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    /// By their kind's name in paths (`pods`), and their namespace and name.
    objects: BTreeMap<(String, String), Value>,
    /// Every change since `forgotten`, with its version.
    log: Vec<(u64, String, Value)>,
    /// The last version that cannot be watched from any more.
    forgotten: u64,
    watches: Vec<(String, UnboundedSender<Bytes>)>,
    requests: Vec<String>,
    patches: Vec<(String, Value)>,
    forbidden: BTreeSet<String>,
    all_forbidden: bool,
    /// The versions that kinds are served in, where that is not every one that is asked for.
    versions: BTreeMap<String, String>,
}

impl ApiServer {
    /// Starts a server that has no objects.
    pub async fn start() -> Self {
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Creates or changes an object of `kind`, by its name in paths (`pods`, `namespaces`).
    pub fn put(&self, kind: &str, mut object: Value) {
        let mut state = self.state();
        state.version += 1;
        let version = state.version.to_string();
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.insert("resourceVersion".to_owned(), json!(version));
        }
        let before = state.objects.insert((kind.to_owned(), path_of(&object)), object.clone());
        let event = if before.is_some() { "MODIFIED" } else { "ADDED" };
        state.tell(kind, json!({"type": event, "object": object}));
    }

    /// Deletes an object by its name, or `namespace/name`.
    pub fn delete(&self, kind: &str, name: &str) {
        let mut state = self.state();
        let mut object = state.remove(kind, name);
        state.version += 1;
        let version = state.version.to_string();
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.insert("resourceVersion".to_owned(), json!(version));
        }
        state.tell(kind, json!({"type": "DELETED", "object": object}));
    }

    /// Deletes it while nobody is told: the watches are cut, and what they missed is forgotten.
    pub fn delete_and_forget(&self, kind: &str, name: &str) {
        let mut state = self.state();
        drop(state.remove(kind, name));
        state.version += 1;
        state.forget();
        let line = gone();
        for (_, watch) in state.watches.drain(..) {
            watch.send(line.clone()).unwrap();
        }
    }

    /// Forgets every change until now: whoever has not seen the last one has to list again.
    pub fn forget(&self) {
        self.state().forget();
    }

    /// Cuts every watch in the middle of a line.
    pub fn cut(&self) {
        for (_, watch) in self.state().watches.drain(..) {
            watch.send(Bytes::from_static(b"{\"type\":\"ADD")).unwrap();
        }
    }

    /// Whether to refuse whatever is asked.
    pub fn forbid(&self, forbidden: bool) {
        self.state().all_forbidden = forbidden;
    }

    /// Whether to refuse what is asked about `kind`.
    pub fn forbid_kind(&self, kind: &str, forbidden: bool) {
        let mut state = self.state();
        if forbidden {
            state.forbidden.insert(kind.to_owned());
        } else {
            state.forbidden.remove(kind);
        }
    }

    /// Serves `kind` in this version alone; `""` for not at all.
    pub fn serve_only(&self, kind: &str, version: &str) {
        self.state().versions.insert(kind.to_owned(), version.to_owned());
    }

    /// Tells those that watch `kind` a version, and nothing else.
    pub fn bookmark(&self, kind: &str) {
        let mut state = self.state();
        state.version += 1;
        let object = json!({"apiVersion": "v1", "kind": "Any", "metadata": {"resourceVersion": state.version.to_string()}});
        state.tell(kind, json!({"type": "BOOKMARK", "object": object}));
    }

    /// How many watches of `kind` are open.
    pub fn watches(&self, kind: &str) -> usize {
        let mut state = self.state();
        state.watches.retain(|(_, watch)| !watch.is_closed());
        state.watches.iter().filter(|(of, _)| of == kind).count()
    }

    /// Paths and queries so far.
    pub fn requests(&self) -> Vec<String> {
        self.state().requests.clone()
    }

    /// What was patched, and how.
    pub fn patches(&self) -> Vec<(String, Value)> {
        self.state().patches.clone()
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let body = body.collect().await.unwrap().to_bytes();
        let mut state = self.state();
        state.requests.push(format!("{path}?{query}"));
        let mut segments = path.rsplit('/');
        let kind = segments.next().unwrap_or_default().to_owned();
        let version = segments.next().unwrap_or_default();
        if state.all_forbidden || state.forbidden.contains(&kind) {
            return refusal(StatusCode::FORBIDDEN, "Forbidden");
        }
        if state.versions.get(&kind).is_some_and(|served| served != version) {
            // As for a path that no definition of resources is behind.
            let text = Full::from("404 page not found\n").boxed();
            return Response::builder().status(StatusCode::NOT_FOUND).body(text).unwrap();
        }
        if parts.method == Method::PATCH {
            let patch: Value = serde_json::from_slice(&body).unwrap();
            state.patches.push((path.clone(), patch));
            let mut segments = path.split('/').skip(4);
            let (namespace, name) = (segments.next().unwrap(), segments.nth(1).unwrap());
            let key = ("pods".to_owned(), format!("{namespace}/{name}"));
            let object = state.objects.get(&key).cloned();
            return json_response(
                StatusCode::OK,
                &object.unwrap_or_else(|| json!({"metadata": {}})),
            );
        }
        if query.contains("watch=true") {
            return state.watch(&kind, &query);
        }
        state.list(&kind, &query)
    }
}

impl State {
    fn remove(&mut self, kind: &str, name: &str) -> Value {
        self.objects.remove(&(kind.to_owned(), name.to_owned())).unwrap()
    }

    fn forget(&mut self) {
        self.log.clear();
        self.forgotten = self.version;
    }

    fn tell(&mut self, kind: &str, event: Value) {
        let line = Bytes::from(format!("{event}\n"));
        self.log.push((self.version, kind.to_owned(), event));
        self.watches.retain(|(of, watch)| of != kind || watch.send(line.clone()).is_ok());
    }

    fn list(&self, kind: &str, query: &str) -> Response<Body> {
        let from: usize = parameter(query, "continue").map_or(0, |from| from.parse().unwrap());
        let limit = parameter(query, "limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
        let all = self.objects.iter().filter(|((of, _), _)| of == kind).map(|(_, object)| object);
        let mut items: Vec<_> = all.skip(from).take(limit.saturating_add(1)).collect();
        let mut metadata = json!({"resourceVersion": self.version.to_string()});
        if items.len() > limit {
            items.truncate(limit);
            metadata = json!({
                "resourceVersion": self.version.to_string(), "continue": (from + limit).to_string()
            });
        }
        // Items of a list do not repeat what kind they are of.
        let list =
            json!({"apiVersion": "v1", "kind": "List", "items": items, "metadata": metadata});
        json_response(StatusCode::OK, &list)
    }

    fn watch(&mut self, kind: &str, query: &str) -> Response<Body> {
        let from: u64 = parameter(query, "resourceVersion").unwrap().parse().unwrap();
        let (sender, mut receiver) = unbounded_channel();
        if from < self.forgotten {
            sender.send(gone()).unwrap();
        } else {
            for (version, of, event) in &self.log {
                if of == kind && *version > from {
                    sender.send(Bytes::from(format!("{event}\n"))).unwrap();
                }
            }
            self.watches.push((kind.to_owned(), sender));
        }
        let chunks = stream::poll_fn(move |context| receiver.poll_recv(context));
        let body = BodyExt::boxed(StreamBody::new(chunks.map(|chunk| Ok(Frame::data(chunk)))));
        Response::builder().header("content-type", "application/json").body(body).unwrap()
    }
}

/// `namespace/name`, or the name alone where there is no namespace.
fn path_of(object: &Value) -> String {
    let text = |field: &str| object.pointer(field).and_then(Value::as_str);
    let name = text("/metadata/name").unwrap();
    text("/metadata/namespace").map_or_else(|| name.to_owned(), |space| format!("{space}/{name}"))
}

fn parameter<'q>(query: &'q str, name: &str) -> Option<&'q str> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// The end of a watch whose version is too old.
fn gone() -> Bytes {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410,
        "reason": "Expired", "message": "too old resource version"});
    format!("{}\n", json!({"type": "ERROR", "object": status})).into()
}

fn refusal(status: StatusCode, reason: &str) -> Response<Body> {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": status.as_u16(), "reason": reason, "message": "may not"});
    json_response(status, &body)
}

fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .body(Full::from(value.to_string()).boxed())
        .unwrap()
}
