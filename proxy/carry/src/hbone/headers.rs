//! The metadata beside a CONNECT: `baggage`, `forwarded`, `traceparent`.
//!
//! Pure functions from and to header values. What comes from state is escaped, so that no byte of it can end a header
//! or forge another entry; what comes from a peer is bounded and never trusted to be well formed. Peers' claims are for
//! records only: policy never sees them.

use std::{
    fmt::{self, Write as _},
    net::SocketAddr,
};

use http::{HeaderMap, HeaderName, HeaderValue, header::FORWARDED};
use rand::Rng;

#[cfg(test)]
mod tests;

/// W3C Baggage; in a CONNECT it describes the source workload, in its response the destination.
pub const BAGGAGE: HeaderName = HeaderName::from_static("baggage");
/// W3C Trace Context.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The network that a CONNECT within a tunnel to another one comes from.
pub const FORWARDED_NETWORK: HeaderName = HeaderName::from_static("x-forwarded-network");

/// Longest value taken from a peer's baggage; the longest Kubernetes name has 253 bytes.
const MAX_VALUE: usize = 256;

/// Who a workload says it is. Empty means unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Baggage {
    /// `k8s.cluster.name`.
    pub cluster: String,
    /// `k8s.namespace.name`.
    pub namespace: String,
    /// What `workload` is: it names the key `k8s.<kind>.name`.
    pub kind: WorkloadKind,
    /// The name of the workload.
    pub workload: String,
    /// `service.name`: the canonical name.
    pub service: String,
    /// `service.version`: the canonical revision.
    pub version: String,
    /// `cloud.region`.
    pub region: String,
    /// `cloud.availability_zone`.
    pub zone: String,
}

/// The kinds of workload that baggage knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkloadKind {
    /// A Deployment, and what behaves as one.
    #[default]
    Deployment,
    /// A CronJob.
    CronJob,
    /// A Job.
    Job,
    /// A bare Pod.
    Pod,
}

impl WorkloadKind {
    fn key(self) -> &'static str {
        match self {
            Self::Deployment => "k8s.deployment.name",
            Self::CronJob => "k8s.cronjob.name",
            Self::Job => "k8s.job.name",
            Self::Pod => "k8s.pod.name",
        }
    }

    fn from_key(key: &str) -> Option<Self> {
        [Self::Deployment, Self::CronJob, Self::Job, Self::Pod]
            .into_iter()
            .find(|kind| kind.key() == key)
    }
}

impl Baggage {
    /// The value of the header; `None` when nothing is known.
    pub fn to_value(&self) -> Option<HeaderValue> {
        let mut text = String::new();
        for (key, value) in [
            ("k8s.cluster.name", &self.cluster),
            ("k8s.namespace.name", &self.namespace),
            (self.kind.key(), &self.workload),
            ("service.name", &self.service),
            ("service.version", &self.version),
            ("cloud.region", &self.region),
            ("cloud.availability_zone", &self.zone),
        ] {
            if value.is_empty() {
                continue;
            }
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(key);
            text.push('=');
            escape(value, &mut text);
        }
        if text.is_empty() { None } else { HeaderValue::try_from(text).ok() }
    }

    /// What `headers` say. Several baggage headers add up; entries that are unknown, empty, not ASCII or too long are
    /// left out, and of an entry told twice the last counts.
    pub fn parse(headers: &HeaderMap) -> Self {
        let mut baggage = Self::default();
        for value in headers.get_all(BAGGAGE) {
            for entry in value.to_str().unwrap_or_default().split(',') {
                baggage.take(entry);
            }
        }
        baggage
    }

    fn take(&mut self, entry: &str) {
        let mut parts = entry.split('=').map(str::trim);
        let (Some(key), Some(value)) = (parts.next(), parts.next()) else { return };
        // W3C properties follow the value after a semicolon.
        let value = value.split(';').next().unwrap_or_default().trim_end();
        if value.is_empty() || value.len() > MAX_VALUE || value.contains(char::is_control) {
            return;
        }
        let field = match key {
            "k8s.cluster.name" => &mut self.cluster,
            "k8s.namespace.name" => &mut self.namespace,
            "service.name" => &mut self.service,
            "service.version" => &mut self.version,
            "cloud.region" => &mut self.region,
            "cloud.availability_zone" => &mut self.zone,
            _ => match WorkloadKind::from_key(key) {
                Some(kind) => {
                    self.kind = kind;
                    &mut self.workload
                }
                None => return,
            },
        };
        *field = unescape(value);
    }
}

/// RFC 7239 `Forwarded`, as far as HBONE uses it: a hint for records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forwarded {
    /// `for`: the address of the client's application.
    pub client: Option<SocketAddr>,
    /// `host`: the service that the client meant; empty when unknown.
    pub host: String,
}

