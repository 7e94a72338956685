//! Addresses, ports and the names of what they belong to: the parts that all records share.

use std::net::IpAddr;
use std::sync::Arc;

use culvert_mesh::Ports;
use culvert_mesh::workload::{Destination, Gateway, HBONE_PORT, NetworkAddress, ServiceName};
use culvert_proto::istio::workload as raw;
use culvert_proto::istio::workload::{GatewayAddress, NamespacedHostname, Port, gateway_address};
use ipnet::IpNet;

use super::ConvertError;

/// IPv4-mapped addresses are IPv4 in all records.
pub(super) fn ip(field: &'static str, bytes: &[u8]) -> Result<IpAddr, ConvertError> {
    let four = || <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let sixteen = || <[u8; 16]>::try_from(bytes).map(|bytes| IpAddr::from(bytes).to_canonical());
    let wrong = ConvertError::AddressLength { field, length: bytes.len() };
    four().or_else(|_| sixteen()).ok().ok_or(wrong)
}

/// A range; without its host bits.
pub(super) fn net(field: &'static str, bytes: &[u8], length: u32) -> Result<IpNet, ConvertError> {
    let wrong = || ConvertError::PrefixLength { field, length };
    let ip = ip(field, bytes)?;
    // The prefix of a mapped address counts the 96 bits that mark it as such.
    let mapped = if ip.is_ipv4() && bytes.len() == 16 { 96 } else { 0 };
    let bits = length.checked_sub(mapped).and_then(|bits| u8::try_from(bits).ok());
    let net = IpNet::new(ip, bits.ok_or_else(wrong)?).ok().ok_or_else(wrong)?;
    Ok(net.trunc())
}

pub(super) fn address(
    field: &'static str,
    address: &raw::NetworkAddress,
) -> Result<NetworkAddress, ConvertError> {
    Ok(NetworkAddress {
        network: address.network.as_str().into(),
        ip: ip(field, &address.address)?,
    })
}

/// A port that is not 0.
pub(super) fn port(field: &'static str, port: u32) -> Result<u16, ConvertError> {
    match u16::try_from(port) {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(ConvertError::Port { field, port }),
    }
}

/// Service ports and target ports; target 0 leaves it to others.
pub(super) fn ports(field: &'static str, ports: &[Port]) -> Result<Ports, ConvertError> {
    let pairs = ports.iter().map(|one| {
        let target = match one.target_port {
            0 => 0,
            target => port(field, target)?,
        };
        Ok((port(field, one.service_port)?, target))
    });
    pairs.collect()
}

/// Host names compare in lower case.
pub(super) fn service_name(
    field: &'static str,
    namespace: &str,
    hostname: &str,
) -> Result<ServiceName, ConvertError> {
    let is_name = |text: &str| !text.is_empty() && !text.contains('/');
    if !is_name(namespace) || !is_name(hostname) {
        let name = format!("{namespace}/{hostname}");
        return Err(ConvertError::ServiceName { field, name });
    }
    Ok(ServiceName { namespace: namespace.into(), hostname: hostname.to_ascii_lowercase().into() })
}

pub(super) fn gateway(field: &'static str, raw: GatewayAddress) -> Result<Gateway, ConvertError> {
    let destination = match raw.destination.ok_or(ConvertError::NoDestination(field))? {
        gateway_address::Destination::Hostname(NamespacedHostname { namespace, hostname }) => {
            Destination::Name(service_name(field, &namespace, &hostname)?)
        }
        gateway_address::Destination::Address(at) => Destination::Address(address(field, &at)?),
    };
    let port = match raw.hbone_mtls_port {
        0 => HBONE_PORT,
        other => port(field, other)?,
    };
    Ok(Gateway { destination, port })
}

pub(super) fn texts(texts: Vec<String>) -> Vec<Arc<str>> {
    texts.into_iter().map(Into::into).collect()
}
