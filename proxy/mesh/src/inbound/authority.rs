//! The `:authority` of an HBONE CONNECT (RFC 9113 §8.5, RFC 3986 §3.2), read strictly.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// RFC 1035 §2.3.4, without the root's dot.
const MAX_HOST: usize = 253;

/// A host and a port that is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Authority<'a> {
    pub(super) host: Host<'a>,
    pub(super) port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host<'a> {
    /// Canonical.
    Ip(IpAddr),
    Name(&'a str),
}

impl<'a> Authority<'a> {
    /// `None`: `text` is not exactly `ipv4:port`, `[ipv6]:port` or `host:port`.
    pub(super) fn parse(text: &'a str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = if let Some(bracketed) = host.strip_prefix('[') {
            let ip: Ipv6Addr = bracketed.strip_suffix(']')?.parse().ok()?;
            Host::Ip(IpAddr::V6(ip).to_canonical())
        } else if let Ok(ip) = host.parse::<Ipv4Addr>() {
            Host::Ip(ip.into())
        } else {
            is_name(host).then_some(Host::Name(host))?
        };
        Some(Self { host, port: parse_port(port)? })
    }
}

fn parse_port(text: &str) -> Option<u16> {
    // `parse` alone would take a sign and leading zeros.
    let plain = text.bytes().all(|c| c.is_ascii_digit()) && !text.starts_with('0');
    plain.then(|| text.parse().ok()).flatten()
}

fn is_name(host: &str) -> bool {
    let label = |l: &str| {
        !l.is_empty()
            && l.len() <= 63
            && l.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_'))
    };
    // A last label of digits would make it a malformed IPv4 address.
    let last = host.rsplit('.').next().unwrap_or_default();
    host.len() <= MAX_HOST
        && host.split('.').all(label)
        && !last.bytes().all(|c| c.is_ascii_digit())
}
