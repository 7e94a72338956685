//! What the control plane has told over all streams, and what is said to it. Pure: sending and applying are left to the
//! client.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use culvert_mesh::Update;
use culvert_proto::envoy::config::core::v3::Node;
use culvert_proto::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource,
};
use culvert_proto::google::rpc::Status;
use culvert_proto::{ADDRESS_TYPE, AUTHORIZATION_TYPE};

use super::demand::{Change, OnDemand};
use crate::convert::{self, ConvertError};

/// Asks for all resources of a type.
const WILDCARD: &str = "*";
/// Names that are remembered; more than the largest mesh has.
const MAX_NAMES: usize = 4 << 20;
/// A resource's name is a uid, or a namespace and a host name.
const MAX_NAME: usize = 4096;
/// Refused resources that an answer names one by one.
const MAX_TOLD: usize = 64;

/// A type of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Address,
    Authorization,
}

impl Kind {
    pub(super) const ALL: [Self; 2] = [Self::Address, Self::Authorization];

    pub(super) fn url(self) -> &'static str {
        match self {
            Self::Address => ADDRESS_TYPE,
            Self::Authorization => AUTHORIZATION_TYPE,
        }
    }

    pub(super) fn of(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.url() == url)
    }

    fn convert(self, name: &str, body: &[u8]) -> Result<Update, ConvertError> {
        match self {
            Self::Address => convert::address(name, body),
            Self::Authorization => convert::authorization(name, body),
        }
    }

    fn remove(self, name: &str, updates: &mut Vec<Update>) {
        match self {
            Self::Address => updates.extend(convert::address_removal(name)),
            Self::Authorization => updates.extend(convert::authorization_removal(name)),
        }
    }
}

/// What is known of the resources of one type.
#[derive(Debug, Default)]
struct Held {
    /// By name, the version that was accepted last.
    versions: HashMap<Box<str>, Box<str>>,
    /// A response was accepted whole.
    synced: bool,
}

/// Everything that was accepted, for the answers to come and for the first words of the next stream.
#[derive(Debug)]
pub(super) struct Session {
    addresses: Held,
    authorizations: Held,
    on_demand: Option<OnDemand>,
}

/// What follows from a response.
#[derive(Debug)]
pub(super) struct Received {
    /// In the order in which they have to be applied.
    pub(super) updates: Vec<Update>,
    /// To be sent once the updates are applied.
    pub(super) reply: DeltaDiscoveryRequest,
    /// For each of the response's resources.
    pub(super) accepted: Vec<bool>,
    /// Resources, and types, that were refused.
    pub(super) refused: usize,
}

impl Session {
    pub(super) fn new(on_demand: Option<OnDemand>) -> Self {
        Self { addresses: Held::default(), authorizations: Held::default(), on_demand }
    }

    /// The first words of a stream, one request a type.
    pub(super) fn hello(&self, node: &Node) -> [DeltaDiscoveryRequest; 2] {
        Kind::ALL.map(|kind| {
            let (mut subscribe, mut unsubscribe) = (Vec::new(), Vec::new());
            if let (Kind::Address, Some(on_demand)) = (kind, &self.on_demand) {
                // Both at once is how to subscribe to nothing: saying neither would be the wildcard.
                subscribe.push(WILDCARD.to_owned());
                subscribe.extend(on_demand.names());
                unsubscribe.push(WILDCARD.to_owned());
            }
            let versions = &self.held(kind).versions;
            let text = |text: &str| text.to_owned();
            DeltaDiscoveryRequest {
                node: Some(node.clone()),
                type_url: kind.url().to_owned(),
                resource_names_subscribe: subscribe,
                resource_names_unsubscribe: unsubscribe,
                initial_resource_versions: versions
                    .iter()
                    .map(|(name, version)| (text(name), text(version)))
                    .collect(),
                ..DeltaDiscoveryRequest::default()
            }
        })
    }

    /// The request that tells of a change of what is asked for on demand.
    pub(super) fn subscription(change: Change) -> DeltaDiscoveryRequest {
        let names = |names: Vec<Arc<str>>| names.iter().map(ToString::to_string).collect();
        DeltaDiscoveryRequest {
            type_url: ADDRESS_TYPE.to_owned(),
            resource_names_subscribe: names(change.subscribe),
            resource_names_unsubscribe: names(change.unsubscribe),
            ..DeltaDiscoveryRequest::default()
        }
    }

    /// Takes a response in: what is good of it is accepted, what is not is named in the reply.
    ///
    /// A resource of which a good version was accepted before keeps that one, and its version is told to the next stream
    /// so that the control plane sends the resource again, or says that it is gone.
    pub(super) fn receive(&mut self, response: &DeltaDiscoveryResponse) -> Received {
        let mut refusals = Refusals::default();
        let (mut updates, mut accepted) = (Vec::new(), Vec::new());
        if let Some(kind) = Kind::of(&response.type_url) {
            let held = self.held_mut(kind);
            updates.reserve(response.resources.len() + response.removed_resources.len());
            for resource in &response.resources {
                let update = held.accept(kind, resource);
                accepted.push(update.is_ok());
                match update {
                    Ok(update) => updates.push(update),
                    Err(error) => refusals.add(&resource.name, &error),
                }
            }
            for name in &response.removed_resources {
                held.versions.remove(name.as_str());
                kind.remove(name, &mut updates);
            }
            held.synced |= refusals.count == 0;
        } else {
            refusals.add(&response.type_url, &ConvertError::UnknownType);
        }
        let refused = refusals.count;
        let reply = DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce.clone(),
            error_detail: refusals.detail(),
            ..DeltaDiscoveryRequest::default()
        };
        Received { updates, reply, accepted, refused }
    }

    /// A response was accepted whole for each type that the control plane sends unasked.
    pub(super) fn is_synced(&self) -> bool {
        (self.addresses.synced || self.on_demand.is_some()) && self.authorizations.synced
    }

    fn held(&self, kind: Kind) -> &Held {
        match kind {
            Kind::Address => &self.addresses,
            Kind::Authorization => &self.authorizations,
        }
    }

    fn held_mut(&mut self, kind: Kind) -> &mut Held {
        match kind {
            Kind::Address => &mut self.addresses,
            Kind::Authorization => &mut self.authorizations,
        }
    }
}

impl Held {
    fn accept(&mut self, kind: Kind, resource: &Resource) -> Result<Update, ConvertError> {
        let Resource { name, version, resource, .. } = resource;
        if name.len() > MAX_NAME {
            return Err(ConvertError::NameTooLong);
        }
        let body = resource.as_ref().ok_or(ConvertError::NoBody)?;
        if body.type_url != kind.url() {
            return Err(ConvertError::OtherType);
        }
        let update = kind.convert(name, &body.value)?;
        if let Some(known) = self.versions.get_mut(name.as_str()) {
            *known = version.as_str().into();
        } else if self.versions.len() < MAX_NAMES {
            self.versions.insert(name.as_str().into(), version.as_str().into());
        } else {
            return Err(ConvertError::TooMany);
        }
        Ok(update)
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