impl Forwarded {
    /// The value of the header; `None` when nothing is known. A host that is no host name is left out.
    pub fn to_value(&self) -> Option<HeaderValue> {
        let mut text = String::new();
        if let Some(client) = self.client {
            // A `String` takes any text.
            write!(text, "for=\"{client}\"").ok()?;
        }
        if is_host(&self.host) {
            if !text.is_empty() {
                text.push(';');
            }
            text.push_str("host=");
            text.push_str(&self.host);
        }
        if text.is_empty() { None } else { HeaderValue::try_from(text).ok() }
    }

    /// What the first `Forwarded` header says of the first hop; parts that do not parse are left out.
    pub fn parse(headers: &HeaderMap) -> Self {
        let text = headers.get(FORWARDED).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let mut forwarded = Self::default();
        for pair in text.split(',').next().unwrap_or_default().split(';') {
            let Some((name, value)) = pair.trim().split_once('=') else { continue };
            let value = value.trim_matches('"');
            if name.eq_ignore_ascii_case("for") && forwarded.client.is_none() {
                forwarded.client = value.parse().ok();
            }
            if name.eq_ignore_ascii_case("host") && forwarded.host.is_empty() && is_host(value) {
                value.clone_into(&mut forwarded.host);
            }
        }
        forwarded
    }
}

/// W3C Trace Context, version 00.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceParent {
    /// All spans of one trace share it; never zero.
    pub trace_id: u128,
    /// The caller's span; never zero.
    pub parent_id: u64,
    /// Bit 0: the trace is recorded.
    pub flags: u8,
}

impl TraceParent {
    /// A trace of its own, not recorded.
    pub fn random(rng: &mut impl Rng) -> Self {
        Self {
            trace_id: rng.random_range(1..=u128::MAX),
            parent_id: rng.random_range(1..=u64::MAX),
            flags: 0,
        }
    }

    /// The value of the header.
    pub fn to_value(self) -> Option<HeaderValue> {
        HeaderValue::try_from(self.to_string()).ok()
    }

    /// What `headers` say; `None` unless there is exactly one well-formed `traceparent`.
    pub fn parse(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        if values.next().is_some() {
            return None;
        }
        Self::from_bytes(value.as_bytes())
    }

    /// `version "-" trace-id "-" parent-id "-" flags`, lower-case hex; later versions may go on after another dash.
    fn from_bytes(text: &[u8]) -> Option<Self> {
        let (version, rest) = field(text, 2)?;
        let (trace_id, rest) = field(rest.strip_prefix(b"-")?, 32)?;
        let (parent_id, rest) = field(rest.strip_prefix(b"-")?, 16)?;
        let (flags, rest) = field(rest.strip_prefix(b"-")?, 2)?;
        let ends_well = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.is_empty() || rest.starts_with(b"-"),
        };
        if !ends_well || trace_id == 0 || parent_id == 0 {
            return None;
        }
        Some(Self {
            trace_id,
            parent_id: u64::try_from(parent_id).ok()?,
            flags: u8::try_from(flags).ok()?,
        })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.parent_id, self.flags)
    }
}

/// The number in the first `digits` bytes, at most 32, and what follows them.
fn field(text: &[u8], digits: usize) -> Option<(u128, &[u8])> {
    let (hex, rest) = text.split_at_checked(digits)?;
    let mut value = 0_u128;
    for byte in hex {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => return None,
        };
        value = value << 4 | u128::from(digit);
    }
    Some((value, rest))
}

/// Letters, digits, `.`, `-`, `_`, and `*` for wildcard services: none of them needs quoting in `Forwarded`.
fn is_host(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= MAX_VALUE
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b'*'))
}

/// Percent-encodes what may not stand in a baggage value, or would be taken for its end; names that Kubernetes allows
/// stay as they are.
fn escape(value: &str, into: &mut String) {
    for byte in value.bytes() {
        if byte.is_ascii_graphic() && !matches!(byte, b'"' | b',' | b';' | b'\\' | b'=' | b'%') {
            into.push(char::from(byte));
        } else {
            into.push('%');
            into.extend(
                [byte >> 4, byte & 15]
                    .map(|digit| HEX.get(usize::from(digit)).copied())
                    .into_iter()
                    .flatten(),
            );
        }
    }
}

/// Undoes [`escape`]; a value that is not well formed, or hides control characters, stays as it was written.
fn unescape(value: &str) -> String {
    if !value.contains('%') {
        return value.to_owned();
    }
    decode(value)
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .filter(|text| !text.contains(char::is_control))
        .unwrap_or_else(|| value.to_owned())
}

fn decode(value: &str) -> Option<Vec<u8>> {
    let mut bytes = value.bytes();
    let mut decoded = Vec::with_capacity(value.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => nibble(bytes.next()?)? << 4 | nibble(bytes.next()?)?,
            other => other,
        });
    }
    Some(decoded)
}

fn nibble(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

const HEX: [char; 16] =
    ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
