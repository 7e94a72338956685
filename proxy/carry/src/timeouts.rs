//! The deadlines of everything that waits for a peer, in one place.

use std::time::Duration;

/// How long each wait for a peer may last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From creating a socket to its TCP handshake's end: 10 s.
    pub dial: Duration,
    /// A TLS handshake, as client or as server: 10 s.
    pub tls_handshake: Duration,
    /// The HTTP/2 preface and SETTINGS after TLS: 5 s.
    pub h2_handshake: Duration,
    /// From a CONNECT to its response, which includes the peer's own dial to its application: 20 s.
    pub connect_response: Duration,
    /// Silence of an HTTP/2 connection's keepalive before the next PING: 10 s.
    pub ping_interval: Duration,
    /// From a PING to its answer, after which the connection is dead: 20 s.
    pub ping_timeout: Duration,
    /// A pooled connection without streams is released after 5 min.
    pub idle: Duration,
    /// The farewell of a connection that closes (`GOAWAY`, `close_notify`): 2 s.
    pub close: Duration,
    /// What an application sent before its reset is still delivered, but for no longer than 1 s.
    pub reset_drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            dial: Duration::from_secs(10),
            tls_handshake: Duration::from_secs(10),
            h2_handshake: Duration::from_secs(5),
            connect_response: Duration::from_secs(20),
            ping_interval: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(20),
            idle: Duration::from_mins(5),
            close: Duration::from_secs(2),
            reset_drain: Duration::from_secs(1),
        }
    }
}
