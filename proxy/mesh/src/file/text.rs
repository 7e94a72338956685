//! Values of the mesh file that are written as text and mean more: parsed once, here.

use std::{
    fmt,
    marker::PhantomData,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

use crate::{
    Identity, identity,
    service::NetworkCidr,
    workload::{Destination, NetworkAddress, ServiceName},
};

/// A value read from a YAML scalar by [`FromText`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text<T>(pub(super) T);

/// What a scalar can be read as. The error is `what is wrong; remedy`.
pub(super) trait FromText: Sized {
    /// What to write, for values that are no scalar at all.
    const WANT: &'static str;

    fn from_text(text: &str) -> Result<Self, String>;
}

impl<'de, T: FromText> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar<T>(PhantomData<T>);
        impl<T: FromText> Visitor<'_> for Scalar<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::WANT)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
                T::from_text(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Scalar(PhantomData)).map(Self)
    }
}

/// The entries of a mapping, in order.
#[derive(Clone, Debug)]
pub(super) struct Entries<K, V>(pub(super) Vec<(K, V)>);

impl<K, V> Default for Entries<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Deserialize<'de> for Entries<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Mapping<K, V>(PhantomData<(K, V)>);
        impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Visitor<'de> for Mapping<K, V> {
            type Value = Vec<(K, V)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(entries)
            }
        }
        deserializer.deserialize_map(Mapping(PhantomData)).map(Self)
    }
}

/// A text that is not empty.
#[derive(Clone, Debug)]
pub(super) struct Word(pub(super) Arc<str>);

impl FromText for Word {
    const WANT: &'static str = "a text";

    fn from_text(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("text is empty; write a value".into());
        }
        Ok(Self(text.into()))
    }
}

/// A namespace or service account.
#[derive(Clone, Debug)]
pub(super) struct Name(pub(super) Arc<str>);

impl FromText for Name {
    const WANT: &'static str = "a name";

    fn from_text(text: &str) -> Result<Self, String> {
        identity::segment_is_legal("name", text).ok().ok_or_else(|| {
            format!("`{text}` is not a name; use letters, digits, `.`, `-` and `_` only")
        })?;
        Ok(Self(text.into()))
    }
}

/// A trust domain.
#[derive(Clone, Debug)]
pub(super) struct TrustDomain(pub(super) Arc<str>);

impl FromText for TrustDomain {
    const WANT: &'static str = "a trust domain";

    fn from_text(text: &str) -> Result<Self, String> {
        identity::trust_domain_is_legal(text).ok().ok_or_else(|| {
            format!("`{text}` is not a trust domain; use lower-case letters, digits, `.`, `-`, `_`")
        })?;
        Ok(Self(text.into()))
    }
}

impl FromText for Identity {
    const WANT: &'static str = "a SPIFFE ID";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error| {
            format!("`{text}`: {error}; write spiffe://<trust domain>/ns/<namespace>/sa/<account>")
        })
    }
}

impl FromText for IpAddr {
    const WANT: &'static str = "an IP address";

    fn from_text(text: &str) -> Result<Self, String> {
        let ip: Self = text
            .parse()
            .ok()
            .ok_or_else(|| format!("`{text}` is not an IP address; write one, such as 10.0.0.1"))?;
        Ok(ip.to_canonical())
    }
}

impl FromText for IpNet {
    const WANT: &'static str = "a CIDR";

    fn from_text(text: &str) -> Result<Self, String> {
        let net = text
            .parse()
            .or_else(|_| text.parse::<IpAddr>().map(|ip| Self::from(ip.to_canonical())))
            .ok()
            .ok_or_else(|| format!("`{text}` is not a CIDR; write one, such as 10.0.0.0/8"))?;
        // Addresses are compared in their canonical form, so a mapped range would never match.
        if matches!(net, Self::V6(v6) if v6.prefix_len() >= 96 && is_mapped(v6.addr())) {
            return Err(format!("`{text}` is an IPv4 range in IPv6 form; write it as IPv4"));
        }
        Ok(net)
    }
}

fn is_mapped(ip: Ipv6Addr) -> bool {
    ip.to_ipv4_mapped().is_some()
}

/// A port that is not 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Port(pub(super) u16);

impl FromText for Port {
    const WANT: &'static str = "a port";

    fn from_text(text: &str) -> Result<Self, String> {
        match number::<u16>(text) {
            Some(port) if port != 0 => Ok(Self(port)),
            _ => Err(format!("`{text}` is not a port; write a number from 1 to 65535")),
        }
    }
}

/// A service's target port; 0 leaves it to the endpoints.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetPort(pub(super) u16);

impl FromText for TargetPort {
    const WANT: &'static str = "a port";

    fn from_text(text: &str) -> Result<Self, String> {
        number(text)
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a target port; write a number from 0 to 65535"))
    }
}

impl FromText for u32 {
    const WANT: &'static str = "a number";

    fn from_text(text: &str) -> Result<Self, String> {
        number(text)
            .ok_or_else(|| format!("`{text}` is not a number; write one from 0 to 4294967295"))
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|c| c.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl FromText for NetworkAddress {
    const WANT: &'static str = "network/ip";

    fn from_text(text: &str) -> Result<Self, String> {
        let (network, ip) = text.rsplit_once('/').ok_or_else(|| {
            format!("`{text}` has no network; write network/ip, or /ip for the default network")
        })?;
        Ok(Self { network: network.into(), ip: IpAddr::from_text(ip)? })
    }
}

impl FromText for ServiceName {
    const WANT: &'static str = "namespace/hostname";

    fn from_text(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, host)) if !namespace.is_empty() && is_hostname(host) => {
                Ok(Self { namespace: namespace.into(), hostname: host.to_lowercase().into() })
            }
            _ => Err(format!("`{text}` is not a service; write namespace/hostname")),
        }
    }
}

impl FromText for Destination {
    const WANT: &'static str = "network/ip or namespace/hostname";

    fn from_text(text: &str) -> Result<Self, String> {
        NetworkAddress::from_text(text)
            .map(Self::Address)
            .or_else(|_| ServiceName::from_text(text).map(Self::Name))
            .ok()
            .ok_or_else(|| {
                format!("`{text}` is not a destination; write network/ip or namespace/hostname")
            })
    }
}

/// A DNS name. Kept in lower case, so that names compare.
#[derive(Clone, Debug)]
pub(super) struct Hostname(pub(super) Arc<str>);

impl FromText for Hostname {
    const WANT: &'static str = "a host name";

    fn from_text(text: &str) -> Result<Self, String> {
        if !is_hostname(text) {
            return Err(format!("`{text}` is not a host name; write one, such as web.example.com"));
        }
        Ok(Self(text.to_lowercase().into()))
    }
}

fn is_hostname(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'-' | b'_' | b'*'))
}

/// A range of virtual addresses, written `{network, cidr}`.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CidrVip {
    #[serde(default)]
    network: Arc<str>,
    cidr: Text<IpNet>,
}

impl From<CidrVip> for NetworkCidr {
    fn from(vip: CidrVip) -> Self {
        Self { network: vip.network, cidr: vip.cidr.0.trunc() }
    }
}

/// `Presence: []`: a matcher's name with nothing to say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nothing;

impl<'de> Deserialize<'de> for Nothing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let values = Vec::<String>::deserialize(deserializer)?;
        if values.is_empty() {
            Ok(Self)
        } else {
            Err(D::Error::custom("write `[]` here; nothing else"))
        }
    }
}
