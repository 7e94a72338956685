//! A resource as it goes over the wire: encoded once, shared by every connection.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use bytes::Bytes;
use culvert_proto::istio::{
    security::Authorization,
    workload::{Address, PortList, Service, Workload, address},
};
use prost::Message as _;
use sha2::{Digest as _, Sha256};

/// The types of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Type {
    /// Workloads and services.
    Address,
    /// Policies.
    Authorization,
}

impl Type {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Address, Self::Authorization];

    /// The type of this URL.
    pub(crate) fn of_url(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.url() == url)
    }

    /// The URL by which requests and responses call it.
    pub(crate) fn url(self) -> &'static str {
        match self {
            Self::Address => culvert_proto::ADDRESS_TYPE,
            Self::Authorization => culvert_proto::AUTHORIZATION_TYPE,
        }
    }
}

/// One resource. Two of equal version are equal.
#[derive(Clone, Debug)]
pub(crate) struct Resource {
    /// Its type.
    pub(crate) kind: Type,
    /// Its name: a workload's uid, a service's `namespace/hostname`, a policy's `namespace/name`.
    pub(crate) name: Arc<str>,
    /// A digest of its contents, so that a client's copy is known to be right across restarts of the server.
    pub(crate) version: Arc<str>,
    /// The encoded message.
    pub(crate) body: Bytes,
    /// `network/address` of each of its addresses.
    pub(crate) aliases: Vec<Arc<str>>,
    /// The node that a workload runs on; empty for others.
    pub(crate) node: Arc<str>,
    /// The services that a workload is an endpoint of.
    pub(crate) services: Vec<Arc<str>>,
}

impl Resource {
    pub(crate) fn workload(mut workload: Workload) -> Self {
        // A hash map encodes in any order; the version must not depend on it.
        let services =
            std::mem::take(&mut workload.services).into_iter().collect::<BTreeMap<_, _>>();
        let mut digest = Sha256::new();
        digest.update(workload.encode_to_vec());
        for (name, ports) in &services {
            digest.update(name);
            digest.update(ports.encode_to_vec());
        }
        let host_network = workload.network_mode != 0;
        let aliases = if host_network {
            Vec::new()
        } else {
            workload.addresses.iter().filter_map(|ip| alias(&workload.network, ip)).collect()
        };
        let resource = Self {
            kind: Type::Address,
            name: workload.uid.as_str().into(),
            version: version(digest),
            body: Bytes::new(),
            aliases,
            node: workload.node.as_str().into(),
            services: services.keys().map(|name| name.as_str().into()).collect(),
        };
        workload.services =
            services.into_iter().collect::<std::collections::HashMap<String, PortList>>();
        let address = Address { r#type: Some(address::Type::Workload(workload)) };
        Self { body: address.encode_to_vec().into(), ..resource }
    }

    pub(crate) fn service(service: Service) -> Self {
        let name = format!("{}/{}", service.namespace, service.hostname);
        let hosts = service.addresses.iter().filter(|address| address.length.is_none());
        let aliases = hosts.filter_map(|host| alias(&host.network, &host.address)).collect();
        let address = Address { r#type: Some(address::Type::Service(service)) };
        Self::of(Type::Address, &name, address.encode_to_vec(), aliases)
    }

    pub(crate) fn authorization(policy: &Authorization) -> Self {
        let name = format!("{}/{}", policy.namespace, policy.name);
        Self::of(Type::Authorization, &name, policy.encode_to_vec(), Vec::new())
    }

    fn of(kind: Type, name: &str, body: Vec<u8>, aliases: Vec<Arc<str>>) -> Self {
        Self {
            kind,
            name: name.into(),
            version: version(Sha256::new_with_prefix(&body)),
            body: body.into(),
            aliases,
            node: "".into(),
            services: Vec::new(),
        }
    }
}

fn version(digest: Sha256) -> Arc<str> {
    let digest: [u8; 32] = digest.finalize().into();
    let (first, _) = digest.split_at(16);
    let first = <[u8; 16]>::try_from(first).unwrap_or_default();
    format!("{:032x}", u128::from_be_bytes(first)).into()
}

fn alias(network: &str, address: &[u8]) -> Option<Arc<str>> {
    let ip = <[u8; 4]>::try_from(address)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(address).map(IpAddr::from))
        .ok()?;
    Some(format!("{network}/{ip}").into())
}

#[cfg(test)]
mod tests {
    use culvert_proto::istio::workload::Port;

    use super::*;

    #[test]
    fn a_version_does_not_depend_on_the_order_of_a_map() {
        let versions = (0..64).map(|_| {
            let port = |service_port| PortList {
                ports: vec![Port { service_port, target_port: 1, app_protocol: 0 }],
            };
            let services = (0..8).map(|n| (format!("ns/{n}"), port(n))).collect();
            let workload = Workload { uid: "u".to_owned(), services, ..Workload::default() };
            Resource::workload(workload).version
        });
        let first = Resource::workload(Workload { uid: "u".to_owned(), ..Workload::default() });
        let mut all: Vec<_> = versions.collect();
        all.dedup();
        assert_eq!(all.len(), 1);
        assert_ne!(all[0], first.version);
    }

    #[test]
    fn a_shared_address_is_no_alias() {
        let workload = Workload {
            uid: "u".to_owned(),
            addresses: vec![vec![10, 0, 0, 1]],
            network_mode: 1,
            ..Workload::default()
        };
        assert!(Resource::workload(workload.clone()).aliases.is_empty());
        let own = Resource::workload(Workload { network_mode: 0, ..workload });
        assert_eq!(own.aliases, ["/10.0.0.1".into()]);
    }
}
