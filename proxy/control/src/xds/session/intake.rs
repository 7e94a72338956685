//! A response on its way into the state, one resource at a time.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::vec;

use culvert_mesh::Update;
use culvert_proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use culvert_proto::google::rpc::Status;

use super::{Kind, MAX_NAME, Session};
use crate::convert::ConvertError;
use crate::xds::demand::{Answered, Outcome};
use crate::xds::response::{Resources, Response};

/// Refused resources that an answer names one by one.
const MAX_TOLD: usize = 64;

/// The updates that a response comes to, each made as it is taken: what is good of it is accepted, what is not is named
/// in the reply.
///
/// A resource of which a good version was accepted before keeps that one, and its version is told to the next stream so
/// that the control plane sends the resource again, or says that it is gone.
pub(in crate::xds) struct Intake {
    session: Session,
    kind: Option<Kind>,
    type_url: String,
    nonce: String,
    resources: Resources,
    removed: vec::IntoIter<String>,
    /// What else the resource that was taken last comes to.
    more: VecDeque<Update>,
    refusals: Refusals,
    answered: Vec<Answered>,
}

/// What follows from a response once its updates are applied.
#[derive(Debug)]
pub(in crate::xds) struct Received {
    /// What to say to it.
    pub(in crate::xds) reply: DeltaDiscoveryRequest,
    /// What it says of what was asked for on demand; nothing where nothing can be.
    pub(in crate::xds) answered: Vec<Answered>,
    /// Resources, and types, that were refused.
    pub(in crate::xds) refused: usize,
}

impl Intake {
    /// Takes `response` into `session`, which it gives back when it has [finished](Self::finish).
    pub(in crate::xds) fn new(session: Session, response: Response) -> Self {
        let Response { resources, type_url, nonce, removed_resources } = response;
        let kind = Kind::of(&type_url);
        let (mut resources, mut removed) = (resources, removed_resources);
        let mut refusals = Refusals::default();
        if kind.is_none() {
            refusals.add(&type_url, &ConvertError::UnknownType);
            (resources, removed) = (Vec::new(), Vec::new());
        }
        Self {
            session,
            kind,
            type_url,
            nonce,
            resources: Resources::new(resources),
            removed: removed.into_iter(),
            more: VecDeque::new(),
            refusals,
            answered: Vec::new(),
        }
    }

    /// The session after all that was not taken yet, and what follows from the response.
    pub(in crate::xds) fn finish(mut self) -> (Session, Received) {
        self.by_ref().for_each(drop);
        let refused = self.refusals.count;
        if let Some(kind) = self.kind {
            self.session.held_mut(kind).synced |= refused == 0;
        }
        let reply = DeltaDiscoveryRequest {
            type_url: self.type_url,
            response_nonce: self.nonce,
            error_detail: self.refusals.detail(),
            ..DeltaDiscoveryRequest::default()
        };
        (self.session, Received { reply, answered: self.answered, refused })
    }

    /// The update that the next good resource comes to.
    fn next_resource(&mut self, kind: Kind) -> Option<Update> {
        loop {
            let resource = match self.resources.next()? {
                Ok(resource) => resource,
                Err(error) => {
                    self.refusals.add("a resource", &ConvertError::Malformed(error));
                    continue;
                }
            };
            let update = self.session.held_mut(kind).accept(kind, &resource);
            if self.session.is_asked(kind) {
                let outcome = if update.is_ok() { Outcome::Known } else { Outcome::Refused };
                let (name, aliases) = (resource.name.clone(), resource.aliases);
                self.answered.push(Answered { name, aliases, outcome });
            }
            match update {
                Ok(update) => return Some(update),
                Err(error) => self.refusals.add(&resource.name, &error),
            }
        }
    }

    /// The update that the next removal comes to.
    fn next_removal(&mut self, kind: Kind) -> Option<Update> {
        let name = self.removed.next()?;
        self.session.held_mut(kind).versions.remove(name.as_str());
        self.more.extend(kind.remove(&name));
        if self.session.is_asked(kind) {
            let (aliases, outcome) = (Vec::new(), Outcome::Absent);
            self.answered.push(Answered { name, aliases, outcome });
        }
        self.more.pop_front()
    }
}

impl Iterator for Intake {
    type Item = Update;

    fn next(&mut self) -> Option<Update> {
        let kind = self.kind?;
        let more = self.more.pop_front();
        more.or_else(|| self.next_resource(kind)).or_else(|| self.next_removal(kind))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // A removal is of a uid or of a service.
        let most = self.more.len() + self.resources.len() + 2 * self.removed.len();
        (self.more.len(), Some(most))
    }
}

/// Refused resources, by name with the reason, as far as an answer has room.
#[derive(Debug, Default)]
struct Refusals {
    text: String,
    count: usize,
}

impl Refusals {
    fn add(&mut self, name: &str, error: &ConvertError) {
        self.count += 1;
        if self.count > MAX_TOLD {
            return;
        }
        if !self.text.is_empty() {
            self.text.push_str("; ");
        }
        self.text.extend(name.chars().take(MAX_NAME));
        self.text.push_str(": ");
        self.text.push_str(&culvert_mesh::error::chain(error));
    }

    fn detail(mut self) -> Option<Status> {
        if self.count == 0 {
            return None;
        }
        if let Some(more) = self.count.checked_sub(MAX_TOLD).filter(|more| *more > 0) {
            // Writing to a text does not fail.
            let _never = write!(self.text, "; and {more} more");
        }
        Some(Status { message: self.text, ..Status::default() })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message as _;

    use super::*;
    use crate::testing::{addresses, workload};

    fn many() -> Bytes {
        let workloads = (0..100_u8).map(|i| workload(&format!("w-{i}"), [10, 0, 0, i]));
        addresses(workloads, &["w-7", "none"]).encode_to_vec().into()
    }

    #[test]
    fn resources_stay_in_the_buffer_that_they_came_in_until_they_are_taken() {
        let bytes = many();
        let response = Response::decode(bytes.clone()).unwrap();
        let within = bytes.as_ptr_range();
        assert_eq!(response.resources.len(), 100);
        assert!(response.resources.iter().all(|one| within.contains(&one.as_ptr())));
        let mut intake = Intake::new(Session::default(), response);
        assert_eq!(intake.size_hint(), (0, Some(104)));
        assert!(intake.next().is_some());
        assert_eq!((intake.session.addresses.versions.len(), intake.resources.len()), (1, 99));
        assert_eq!(intake.by_ref().count(), 101);
        let (session, received) = intake.finish();
        assert_eq!((session.addresses.versions.len(), received.refused), (99, 0));
    }

    #[test]
    fn what_is_not_taken_is_accepted_all_the_same_when_it_is_finished() {
        let response = Response::decode(many()).unwrap();
        let (session, _) = Intake::new(Session::default(), response).finish();
        assert!(session.addresses.synced && session.addresses.versions.len() == 99);
    }

    #[test]
    fn a_resource_that_is_none_leaves_the_others_alone() {
        let mut response = Response::decode(many()).unwrap();
        response.resources[3] = Bytes::from_static(&[0xff]);
        let mut intake = Intake::new(Session::default(), response);
        assert_eq!(intake.by_ref().count(), 101);
        let (session, received) = intake.finish();
        assert_eq!((received.refused, session.addresses.synced), (1, false));
        assert!(received.reply.error_detail.unwrap().message.contains("malformed"));
    }
}
