//! Label sets of the traffic metrics. Contract: names, order and values are those that Istio's dashboards query.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use culvert_mesh::Identity;
use culvert_mesh::reason::ResponseFlag;
use culvert_mesh::service::Service;
use prometheus_client::encoding::{EncodeLabelKey as _, EncodeLabelSet, LabelSetEncoder};

use crate::claims::{Claims, Shown};
use crate::flow::{Direction, Flow, Party, SecurityPolicy};

/// The value of what is not known.
const UNKNOWN: &str = "unknown";

/// The label set of one flow. Bounded by pairs of workload kinds, not by connections: it holds no address and no port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Traffic {
    direction: Direction,
    source: Side,
    service: Names,
    destination: Side,
    pub(crate) flag: ResponseFlag,
    security: SecurityPolicy,
}

/// One end of a flow. Empty texts are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Side {
    workload: Arc<str>,
    canonical_name: Arc<str>,
    canonical_revision: Arc<str>,
    namespace: Arc<str>,
    principal: Option<Identity>,
    cluster: Arc<str>,
    /// Region and zone, if anything is known of it.
    locality: Option<(Arc<str>, Arc<str>)>,
}

/// A service's names. Empty texts are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Names {
    hostname: Arc<str>,
    namespace: Arc<str>,
    name: Arc<str>,
}

impl Traffic {
    /// The labels of `flow` while nothing has gone wrong.
    pub(crate) fn of(direction: Direction, flow: &Flow, shown: &Shown) -> Self {
        let mut destination = Side::of(&flow.destination, shown);
        // Whoever the mesh says is there, also where plaintext proves nothing; a source has to prove itself.
        if let Some(workload) = &flow.destination.workload {
            destination.principal = Some(workload.identity.clone());
        }
        Self {
            direction,
            source: Side::of(&flow.source, shown),
            service: flow.service.as_deref().map(Names::of).unwrap_or_default(),
            destination,
            flag: ResponseFlag::None,
            security: flow.security,
        }
    }
}

impl Side {
    fn of(party: &Party, shown: &Shown) -> Self {
        let principal = party.identity.clone();
        let Some(workload) = &party.workload else {
            let claims = party.claims.as_ref().filter(|claims| shown.admits(claims));
            return claims.map_or_else(Self::default, |claims| Self::claimed(claims)).by(principal);
        };
        Self {
            workload: Arc::clone(&workload.workload_name),
            canonical_name: Arc::clone(&workload.canonical_name),
            canonical_revision: Arc::clone(&workload.canonical_revision),
            namespace: workload.identity.namespace().into(),
            principal,
            cluster: Arc::clone(&workload.cluster_id),
            locality: Some((
                Arc::clone(&workload.locality.region),
                Arc::clone(&workload.locality.zone),
            )),
        }
    }

    fn claimed(claims: &Claims) -> Self {
        Self {
            workload: Arc::clone(&claims.workload),
            canonical_name: Arc::clone(&claims.canonical_name),
            canonical_revision: Arc::clone(&claims.canonical_revision),
            namespace: Arc::clone(&claims.namespace),
            principal: None,
            cluster: Arc::clone(&claims.cluster),
            locality: claims.locality.clone(),
        }
    }

    fn by(self, principal: Option<Identity>) -> Self {
        Self { principal, ..self }
    }

    fn principal(&self) -> &str {
        self.principal.as_ref().map_or("", Identity::uri)
    }

    fn region(&self) -> &str {
        self.locality.as_ref().map_or("", |(region, _)| region)
    }

    fn zone(&self) -> &str {
        self.locality.as_ref().map_or("", |(_, zone)| zone)
    }
}

impl Names {
    fn of(service: &Service) -> Self {
        Self {
            hostname: Arc::clone(&service.key.hostname),
            namespace: Arc::clone(&service.key.namespace),
            name: Arc::clone(&service.name),
        }
    }
}

// Contract.
impl EncodeLabelSet for Traffic {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let Self { direction, source, service, destination, flag, security } = self;
        let security = match security {
            SecurityPolicy::MutualTls => "mutual_tls",
            SecurityPolicy::Unknown => UNKNOWN,
        };
        let labels: [(&str, &str); 23] = [
            ("reporter", direction.reporter()),
            ("source_workload", &source.workload),
            ("source_canonical_service", &source.canonical_name),
            ("source_canonical_revision", &source.canonical_revision),
            ("source_workload_namespace", &source.namespace),
            ("source_principal", source.principal()),
            ("source_app", &source.canonical_name),
            ("source_version", &source.canonical_revision),
            ("source_cluster", &source.cluster),
            ("destination_service", &service.hostname),
            ("destination_service_namespace", &service.namespace),
            ("destination_service_name", &service.name),
            ("destination_workload", &destination.workload),
            ("destination_canonical_service", &destination.canonical_name),
            ("destination_canonical_revision", &destination.canonical_revision),
            ("destination_workload_namespace", &destination.namespace),
            ("destination_principal", destination.principal()),
            ("destination_app", &destination.canonical_name),
            ("destination_version", &destination.canonical_revision),
            ("destination_cluster", &destination.cluster),
            ("request_protocol", "tcp"),
            ("response_flags", flag.as_str()),
            ("connection_security_policy", security),
        ];
        labels.into_iter().try_for_each(|(name, value)| label(encoder, name, value))?;
        if source.locality.is_none() && destination.locality.is_none() {
            return Ok(());
        }
        let locality = [
            ("source_region", source.region()),
            ("source_zone", source.zone()),
            ("destination_region", destination.region()),
            ("destination_zone", destination.zone()),
        ];
        locality.into_iter().try_for_each(|(name, value)| label(encoder, name, value))
    }
}

/// Writes one label, its value escaped as the text format asks; the library writes values as they are.
pub(super) fn label(encoder: &mut LabelSetEncoder<'_>, name: &str, value: &str) -> fmt::Result {
    let mut label = encoder.encode_label();
    let mut key = label.encode_label_key()?;
    name.encode(&mut key)?;
    let mut text = key.encode_label_value()?;
    for c in if value.is_empty() { UNKNOWN } else { value }.chars() {
        match c {
            '\\' => text.write_str("\\\\")?,
            '"' => text.write_str("\\\"")?,
            '\n' => text.write_str("\\n")?,
            c => text.write_char(c)?,
        }
    }
    text.finish()
}
