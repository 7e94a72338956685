//! The objects that describe a mesh, as Kubernetes and Istio write them, reduced to what a node has to be told.
//!
//! An [`Object`] holds the fields that resources are made of and nothing else, so that two versions which differ in
//! nothing that matters are equal. What the fields mean together is decided in `translate`.

mod core;
mod fields;
mod networking;
mod security;

#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use serde::de::DeserializeOwned;
use serde_json::Value;

pub(crate) use self::core::{EndpointSlice, IntOrName, Namespace, Node, Pod, Service};
pub(crate) use self::fields::{Labels, Meta, Owner, parse_net, selects};
pub(crate) use self::networking::{
    Allowed, AllowedFrom, Endpoint, Gateway, Resolution, ServiceEntry, WorkloadEntry,
};
pub(crate) use self::security::{
    Authorization, AuthorizationAction, Mode, Net, Operation, PeerAuthentication, Port, Rule,
    Source, When, parse_port,
};

/// The kinds of objects that are read; others are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Namespace,
    Node,
    Pod,
    Service,
    EndpointSlice,
    ServiceEntry,
    WorkloadEntry,
    Gateway,
    AuthorizationPolicy,
    PeerAuthentication,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 10] = [
        Self::Namespace,
        Self::Node,
        Self::Pod,
        Self::Service,
        Self::EndpointSlice,
        Self::ServiceEntry,
        Self::WorkloadEntry,
        Self::Gateway,
        Self::AuthorizationPolicy,
        Self::PeerAuthentication,
    ];

    /// The kind as it is written.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::ServiceEntry => "ServiceEntry",
            Self::WorkloadEntry => "WorkloadEntry",
            Self::Gateway => "Gateway",
            Self::AuthorizationPolicy => "AuthorizationPolicy",
            Self::PeerAuthentication => "PeerAuthentication",
        }
    }

    /// Whether the mesh is less safe without such an object.
    pub(crate) fn guards(self) -> bool {
        matches!(self, Self::AuthorizationPolicy | Self::PeerAuthentication)
    }

    /// The kind as paths of the Kubernetes API have it.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Namespace => "namespaces",
            Self::Node => "nodes",
            Self::Pod => "pods",
            Self::Service => "services",
            Self::EndpointSlice => "endpointslices",
            Self::ServiceEntry => "serviceentries",
            Self::WorkloadEntry => "workloadentries",
            Self::Gateway => "gateways",
            Self::AuthorizationPolicy => "authorizationpolicies",
            Self::PeerAuthentication => "peerauthentications",
        }
    }

    /// The versions that it is understood in, best first.
    pub(crate) fn versions(self) -> &'static [&'static str] {
        if self.is_custom() { &["v1", "v1beta1"] } else { &["v1"] }
    }

    /// Whether a cluster may know nothing of it.
    pub(crate) fn is_custom(self) -> bool {
        !matches!(self.group(), "" | "discovery.k8s.io")
    }

    pub(crate) fn group(self) -> &'static str {
        match self {
            Self::Namespace | Self::Node | Self::Pod | Self::Service => "",
            Self::EndpointSlice => "discovery.k8s.io",
            Self::ServiceEntry | Self::WorkloadEntry => "networking.istio.io",
            Self::Gateway => "gateway.networking.k8s.io",
            Self::AuthorizationPolicy | Self::PeerAuthentication => "security.istio.io",
        }
    }

    pub(crate) fn is_namespaced(self) -> bool {
        !matches!(self, Self::Namespace | Self::Node)
    }

    /// The kind that an object with these two fields is of.
    fn of(api_version: &str, kind: &str) -> Option<Self> {
        let group = api_version.rsplit_once('/').map_or("", |(group, _)| group);
        Self::ALL.into_iter().find(|known| known.name() == kind && known.group() == group)
    }
}

/// Which object: of a kind, one name in a namespace. `Display` gives `Kind namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    /// Its kind.
    pub(crate) kind: Kind,
    /// Its namespace; empty for kinds that have none.
    pub(crate) namespace: String,
    /// Its name.
    pub(crate) name: String,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name } = self;
        match namespace.as_str() {
            "" => write!(f, "{} {name}", kind.name()),
            _ => write!(f, "{} {namespace}/{name}", kind.name()),
        }
    }
}

