//! One list and watch for each kind. A kind that the cluster does not know is asked for again from time to time.

use std::time::Duration;

use culvert_mesh::error::chain;
use futures::{
    StreamExt as _,
    stream::{BoxStream, ReadyChunks, SelectAll, select_all, unfold},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};
use tokio::time::sleep;

use crate::objects::Kind;

/// How soon a kind that the cluster does not know is asked for again.
pub(crate) const ABSENT: Duration = Duration::from_secs(30);
/// How much is translated at once.
const BATCH: usize = 1024;

/// What a watch told.
#[derive(Debug)]
pub(crate) enum Told {
    Event(Box<Event<DynamicObject>>),
    /// The cluster knows the kind in none of its versions.
    Absent,
}

/// What all watches tell, as much at once as there is. Never ends.
pub(crate) type Watches = ReadyChunks<SelectAll<BoxStream<'static, (Kind, Told)>>>;

/// Watches every kind; one that is not known is asked for again after `absent`.
pub(crate) fn all(client: &Client, absent: Duration) -> Watches {
    let watches = Kind::ALL.into_iter().map(|kind| {
        let follow = Follow::new(client.clone(), kind, absent);
        let told = unfold(follow, |mut follow| async move {
            let told = follow.next().await;
            Some(((follow.kind, told), follow))
        });
        told.boxed()
    });
    select_all(watches).ready_chunks(BATCH)
}

/// The watch of one kind.
struct Follow {
    client: Client,
    kind: Kind,
    /// Counts the versions that were asked for.
    asked: usize,
    stream: BoxStream<'static, watcher::Result<Event<DynamicObject>>>,
    absent: Duration,
    pause: Option<Duration>,
    is_absent: bool,
    /// What was last said to be wrong.
    reported: Option<String>,
}

impl Follow {
    fn new(client: Client, kind: Kind, absent: Duration) -> Self {
        let stream = watch(&client, kind, 0);
        Self {
            client,
            kind,
            asked: 0,
            stream,
            absent,
            pause: None,
            is_absent: false,
            reported: None,
        }
    }

    async fn next(&mut self) -> Told {
        loop {
            if let Some(pause) = self.pause.take() {
                sleep(pause).await;
            }
            match self.stream.next().await {
                Some(Ok(event)) => {
                    if !matches!(event, Event::Init) {
                        self.works();
                    }
                    return Told::Event(Box::new(event));
                }
                Some(Err(error)) if self.kind.is_custom() && is_not_found(&error) => {
                    self.asked += 1;
                    self.stream = watch(&self.client, self.kind, self.asked);
                    if self.asked.is_multiple_of(self.kind.versions().len()) {
                        self.pause = Some(self.absent);
                        if !std::mem::replace(&mut self.is_absent, true) {
                            let kind = self.kind.name();
                            tracing::info!(
                                kind,
                                "the cluster does not know the kind; asking again"
                            );
                        }
                        return Told::Absent;
                    }
                }
                Some(Err(error)) => self.report(&error),
                None => {
                    self.stream = watch(&self.client, self.kind, self.asked);
                    self.pause = Some(self.absent);
                }
            }
        }
    }

    fn works(&mut self) {
        let kind = self.kind.name();
        if std::mem::take(&mut self.is_absent) {
            tracing::info!(kind, "the cluster knows the kind");
        }
        if self.reported.take().is_some() {
            tracing::info!(kind, "watched again");
        }
    }

    /// Says what is wrong, once.
    fn report(&mut self, error: &watcher::Error) {
        let kind = self.kind.name();
        let text = chain(error);
        if self.reported.as_ref() == Some(&text) {
            return;
        }
        if status(error) == Some(403) {
            let (plural, group) = (self.kind.plural(), self.kind.group());
            tracing::error!(
                error = text,
                "{plural} of API group \"{group}\" may not be watched; allow get, list and watch"
            );
        } else {
            tracing::warn!(kind, error = text, "watch interrupted; objects stay, trying again");
        }
        self.reported = Some(text);
    }
}

fn watch(
    client: &Client,
    kind: Kind,
    asked: usize,
) -> BoxStream<'static, watcher::Result<Event<DynamicObject>>> {
    let versions = kind.versions();
    let version = versions.get(asked % versions.len()).copied().unwrap_or("v1");
    let group = kind.group();
    let api_version =
        if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let resource = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version,
        kind: kind.name().to_owned(),
        plural: kind.plural().to_owned(),
    };
    let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
    watcher(api, watcher::Config::default()).default_backoff().boxed()
}

fn is_not_found(error: &watcher::Error) -> bool {
    status(error) == Some(404)
}

/// The status of HTTP that the API answered with.
fn status(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}
