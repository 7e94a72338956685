//! Why a connection that leaves a pod is not carried.

use std::sync::Arc;

use crate::workload::{Destination, ServiceName};

/// Why nothing may be dialled. `Display` is what the access log says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The service has no such port.
    #[error("service {service} has no port {port}")]
    NoSuchPort {
        /// The service.
        service: ServiceName,
        /// What was asked for.
        port: u16,
    },
    /// No endpoint of the service can serve the port now.
    #[error("service {service} has no healthy endpoint for port {port}")]
    NoHealthyEndpoint {
        /// The service.
        service: ServiceName,
        /// What was asked for.
        port: u16,
    },
    /// The destination has a waypoint and that cannot be used; going around it is not an option.
    #[error("waypoint {waypoint} of {target} is not known or has no usable address")]
    NoWaypoint {
        /// The waypoint.
        waypoint: Destination,
        /// The service or workload that it belongs to.
        target: Arc<str>,
    },
    /// What would have to be dialled is in another network, and there is no way into that.
    #[error("{target} is in network {network:?}, to which there is no usable gateway")]
    OtherNetwork {
        /// The service or workload.
        target: Arc<str>,
        /// Its network.
        network: Arc<str>,
    },
    /// Whatever could be dialled was tried by this connection in vain.
    #[error("{target} has no endpoint left to try")]
    Exhausted {
        /// The service or workload.
        target: Arc<str>,
    },
    /// The address belongs to a service of the mesh that is private to its namespace.
    #[error("service {service} is visible in its own namespace only")]
    NotVisible {
        /// The service.
        service: ServiceName,
    },
}
