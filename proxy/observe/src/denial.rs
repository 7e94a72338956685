//! Why a connection was refused before anything was known about it that metrics could be labelled with.
//!
//! Refusals after that are a [`culvert_mesh::reason::ResponseFlag`] of the flow.

use std::fmt;

/// The closed set of reasons; the value of the `reason` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Denial {
    /// The app called a port of the proxy itself.
    SelfCall,
    /// A connection reached the outbound listener from outside of the pod.
    ForeignOutbound,
    /// The pod's own workload is not in the mesh's state.
    UnknownWorkload,
    /// The pod's own certificate could not be had.
    NoCertificate,
    /// There is no way to the destination.
    NoRoute,
    /// The TLS or HTTP/2 handshake of an inbound peer failed.
    Handshake,
    /// The peer's CONNECT could not be understood.
    BadRequest,
    /// The peer's CONNECT is for somebody else.
    WrongDestination,
    /// Too many peers are in their handshake with the pod.
    Overload,
    /// The flow's task ended before it had decided, as at shutdown.
    Abandoned,
}

impl Denial {
    /// The label's text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SelfCall => "self_call",
            Self::ForeignOutbound => "foreign_outbound",
            Self::UnknownWorkload => "unknown_workload",
            Self::NoCertificate => "no_certificate",
            Self::NoRoute => "no_route",
            Self::Handshake => "handshake",
            Self::BadRequest => "bad_request",
            Self::WrongDestination => "wrong_destination",
            Self::Overload => "overload",
            Self::Abandoned => "abandoned",
        }
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
