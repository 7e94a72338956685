//! What the control plane has told over all streams, and what is said to it. Pure: sending and applying are left to the
//! client, and so is taking in a response, one resource at a time, by [`Intake`].

mod intake;

use std::collections::HashMap;
use std::sync::Arc;

use culvert_mesh::Update;
use culvert_proto::envoy::config::core::v3::Node;
use culvert_proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, Resource};
use culvert_proto::{ADDRESS_TYPE, AUTHORIZATION_TYPE};

pub(super) use self::intake::Intake;
use super::demand::{Change, OnDemand};
use crate::convert::{self, ConvertError};

/// Asks for all resources of a type.
const WILDCARD: &str = "*";
/// Names that are remembered; more than the largest mesh has.
const MAX_NAMES: usize = 4 << 20;
/// A resource's name is a uid, or a namespace and a host name.
const MAX_NAME: usize = 4096;

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

    fn remove(self, name: &str) -> impl Iterator<Item = Update> + use<> {
        let (address, policy) = match self {
            Self::Address => (Some(convert::address_removal(name)), None),
            Self::Authorization => (None, Some(convert::authorization_removal(name))),
        };
        address.into_iter().flatten().chain(policy.into_iter().flatten())
    }
}

/// What is known of the resources of one type.
#[derive(Debug, Default)]
struct Held {
    /// By name, the version that was accepted last. Most names are those of the records, and shared with them.
    versions: HashMap<Arc<str>, Box<str>>,
    /// A response was accepted whole.
    synced: bool,
}

/// Everything that was accepted, for the answers to come and for the first words of the next stream.
#[derive(Debug, Default)]
pub(super) struct Session {
    addresses: Held,
    authorizations: Held,
    on_demand: Option<OnDemand>,
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

    /// A response was accepted whole for each type that the control plane sends unasked.
    pub(super) fn is_synced(&self) -> bool {
        (self.addresses.synced || self.on_demand.is_some()) && self.authorizations.synced
    }

    /// Whether resources of this type are asked for one by one.
    fn is_asked(&self, kind: Kind) -> bool {
        kind == Kind::Address && self.on_demand.is_some()
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
            let name = match &update {
                Update::Workload(workload) => Arc::clone(&workload.uid),
                Update::Policy(policy) => Arc::clone(&policy.key),
                _ => name.as_str().into(),
            };
            self.versions.insert(name, version.as_str().into());
        } else {
            return Err(ConvertError::TooMany);
        }
        Ok(update)
    }
}
