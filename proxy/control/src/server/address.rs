//! Where a server listens, parsed from a URI. Resolving it is left to `connection`.

use std::fmt;
use std::str::FromStr;

use http::Uri;
use rustls_pki_types::ServerName;

/// The port of HTTPS (RFC 9110 §4.2.2).
const HTTPS_PORT: u16 = 443;

/// A server's host and port. `Display` gives `https://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
}

/// Why a text is no [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It has another scheme than https.
    #[error("{0:?} is not https; a control plane is never spoken to in plaintext")]
    Scheme(String),
    /// It is something else.
    #[error("{0:?} is not an address; write https://host:port")]
    Malformed(String),
}

impl Address {
    /// The host: a DNS name or an IP address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Address {
    type Err = AddressError;

    /// Reads `https://host:port`; a missing scheme is https, a missing port 443.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let malformed = || AddressError::Malformed(text.to_owned());
        let whole = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
        let uri: Uri = whole.parse().ok().ok_or_else(malformed)?;
        if uri.scheme_str() != Some("https") {
            return Err(AddressError::Scheme(text.to_owned()));
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(malformed());
        }
        let authority = uri.authority().ok_or_else(malformed)?;
        // The library skips a port that is none.
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") => HTTPS_PORT,
            Some(rest) => {
                let port = rest.strip_prefix(':').and_then(|port| port.parse().ok());
                port.ok_or_else(malformed)?
            }
            None => return Err(malformed()),
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        ServerName::try_from(host).ok().ok_or_else(malformed)?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "https://[{host}]:{port}")
        } else {
            write!(f, "https://{host}:{port}")
        }
    }
}
