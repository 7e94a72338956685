//! From the file as written to records: the references between them are followed, so that the
//! mesh is whole or refused.

mod policies;
mod references;

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use self::references::References;
use super::{
    Fault,
    raw::{self, PortMap},
};
use crate::{
    Identity,
    ports::Ports,
    service::{LoadBalancer, Service, WeightedGateway},
    snapshot::{Origin, Snapshot, Update},
    workload::{
        ApplicationTunnel, Gateway, HBONE_PORT, Health, Locality, Membership, NetworkMode,
        ServiceName, Workload,
    },
};

/// The mesh that the file describes.
pub(super) fn snapshot(mesh: raw::Mesh) -> Result<Snapshot, Fault> {
    let mut references = References::default();
    let mut endpoints = Vec::new();
    let mut workloads = Workloads::default();
    for (index, workload) in mesh.workloads.into_iter().enumerate() {
        workloads.add(index, workload, &mut references, &mut endpoints)?;
    }
    let mut services = Services::default();
    for (index, service) in mesh.services.into_iter().enumerate() {
        services.add(index, service, &mut references, &mut endpoints)?;
    }
    let policies = policies::policies(mesh.policies)?;
    for endpoint in endpoints {
        services.check(&endpoint)?;
        workloads.attach(endpoint)?;
    }
    let workloads = workloads.by_uid.into_values().map(Update::Workload);
    let services = services.all.into_iter().map(Update::Service);
    let updates = workloads.chain(services).chain(policies.into_iter().map(Update::Policy));
    let snapshot = Snapshot::default().apply(Origin::File, updates);
    references.check(&snapshot)?;
    Ok(snapshot)
}

pub(super) fn fault(line: u64, field: String, what: String) -> Fault {
    Fault { line, field, what }
}

/// A workload's part in a service, as either of the two declares it.
struct Declared {
    line: u64,
    field: String,
    uid: Arc<str>,
    service: ServiceName,
    ports: Ports,
    health: Health,
}

#[derive(Default)]
struct Workloads {
    by_uid: HashMap<Arc<str>, Workload>,
    /// Where the keys were first used.
    uids: HashMap<Arc<str>, usize>,
    addresses: HashMap<(Arc<str>, IpAddr), usize>,
    pods: HashMap<(Identity, Arc<str>, Arc<str>), usize>,
}

impl Workloads {
    fn add(
        &mut self,
        index: usize,
        raw: raw::Workload,
        references: &mut References,
        endpoints: &mut Vec<Declared>,
    ) -> Result<(), Fault> {
        let at = |field: &str| format!("workloads[{index}].{field}");
        let line = raw.uid.referenced.line();
        let uid = raw.uid.value.0.0;
        let (trust_domain, namespace) = (raw.trust_domain.0.0, raw.namespace.0.0);
        let identity = Identity::new(&trust_domain, &namespace, &raw.service_account.0.0)
            .map_err(|e| fault(line, at("serviceAccount"), format!("{e}; use shorter names")))?;
        if let Some(first) = self.uids.insert(Arc::clone(&uid), index) {
            let what = format!("uid `{uid}` is also that of workloads[{first}]; make it unique");
            return Err(fault(line, at("uid"), what));
        }
        let name = raw.name.0.0;
        let pod = (identity.clone(), Arc::clone(&name), Arc::clone(&raw.cluster_id));
        if let Some(first) = self.pods.insert(pod, index) {
            let what = format!(
                "name `{name}` is also that of workloads[{first}], in the same namespace, service \
                 account and cluster; make it unique"
            );
            return Err(fault(line, at("name"), what));
        }
        let mut addresses = Vec::with_capacity(raw.ips.len());
        for (i, ip) in raw.ips.into_iter().enumerate() {
            let (line, ip) = (ip.referenced.line(), ip.value.0);
            if raw.network_mode == NetworkMode::Standard {
                match self.addresses.entry((Arc::clone(&raw.network), ip)) {
                    Entry::Occupied(first) => {
                        let what = format!(
                            "{ip} is also an address of workloads[{}] in network {:?}; let one \
                             workload own it",
                            first.get(),
                            raw.network
                        );
                        return Err(fault(line, at(&format!("workloadIps[{i}]")), what));
                    }
                    Entry::Vacant(free) => free.insert(index),
                };
            }
            addresses.push(ip);
        }
        let tunnel_port = raw.application_tunnel.as_ref().and_then(|t| t.port.as_ref());
        if let Some(port) = tunnel_port.filter(|p| p.value.0.0 == HBONE_PORT) {
            let what =
                format!("port {HBONE_PORT} is the proxy's own; give the application another");
            return Err(fault(port.referenced.line(), at("applicationTunnel.port"), what));
        }
        let application_tunnel = raw.application_tunnel.map(|tunnel| ApplicationTunnel {
            protocol: tunnel.protocol,
            port: tunnel.port.map(|port| port.value.0.0),
        });
        for (service, ports) in raw.services.0 {
            let (line, service) = (service.referenced.line(), service.value.0);
            endpoints.push(Declared {
                line,
                field: at(&format!("services.{service}")),
                uid: Arc::clone(&uid),
                service,
                ports: port_map(ports),
                health: raw.status,
            });
        }
        let waypoint = raw.waypoint.map(|g| references.gateway(at("waypoint"), g));
        let network_gateway =
            raw.network_gateway.map(|g| references.gateway(at("networkGateway"), g));
        let policies = raw
            .authorization_policies
            .into_iter()
            .enumerate()
            .map(|(i, key)| references.policy(at(&format!("authorizationPolicies[{i}]")), key));
        let workload = Workload {
            uid: Arc::clone(&uid),
            name,
            identity,
            addresses,
            protocol: raw.protocol,
            network: raw.network,
            network_mode: raw.network_mode,
            node: raw.node,
            hostname: raw.hostname.map(|h| h.0.0).unwrap_or_default(),
            waypoint: waypoint.map(Box::new),
            network_gateway: network_gateway.map(Box::new),
            workload_name: raw.owner_name,
            workload_type: raw.owner_type,
            canonical_name: raw.canonical_name,
            canonical_revision: raw.canonical_revision,
            native_tunnel: raw.native_tunnel,
            application_tunnel,
            policies: policies.collect(),
            health: raw.status,
            cluster_id: raw.cluster_id,
            locality: Locality {
                region: raw.locality.region,
                zone: raw.locality.zone,
                subzone: raw.locality.subzone,
            },
            capacity: raw.capacity.0,
            services: Vec::new(),
        };
        self.by_uid.insert(uid, workload);
        Ok(())
    }

