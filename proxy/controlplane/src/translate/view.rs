//! What the workloads of one namespace share: the services, policies and waypoint that each of them is held against.

use std::collections::{BTreeMap, HashMap};

use culvert_proto::istio::workload::{Port, PortList};

use super::{
    authentication::Authentications,
    fault, service,
    waypoint::{self, Traffic, Waypoint},
};
use crate::{
    objects::{Fault, IntOrName, Kind, Labels, Pod, selects},
    world::{MeshConfig, Space, World},
};

/// One namespace, prepared for the translation of its workloads.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) labels: Labels,
    services: Vec<ServicePorts>,
    /// Services by one of the labels that they select; no service selects everything.
    by_label: HashMap<(String, String), Vec<usize>>,
    /// Services without a selector whose slices name a pod.
    by_pod: HashMap<String, Vec<usize>>,
    /// Policies that select workloads, with the labels they select; in order of their keys.
    policies: Vec<(Labels, String)>,
    pub(super) authentications: Authentications,
    pub(super) waypoints: HashMap<(String, String), Waypoint>,
    pub(super) faults: Vec<Fault>,
}

/// A service as its endpoints see it.
#[derive(Debug)]
pub(super) struct ServicePorts {
    /// `namespace/hostname`.
    pub(super) name: String,
    pub(super) selector: Labels,
    pub(super) ports: Vec<TargetPort>,
    pub(super) source: Source,
}

/// A port of a service.
#[derive(Debug)]
pub(super) struct TargetPort {
    pub(super) name: String,
    pub(super) port: u16,
    pub(super) target: IntOrName,
}

/// What a service is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Service,
    ServiceEntry,
}

impl View {
    pub(super) fn new(name: &str, space: &Space, world: &World, config: &MeshConfig) -> Self {
        let labels = space.meta.as_ref().map(|meta| meta.metadata.labels.clone());
        let mut view = Self { labels: labels.unwrap_or_default(), ..Self::default() };
        view.services = service::ports(name, space, config);
        for (index, service) in view.services.iter().enumerate() {
            if let Some((label, value)) = service.selector.iter().next() {
                view.by_label.entry((label.clone(), value.clone())).or_default().push(index);
            }
        }
        view.index_slices(name, space, config);
        let root = world.spaces.get(&config.root_namespace);
        let own = (name, Some(space));
        let spaces = if name == config.root_namespace {
            vec![own]
        } else {
            vec![own, (config.root_namespace.as_str(), root)]
        };
        for (namespace, space) in &spaces {
            for (policy, object) in space.iter().flat_map(|space| &space.policies) {
                let translated = super::policy::translate(namespace, policy, object, config);
                if let (Some(selector), Some(_)) = (&object.spec.selector, translated.policy) {
                    let key = format!("{namespace}/{policy}");
                    view.policies.push((selector.match_labels.clone(), key));
                }
            }
        }
        view.policies.sort_by(|(_, a), (_, b)| a.cmp(b));
        view.authentications = Authentications::new(name, space, root, config);
        view.waypoints = waypoint::all(world, config);
        for (gateway, object) in &space.gateways {
            if waypoint::is_waypoint(object)
                && !view.waypoints.contains_key(&(name.to_owned(), gateway.clone()))
            {
                let what =
                    "the waypoint has no address; write status.addresses, or a Service of its name";
                view.faults.push(fault(Kind::Gateway, name, gateway, "status.addresses", what));
            }
        }
        view
    }

    fn index_slices(&mut self, namespace: &str, space: &Space, config: &MeshConfig) {
        for slice in space.slices.values() {
            let Some(service) = slice.metadata.label(service::SLICE_OF) else { continue };
            let name = service::name(namespace, service, config);
            let is_of = |s: &ServicePorts| s.name == name && s.selector.is_empty();
            let Some(index) = self.services.iter().position(is_of) else { continue };
            for endpoint in &slice.endpoints {
                let pod = endpoint.target_ref.as_ref().filter(|target| target.kind == "Pod");
                let of_pod = pod.map(|pod| self.by_pod.entry(pod.name.clone()).or_default());
                if let Some(services) = of_pod
                    && !services.contains(&index)
                {
                    services.push(index);
                }
            }
        }
    }

    /// The services that select `labels`.
    pub(super) fn selecting<'a>(
        &'a self,
        labels: &'a Labels,
    ) -> impl Iterator<Item = &'a ServicePorts> + 'a {
        let candidates = labels.iter().filter_map(|(name, value)| {
            // The key is owned because tuples of borrowed texts do not look up owned ones.
            self.by_label.get(&(name.clone(), value.clone()))
        });
        candidates
            .flatten()
            .filter_map(|&index| self.services.get(index))
            .filter(move |service| selects(&service.selector, labels))
    }

    /// The services that `pod` is an endpoint of, with its ports.
    pub(super) fn services_of_pod(&self, name: &str, pod: &Pod) -> HashMap<String, PortList> {
        let named = self.by_pod.get(name).into_iter().flatten();
        let named = named.filter_map(|&index| self.services.get(index));
        let services = self.selecting(&pod.metadata.labels).chain(named);
        let ports = |service: &ServicePorts| {
            let ports = service.ports.iter().filter_map(|port| {
                let target = match &port.target {
                    IntOrName::Number(number) => *number,
                    IntOrName::Name(name) => pod.port(name)?,
                };
                Some(wire_port(port.port, target))
            });
            PortList { ports: ports.collect() }
        };
        services.map(|service| (service.name.clone(), ports(service))).collect()
    }

    /// The services that an entry with `labels` is an endpoint of; its own `ports` are by the services' names for them.
    pub(super) fn services_of_entry(
        &self,
        labels: &Labels,
        ports: &BTreeMap<String, u16>,
    ) -> HashMap<String, PortList> {
        let services = self.selecting(labels);
        services.map(|service| (service.name.clone(), entry_ports(service, ports))).collect()
    }

    pub(super) fn service(&self, name: &str) -> Option<&ServicePorts> {
        self.services.iter().find(|service| service.name == name)
    }

    /// The policies that a workload with `labels` has to name.
    pub(super) fn policies_of(&self, labels: &Labels) -> Vec<String> {
        let selecting = self.policies.iter().filter(|(wanted, _)| selects(wanted, labels));
        let mut keys: Vec<_> = selecting.map(|(_, key)| key.clone()).collect();
        keys.extend(self.authentications.keys_for(labels));
        keys
    }

    /// The waypoint that something with `labels` in this namespace has to be reached through.
    pub(super) fn waypoint(
        &self,
        namespace: &str,
        labels: &Labels,
        traffic: Traffic,
    ) -> Result<Option<&Waypoint>, String> {
        waypoint::find(&self.waypoints, namespace, &self.labels, labels, traffic)
    }
}

/// A Kubernetes service names the entry's port by its target, a service entry by the name of its own port.
pub(super) fn entry_ports(service: &ServicePorts, ports: &BTreeMap<String, u16>) -> PortList {
    let ports = service.ports.iter().filter_map(|port| {
        let target = match (&port.target, service.source) {
            (IntOrName::Name(name), _) => *ports.get(name)?,
            (IntOrName::Number(number), Source::Service) => *number,
            (IntOrName::Number(number), Source::ServiceEntry) => {
                ports.get(&port.name).copied().unwrap_or(*number)
            }
        };
        Some(wire_port(port.port, target))
    });
    PortList { ports: ports.collect() }
}

fn wire_port(service_port: u16, target_port: u16) -> Port {
    Port { service_port: service_port.into(), target_port: target_port.into(), app_protocol: 0 }
}
