//! Why an outbound connection failed, and what telemetry calls it.

use std::{io, net::SocketAddr, sync::Arc};

use culvert_carry::{
    dial::DialError,
    hbone::{OpenError, client::ConnectError},
};
use culvert_mesh::{
    reason::ResponseFlag,
    route::{Hop, Refusal},
};
use culvert_tls::{HandshakeError, IdentityError};
use http::{StatusCode, uri::InvalidUri};

use crate::names::NameError;

/// Somebody else than the pod reached its outbound listener.
#[derive(Debug, thiserror::Error)]
#[error("{peer} is no address of the pod whose outbound listener it reached")]
pub(super) struct Foreign {
    pub(super) peer: SocketAddr,
}

/// Why nothing is dialled.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error(transparent)]
    Mesh(#[from] Refusal),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("where {0} leads is not known")]
    Unresolved(Arc<str>),
    #[error("the destination has no valid authority")]
    Authority(#[source] InvalidUri),
    #[error("the destination could not be reached, and there is no other in its place")]
    NoOther,
}

/// Why what was dialled is not open.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("no HBONE connection to the peer")]
    Handshake(#[source] HandshakeError),
    #[error(transparent)]
    Open(OpenError),
}

impl From<OpenError> for Failure {
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

impl Failure {
    /// Whether another endpoint in its place may do better: this one does not answer, is not who it should be, or says
    /// that its application is not there.
    ///
    /// What a peer's policy denies, and what fails here, would not go better elsewhere; nor is it for us to go around a
    /// waypoint that answers for what is behind it.
    pub(super) fn is_the_endpoints(&self, hop: Hop) -> bool {
        match self {
            Self::Dial(error) => !matches!(error, DialError::Socket { .. }),
            Self::Identity(_) => false,
            Self::Handshake(_) => true,
            Self::Open(error) => match error {
                OpenError::Connect(error) => {
                    !matches!(**error, ConnectError::Dial(DialError::Socket { .. }))
                }
                OpenError::Refused(status) => {
                    hop == Hop::Workload && *status == StatusCode::SERVICE_UNAVAILABLE
                }
                OpenError::Timeout(_) | OpenError::Broken(_) => true,
                OpenError::Stale | OpenError::Full(_) | OpenError::Abandoned => false,
            },
        }
    }

    pub(super) fn flag(&self) -> ResponseFlag {
        match self {
            Self::Dial(error) => of_dial(error),
            Self::Identity(_) => ResponseFlag::IdentityError,
            Self::Handshake(_) => ResponseFlag::TlsFailure,
            Self::Open(OpenError::Connect(error)) => of_connect(error),
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

/// What telemetry calls an HBONE connection that failed.
fn of_connect(error: &ConnectError) -> ResponseFlag {
    match error {
        // Nobody answers on 15008: most often a policy of the network is in the way.
        ConnectError::Dial(DialError::Timeout { .. }) => ResponseFlag::NetworkPolicy,
        ConnectError::Dial(error) => of_dial(error),
        ConnectError::Gateway(error) => match &**error {
            OpenError::Connect(error) => of_connect(error),
            _ => ResponseFlag::Connect,
        },
        ConnectError::Tls(_) | ConnectError::TlsTimeout(_) => ResponseFlag::TlsFailure,
        ConnectError::H2(_) | ConnectError::H2Timeout(_) => ResponseFlag::H2HandshakeFailure,
    }
}

/// What telemetry calls a dial that failed.
fn of_dial(error: &DialError) -> ResponseFlag {
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

    use super::*;

    #[track_caller]
    fn check(error: OpenError, want: ResponseFlag) {
        assert_eq!(Failure::from(error).flag(), want);
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
        let gateway = |error| connect(ConnectError::Gateway(Box::new(error)));
        check(gateway(connect(ConnectError::TlsTimeout(second))), ResponseFlag::TlsFailure);
        check(gateway(OpenError::Timeout(second)), ResponseFlag::Connect);
    }

    #[test]
    fn another_endpoint_is_tried_only_where_the_endpoint_is_to_blame() {
        let second = Duration::from_secs(1);
        let connect = |error| OpenError::Connect(Arc::new(error));
        let socket = DialError::Socket {
            address: ([192, 0, 2, 1], 15008).into(),
            source: io::ErrorKind::PermissionDenied.into(),
        };
        for (error, workload, waypoint) in [
            (connect(ConnectError::TlsTimeout(second)), true, true),
            (connect(ConnectError::Dial(socket)), false, false),
            (OpenError::Refused(StatusCode::SERVICE_UNAVAILABLE), true, false),
            (OpenError::Refused(StatusCode::UNAUTHORIZED), false, false),
            (OpenError::Refused(StatusCode::BAD_REQUEST), false, false),
            (OpenError::Full(1), false, false),
        ] {
            let failure = Failure::from(error);
            let got = [Hop::Workload, Hop::Waypoint].map(|hop| failure.is_the_endpoints(hop));
            assert_eq!(got, [workload, waypoint], "{failure:?}");
        }
    }
}