/// One object, read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Object {
    Namespace(Namespace),
    Node(Node),
    Pod(Arc<Pod>),
    Service(Box<Service>),
    EndpointSlice(Box<EndpointSlice>),
    ServiceEntry(Box<ServiceEntry>),
    WorkloadEntry(Box<WorkloadEntry>),
    Gateway(Box<Gateway>),
    AuthorizationPolicy(Box<Authorization>),
    PeerAuthentication(Box<PeerAuthentication>),
}

impl Object {
    /// What is put in the place of one that guards its namespace and cannot be understood: it lets nothing through.
    pub(crate) fn closed(kind: Kind) -> Option<Self> {
        match kind {
            Kind::AuthorizationPolicy => {
                Some(Self::AuthorizationPolicy(Box::new(Authorization::closed())))
            }
            Kind::PeerAuthentication => {
                Some(Self::PeerAuthentication(Box::new(PeerAuthentication::closed())))
            }
            _ => None,
        }
    }
}

/// Why a value is not an object that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Which object it would have been, as far as that can be read.
    pub(crate) key: Option<Key>,
    /// The field at fault; empty for the object as a whole.
    pub(crate) field: String,
    /// `what is wrong; remedy`.
    pub(crate) what: String,
}

/// Reads one object; `None` for kinds that mean nothing to the mesh.
pub(crate) fn read(mut value: Value) -> Result<Option<(Key, Object)>, Fault> {
    let of = |field: &str| value.get(field).and_then(Value::as_str).unwrap_or_default();
    let Some(kind) = Kind::of(of("apiVersion"), of("kind")) else {
        return if of("kind").is_empty() || of("apiVersion").is_empty() {
            Err(Fault {
                key: None,
                field: String::new(),
                what: "no apiVersion and kind; write both, or a mesh document with workloads, services or policies"
                    .to_owned(),
            })
        } else {
            Ok(None)
        };
    };
    drop_nulls(&mut value);
    let key = key(kind, &value)?;
    let object = match kind {
        Kind::Namespace => typed(&key, value).map(Object::Namespace),
        Kind::Node => typed(&key, value).map(Object::Node),
        Kind::Pod => typed(&key, value).map(|pod| Object::Pod(Arc::new(pod))),
        Kind::Service => typed(&key, value).map(Object::Service),
        Kind::EndpointSlice => typed(&key, value).map(Object::EndpointSlice),
        Kind::ServiceEntry => typed(&key, value).map(Object::ServiceEntry),
        Kind::WorkloadEntry => typed(&key, value).map(Object::WorkloadEntry),
        Kind::Gateway => typed(&key, value).map(Object::Gateway),
        Kind::AuthorizationPolicy => typed(&key, value).map(Object::AuthorizationPolicy),
        Kind::PeerAuthentication => typed(&key, value).map(Object::PeerAuthentication),
    }?;
    Ok(Some((key, object)))
}

/// Kubernetes writes `null` for what is not set.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Names become parts of identities and of resources' names, so they hold what a name may hold and nothing else.
fn key(kind: Kind, value: &Value) -> Result<Key, Fault> {
    let text = |field: &str| {
        value.pointer(&format!("/metadata/{field}")).and_then(Value::as_str).map(str::to_owned)
    };
    let fault = |field: &str, what: &str| Fault {
        key: None,
        field: format!("metadata.{field}"),
        what: what.to_owned(),
    };
    let is_name = |text: &str| {
        (1..=253).contains(&text.len())
            && text.bytes().all(|c| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
            && !text.starts_with('.')
    };
    let name = text("name").ok_or_else(|| fault("name", "no name; write one"))?;
    let namespace = if kind.is_namespaced() {
        text("namespace").unwrap_or_else(|| "default".to_owned())
    } else {
        String::new()
    };
    if !is_name(&name) {
        return Err(fault("name", "not a name; use lower-case letters, digits, `-` and `.`"));
    }
    if kind.is_namespaced() && !is_name(&namespace) {
        return Err(fault("namespace", "not a name; use lower-case letters, digits, `-` and `.`"));
    }
    Ok(Key { kind, namespace, name })
}

fn typed<T: DeserializeOwned>(key: &Key, value: Value) -> Result<T, Fault> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        let what = error.into_inner().to_string();
        Fault {
            key: Some(key.clone()),
            field: if field == "." { String::new() } else { field },
            what: if what.contains("; ") { what } else { format!("{what}; correct it") },
        }
    })
}
