//! What several kinds share: metadata, labels and the selectors over them; addresses as they are written.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, de::Error as _};

/// Labels or annotations.
pub(crate) type Labels = BTreeMap<String, String>;

/// The metadata that matters; name and namespace are in the object's key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Meta {
    pub(crate) uid: String,
    pub(crate) labels: Labels,
    #[serde(deserialize_with = "annotations")]
    pub(crate) annotations: Labels,
    /// RFC 3339 in UTC, so that older ones sort first; empty if it is not known.
    pub(crate) creation_timestamp: String,
    pub(crate) owner_references: Vec<Owner>,
}

impl Meta {
    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.get(name).map(String::as_str)
    }

    /// The object that made this one.
    pub(crate) fn controller(&self) -> Option<&Owner> {
        self.owner_references.iter().find(|owner| owner.controller)
    }
}

/// Whom an object belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Owner {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) controller: bool,
}

/// Keeps those that are read: others, such as the last applied configuration, are long and change often.
fn annotations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Labels, D::Error> {
    let mut all = Labels::deserialize(deserializer)?;
    all.retain(|name, _| name.contains("istio.io/") && !name.contains("kubectl.kubernetes.io/"));
    Ok(all)
}

/// Which labels an object must have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct Selector {
    pub(crate) match_labels: Labels,
    pub(crate) match_expressions: Vec<Requirement>,
}

impl Selector {
    pub(crate) fn matches(&self, labels: &Labels) -> bool {
        selects(&self.match_labels, labels)
            && self.match_expressions.iter().all(|requirement| requirement.matches(labels))
    }
}

/// One requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "operator", deny_unknown_fields)]
pub(crate) enum Requirement {
    In { key: String, values: Vec<String> },
    NotIn { key: String, values: Vec<String> },
    Exists { key: String },
    DoesNotExist { key: String },
}

impl Requirement {
    fn matches(&self, labels: &Labels) -> bool {
        match self {
            Self::In { key, values } => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn { key, values } => {
                labels.get(key).is_none_or(|value| !values.contains(value))
            }
            Self::Exists { key } => labels.contains_key(key),
            Self::DoesNotExist { key } => !labels.contains_key(key),
        }
    }
}

/// Whether `labels` hold all of `wanted`.
pub(crate) fn selects(wanted: &Labels, labels: &Labels) -> bool {
    wanted.iter().all(|(name, value)| labels.get(name) == Some(value))
}

pub(super) fn ip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "" => Ok(None),
        text => parse_ip(text).map(Some).map_err(D::Error::custom),
    }
}

pub(super) fn parse_ip(text: &str) -> Result<IpAddr, String> {
    text.parse::<IpAddr>()
        .map(|ip| ip.to_canonical())
        .ok()
        .ok_or_else(|| format!("`{text}` is not an IP address; write one, such as 10.0.0.1"))
}

/// A range, or one address as the range that holds it alone.
pub(crate) fn parse_net(text: &str) -> Result<IpNet, String> {
    let net = text.parse::<IpNet>().ok().or_else(|| parse_ip(text).ok().map(IpNet::from));
    net.ok_or_else(|| format!("`{text}` is not a CIDR; write one, such as 10.0.0.0/8"))
}
