//! Why an outbound connection failed, and what telemetry calls it.

use std::{io, net::SocketAddr, sync::Arc};

use culvert_carry::{
    dial::DialError,
    hbone::{OpenError, client::ConnectError},
};
use culvert_mesh::reason::ResponseFlag;
use culvert_tls::{HandshakeError, IdentityError};

/// Somebody else than the pod reached its outbound listener.
#[derive(Debug, thiserror::Error)]
#[error("{peer} is no address of the pod whose outbound listener it reached")]
pub(super) struct Foreign {
    pub(super) peer: SocketAddr,
}

/// The mesh knows a way that this proxy does not go.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotCarried {
    #[error(
        "destination is in network {0:?}; tunnels through a network gateway are not carried yet"
    )]
    Network(Arc<str>),
    #[error("destination is known by its name {0} only; names are not resolved yet")]
    Name(Arc<str>),
}

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub(super) enum HboneFailure {
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the destination has no valid authority")]
    Authority(#[from] http::uri::InvalidUri),
    #[error("no HBONE connection to the peer")]
    Handshake(#[source] HandshakeError),
    #[error(transparent)]
    Open(OpenError),
}

impl From<OpenError> for HboneFailure {
    fn from(error: OpenError) -> Self {
        match tls_error(&error) {
            Some(cause) => Self::Handshake(cause.into()),
            None => Self::Open(error),
        }
    }
}

/// What rustls found, beneath a handshake's error.
fn tls_error(error: &OpenError) -> Option<rustls::Error> {
    let OpenError::Connect(error) = error else { return None };
    let ConnectError::Tls(error) = &**error else { return None };
    error.get_ref()?.downcast_ref().cloned()
}

impl HboneFailure {
    pub(super) fn flag(&self) -> ResponseFlag {
        match self {
            Self::Identity(_) => ResponseFlag::IdentityError,
            Self::Authority(_) => ResponseFlag::NoRoute,
            Self::Handshake(_) => ResponseFlag::TlsFailure,
            Self::Open(OpenError::Connect(error)) => match &**error {
                // Nobody answers on 15008: most often a policy of the network is in the way.
                ConnectError::Dial(DialError::Timeout { .. }) => ResponseFlag::NetworkPolicy,
                ConnectError::Dial(error) => of_dial(error),
                ConnectError::Tls(_) | ConnectError::TlsTimeout(_) => ResponseFlag::TlsFailure,
                ConnectError::H2(_) | ConnectError::H2Timeout(_) => {
                    ResponseFlag::H2HandshakeFailure
                }
            },
            // A peer that refuses our certificate says so only after our side of the handshake is done (RFC 8446
            // §4.4.2); h2 keeps the kind of the error, which is rustls's alone.
            Self::Open(OpenError::Broken(error))
                if error.get_io().is_some_and(|e| e.kind() == io::ErrorKind::InvalidData) =>
            {
                ResponseFlag::TlsFailure
            }
            Self::Open(OpenError::Broken(_)) => ResponseFlag::H2HandshakeFailure,
            Self::Open(
                OpenError::Refused(_)
                | OpenError::Timeout(_)
                | OpenError::Stale
                | OpenError::Full(_)
                | OpenError::Abandoned,
            ) => ResponseFlag::Connect,
        }
    }
}

/// What telemetry calls a dial that failed.
pub(super) fn of_dial(error: &DialError) -> ResponseFlag {
    match error {
        DialError::Timeout { .. }
        | DialError::Refused { .. }
        | DialError::Unreachable { .. }
        | DialError::Failed { .. }
        | DialError::Socket { .. } => ResponseFlag::Connect,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use culvert_carry::dial::Leg;
    use http::StatusCode;

    use super::*;

    #[track_caller]
    fn check(error: OpenError, want: ResponseFlag) {
        assert_eq!(HboneFailure::from(error).flag(), want);
    }

    #[test]
    fn each_failure_has_the_flag_that_dashboards_expect() {
        let second = Duration::from_secs(1);
        let address = ([192, 0, 2, 1], 15008).into();
        let timeout = DialError::Timeout { address, leg: Leg::Hbone, after: second };
        let connect = |error| OpenError::Connect(Arc::new(error));
        check(connect(ConnectError::Dial(timeout)), ResponseFlag::NetworkPolicy);
        check(connect(ConnectError::TlsTimeout(second)), ResponseFlag::TlsFailure);
        let refused = io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError);
        check(connect(ConnectError::Tls(refused)), ResponseFlag::TlsFailure);
        check(connect(ConnectError::H2Timeout(second)), ResponseFlag::H2HandshakeFailure);
        check(OpenError::Refused(StatusCode::UNAUTHORIZED), ResponseFlag::Connect);
        check(OpenError::Timeout(second), ResponseFlag::Connect);
    }
}
