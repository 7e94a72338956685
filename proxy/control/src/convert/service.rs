//! Services.

use culvert_mesh::Service;
use culvert_mesh::service::{
    HealthPolicy, IpFamilies, LoadBalancer, Mode, NetworkCidr, Scope, Visibility, WeightedGateway,
};
use culvert_proto::istio::workload as raw;
use culvert_proto::istio::workload::{load_balancing, service};

use super::{ConvertError, ends, known};

pub(super) fn service(raw: raw::Service) -> Result<Service, ConvertError> {
    let key = ends::service_name("hostname", &raw.namespace, &raw.hostname)?;
    let (mut vips, mut cidr_vips) = (Vec::new(), Vec::new());
    for vip in &raw.addresses {
        let host = u32::try_from(vip.address.len() * 8).unwrap_or(u32::MAX);
        match vip.length {
            Some(length) if length != host => cidr_vips.push(NetworkCidr {
                network: vip.network.as_str().into(),
                cidr: ends::net("addresses", &vip.address, length)?,
            }),
            _ => vips.push(ends::address("addresses", vip)?),
        }
    }
    let ip_families = match known("ip_families", raw.ip_families)? {
        raw::IpFamilies::Automatic => None,
        raw::IpFamilies::Ipv4Only => Some(IpFamilies::Ipv4),
        raw::IpFamilies::Ipv6Only => Some(IpFamilies::Ipv6),
        raw::IpFamilies::Dual => Some(IpFamilies::Dual),
    };
    let weighted = raw.weighted_waypoints.into_iter().map(|raw| {
        const FIELD: &str = "weighted_waypoints";
        let destination = raw.destination.ok_or(ConvertError::NoDestination(FIELD))?;
        Ok(WeightedGateway { gateway: ends::gateway(FIELD, destination)?, weight: raw.weight })
    });
    let weighted_waypoints = weighted.collect::<Result<_, ConvertError>>()?;
    Ok(Service {
        name: raw.name.into(),
        key,
        vips,
        cidr_vips,
        ports: ends::ports("ports", &raw.ports)?,
        // Others, such as DNS names, are no identities of this mesh; without them less is accepted, not more.
        subject_alt_names: raw.subject_alt_names.iter().flat_map(|name| name.parse()).collect(),
        waypoint: raw.waypoint.map(|raw| ends::gateway("waypoint", raw)).transpose()?,
        weighted_waypoints,
        load_balancer: raw
            .load_balancing
            .map(|raw| load_balancer(&raw))
            .transpose()?
            .unwrap_or_default(),
        ip_families,
        canonical: raw.canonical,
        // It only hides a name. Without the record, its clients would leave the mesh in plaintext.
        visibility: match known("visibility", raw.visibility) {
            Ok(service::Visibility::Namespace) => Visibility::Namespace,
            Ok(service::Visibility::Public) | Err(_) => Visibility::Public,
        },
    })
}

fn load_balancer(raw: &raw::LoadBalancing) -> Result<LoadBalancer, ConvertError> {
    let preferences = raw.routing_preference.iter().map(|value| {
        const FIELD: &str = "load_balancing.routing_preference";
        Ok(match known(FIELD, *value)? {
            load_balancing::Scope::Region => Scope::Region,
            load_balancing::Scope::Zone => Scope::Zone,
            load_balancing::Scope::Subzone => Scope::Subzone,
            load_balancing::Scope::Node => Scope::Node,
            load_balancing::Scope::Cluster => Scope::Cluster,
            load_balancing::Scope::Network => Scope::Network,
            load_balancing::Scope::UnspecifiedScope => {
                return Err(ConvertError::Unknown { field: FIELD, value: *value });
            }
        })
    });
    Ok(LoadBalancer {
        preferences: preferences.collect::<Result<_, ConvertError>>()?,
        mode: match known("load_balancing.mode", raw.mode)? {
            load_balancing::Mode::UnspecifiedMode => Mode::Standard,
            load_balancing::Mode::Strict => Mode::Strict,
            load_balancing::Mode::Failover => Mode::Failover,
            load_balancing::Mode::Passthrough => Mode::Passthrough,
        },
        health_policy: match known("load_balancing.health_policy", raw.health_policy)? {
            load_balancing::HealthPolicy::OnlyHealthy => HealthPolicy::OnlyHealthy,
            load_balancing::HealthPolicy::AllowAll => HealthPolicy::AllowAll,
        },
    })
}
