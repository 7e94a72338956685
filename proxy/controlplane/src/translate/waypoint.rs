//! Waypoints: gateways of the mesh's own class, and who has to be reached through which.

use std::collections::HashMap;

use culvert_proto::istio::workload::{
    GatewayAddress, NamespacedHostname, application_tunnel::Protocol, gateway_address::Destination,
};

use super::service::{host, hostname, is_of_waypoint};
use crate::{
    objects::{Allowed, AllowedFrom, Gateway, Labels, parse_net},
    world::{MeshConfig, World},
};

/// The field that faults of waypoints are reported for.
pub(super) const FIELD: &str = "metadata.labels[istio.io/use-waypoint]";
const USE: &str = "istio.io/use-waypoint";
const USE_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
const FOR: &str = "istio.io/waypoint-for";
const BINDING: &str = "ambient.istio.io/waypoint-inbound-binding";
const CLASS: &str = "istio-waypoint";
const HBONE_PORT: u16 = 15008;

/// What is sent through a waypoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// Connections to a service.
    Service,
    /// Connections to a workload by its own address.
    Workload,
}

/// A waypoint that can be reached.
#[derive(Clone, Debug)]
pub(super) struct Waypoint {
    pub(super) address: GatewayAddress,
    /// How its own workloads take what was tunnelled to them.
    pub(super) binding: Option<(Protocol, u16)>,
    takes: String,
    allowed: Allowed,
    namespace: String,
    /// The labels of the namespaces that may be selected are known where the waypoint is looked up.
    name: String,
}

pub(super) fn is_waypoint(gateway: &Gateway) -> bool {
    gateway.spec.gateway_class_name == CLASS
}

/// Every waypoint that has an address, by namespace and name.
pub(super) fn all(world: &World, config: &MeshConfig) -> HashMap<(String, String), Waypoint> {
    let gateways = world.spaces.iter().flat_map(|(namespace, space)| {
        space.gateways.iter().map(move |(name, gateway)| (namespace, space, name, gateway))
    });
    let waypoints = gateways.filter(|(.., gateway)| is_waypoint(gateway));
    let waypoints = waypoints.filter_map(|(namespace, space, name, gateway)| {
        let made = || space.services.contains_key(name);
        let address = address(namespace, gateway, config).or_else(|| {
            // Without a controller nobody writes the status; the service it would be made from is as good.
            made().then(|| named(namespace, hostname(namespace, name, config)))
        })?;
        let binding = gateway.metadata.annotation(BINDING).and_then(binding);
        let takes = gateway.metadata.label(FOR).unwrap_or("service").to_owned();
        let allowed = allowed(gateway, binding);
        let (namespace, name) = (namespace.clone(), name.clone());
        let waypoint = Waypoint {
            address,
            binding,
            takes,
            allowed,
            namespace: namespace.clone(),
            name: name.clone(),
        };
        Some(((namespace, name), waypoint))
    });
    waypoints.collect()
}

/// A name is preferred: addresses may be given to something else.
fn address(namespace: &str, gateway: &Gateway, config: &MeshConfig) -> Option<GatewayAddress> {
    let addresses = &gateway.status.addresses;
    let name = addresses.iter().find(|address| address.kind == "Hostname");
    if let Some(name) = name {
        return Some(named(namespace, name.value.clone()));
    }
    let mut ips = addresses.iter().filter_map(|address| parse_net(&address.value).ok());
    let destination = Destination::Address(host(config, ips.next()?.addr()));
    Some(GatewayAddress { destination: Some(destination), hbone_mtls_port: HBONE_PORT.into() })
}

fn named(namespace: &str, hostname: String) -> GatewayAddress {
    let name = NamespacedHostname { namespace: namespace.to_owned(), hostname };
    GatewayAddress {
        destination: Some(Destination::Hostname(name)),
        hbone_mtls_port: HBONE_PORT.into(),
    }
}

/// `PROTOCOL` or `PROTOCOL/port`.
fn binding(text: &str) -> Option<(Protocol, u16)> {
    let (protocol, port) = match text.split_once('/') {
        Some((protocol, port)) => (protocol, port.parse().ok()?),
        None => (text, 0),
    };
    match protocol {
        "NONE" => Some((Protocol::None, port)),
        "PROXY" => Some((Protocol::Proxy, port)),
        _ => None,
    }
}

fn allowed(gateway: &Gateway, binding: Option<(Protocol, u16)>) -> Allowed {
    let listeners = &gateway.spec.listeners;
    let bound = listeners.iter().find(|listener| match binding {
        Some((_, port)) if port != 0 => listener.port == port,
        Some((Protocol::Proxy, _)) => listener.protocol == "istio.io/PROXY",
        _ => false,
    });
    let hbone = || {
        listeners
            .iter()
            .find(|listener| listener.protocol == "HBONE" && listener.port == HBONE_PORT)
    };
    let listener = bound.or_else(hbone);
    listener.map(|listener| listener.allowed_routes.namespaces.clone()).unwrap_or_default()
}

impl Waypoint {
    fn admits(&self, namespace: &str, labels: &Labels) -> bool {
        match self.allowed.from {
            AllowedFrom::All => true,
            AllowedFrom::Same => self.namespace == namespace,
            AllowedFrom::Selector => self.allowed.selector.matches(labels),
            AllowedFrom::None => false,
        }
    }

    fn carries(&self, traffic: Traffic) -> bool {
        match self.takes.as_str() {
            "all" => true,
            "service" => traffic == Traffic::Service,
            "workload" => traffic == Traffic::Workload,
            _ => false,
        }
    }
}

/// The waypoint for something with `labels` in a namespace with `space_labels`. An error says why the one that is asked
/// for cannot be used.
pub(super) fn find<'a>(
    waypoints: &'a HashMap<(String, String), Waypoint>,
    namespace: &str,
    space_labels: &Labels,
    labels: &Labels,
    traffic: Traffic,
) -> Result<Option<&'a Waypoint>, String> {
    if is_of_waypoint(labels) {
        return Ok(None);
    }
    // Whatever the object itself says counts, even "none" and what cannot be.
    let (by, own) = if labels.contains_key(USE) { (labels, true) } else { (space_labels, false) };
    let name = match by.get(USE).map(String::as_str) {
        None | Some("none") => return Ok(None),
        Some(name) => name,
    };
    let of = by.get(USE_NAMESPACE).map_or(namespace, String::as_str);
    let Some(waypoint) = waypoints.get(&(of.to_owned(), name.to_owned())) else {
        return Err(format!(
            "waypoint {of}/{name} is not there or has no address, so traffic does not pass one; add it"
        ));
    };
    if !waypoint.admits(namespace, space_labels) {
        let (of, name) = (&waypoint.namespace, &waypoint.name);
        return Err(format!(
            "waypoint {of}/{name} does not admit namespace {namespace}, so traffic does not pass it; add the namespace to its allowedRoutes"
        ));
    }
    match waypoint.carries(traffic) {
        true => Ok(Some(waypoint)),
        // A namespace's label is for all that is in it, and each waypoint for one of both.
        false if !own => Ok(None),
        false => {
            let takes = &waypoint.takes;
            Err(format!(
                "waypoint {of}/{name} is for {takes} traffic only, so this does not pass it; label it {FOR}: all"
            ))
        }
    }
}