    /// Makes the workload an endpoint. Its record and the service's may both say so, but then the
    /// same.
    fn attach(&mut self, endpoint: Declared) -> Result<(), Fault> {
        let Declared { line, field, uid, service, ports, health } = endpoint;
        let Some(workload) = self.by_uid.get_mut(&uid) else {
            let what = format!("no workload has uid `{uid}`; add it or remove the endpoint");
            return Err(fault(line, field, what));
        };
        let health = (health != workload.health).then_some(health);
        let member = Membership { service, ports, health };
        match workload.membership(&member.service) {
            Some(other) if *other != member => {
                let service = &member.service;
                let what = format!(
                    "workload `{uid}` is an endpoint of {service} twice, with different ports or \
                     status; declare it in one place"
                );
                return Err(fault(line, field, what));
            }
            Some(_) => {}
            None => workload.services.push(member),
        }
        Ok(())
    }
}

#[derive(Default)]
struct Services {
    all: Vec<Service>,
    by_name: HashMap<ServiceName, usize>,
}

impl Services {
    fn add(
        &mut self,
        index: usize,
        raw: raw::Service,
        references: &mut References,
        endpoints: &mut Vec<Declared>,
    ) -> Result<(), Fault> {
        let at = |field: &str| format!("services[{index}].{field}");
        let line = raw.hostname.referenced.line();
        let key = ServiceName { namespace: raw.namespace.0.0, hostname: raw.hostname.value.0.0 };
        if let Some(first) = self.by_name.insert(key.clone(), index) {
            let what =
                format!("service {key} is also services[{first}]; make namespace/hostname unique");
            return Err(fault(line, at("hostname"), what));
        }
        for (entry, endpoint) in raw.endpoints.0 {
            endpoints.push(Declared {
                line: endpoint.workload_uid.referenced.line(),
                field: at(&format!("endpoints.{entry}")),
                uid: endpoint.workload_uid.value.0.0,
                service: key.clone(),
                ports: port_map(endpoint.port),
                health: endpoint.status,
            });
        }
        let weighted = raw.weighted_waypoints.into_iter().enumerate().map(|(i, w)| {
            let field = at(&format!("weightedWaypoints[{i}].destination"));
            WeightedGateway {
                gateway: references.gateway(field, w.destination),
                weight: w.weight.0,
            }
        });
        let weighted_waypoints = weighted.collect();
        let waypoint = raw.waypoint.map(|g| references.gateway(at("waypoint"), g));
        self.all.push(Service {
            name: raw.name.0.0,
            key,
            vips: raw.vips.into_iter().map(|vip| vip.0).collect(),
            cidr_vips: raw.cidr_vips.into_iter().map(Into::into).collect(),
            ports: raw.ports.0.into_iter().map(|(port, target)| (port.0.0, target.0.0)).collect(),
            subject_alt_names: raw.subject_alt_names.into_iter().map(|san| san.0).collect(),
            waypoint,
            weighted_waypoints,
            load_balancer: raw.load_balancer.map_or_else(LoadBalancer::default, |lb| {
                LoadBalancer {
                    preferences: lb.routing_preferences,
                    mode: lb.mode,
                    health_policy: lb.health_policy,
                }
            }),
            ip_families: raw.ip_families,
            canonical: raw.canonical,
            visibility: raw.visibility,
        });
        Ok(())
    }

    /// The service of the endpoint must be known.
    fn check(&self, endpoint: &Declared) -> Result<(), Fault> {
        let Declared { line, field, service, .. } = endpoint;
        if self.by_name.contains_key(service) {
            return Ok(());
        }
        let what = format!("no service is called {service}; add it or remove the reference");
        Err(fault(*line, field.clone(), what))
    }
}

fn port_map(ports: PortMap) -> Ports {
    ports.0.into_iter().map(|(port, target)| (port.0.0, target.0.0)).collect()
}

fn gateway(raw: raw::Gateway) -> Gateway {
    Gateway { destination: raw.destination.value.0, port: raw.hbone_mtls_port.0.0 }
}
