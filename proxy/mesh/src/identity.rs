//! Who a workload is: SPIFFE identities and the pod names that agents speak of.
//! Proving that a peer holds an identity is left to `culvert-tls`.

use std::{fmt, ops::Range, str::FromStr, sync::Arc};

const SCHEME: &str = "spiffe://";
/// SPIFFE-ID §2.3: an implementation must not make longer ones.
const MAX_ID: usize = 2048;
/// SPIFFE-ID §2.1: the bound of a host name in a URI.
const MAX_TRUST_DOMAIN: usize = 255;

/// A SPIFFE ID of the form `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`.
///
/// No part is empty and every part holds only characters that the SPIFFE ID specification allows.
/// `Display` writes the URI; `FromStr` reads it, and nothing else.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The whole URI, so that comparing and matching need no allocation.
    uri: Arc<str>,
    trust_domain_end: u16,
    namespace_end: u16,
}

impl Identity {
    /// The identity of `service_account` in `namespace`, in the mesh `trust_domain`.
    ///
    /// # Errors
    /// A part is empty, too long, or holds a character that SPIFFE IDs do not allow.
    pub fn new(
        trust_domain: &str,
        namespace: &str,
        service_account: &str,
    ) -> Result<Self, IdentityError> {
        trust_domain_is_legal(trust_domain)?;
        segment_is_legal("namespace", namespace)?;
        segment_is_legal("service account", service_account)?;
        let uri = format!("{SCHEME}{trust_domain}/ns/{namespace}/sa/{service_account}");
        if uri.len() > MAX_ID {
            return Err(IdentityError::TooLong);
        }
        let trust_domain_end = SCHEME.len() + trust_domain.len();
        let namespace_end = trust_domain_end + "/ns/".len() + namespace.len();
        let offset = |at: usize| u16::try_from(at).ok().ok_or(IdentityError::TooLong);
        Ok(Self {
            trust_domain_end: offset(trust_domain_end)?,
            namespace_end: offset(namespace_end)?,
            uri: uri.into(),
        })
    }

    /// The trust domain, such as `cluster.local`.
    pub fn trust_domain(&self) -> &str {
        self.part(SCHEME.len()..self.trust_domain_end.into())
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        let start = usize::from(self.trust_domain_end) + "/ns/".len();
        self.part(start..self.namespace_end.into())
    }

    /// The service account.
    pub fn service_account(&self) -> &str {
        let start = usize::from(self.namespace_end) + "/sa/".len();
        self.part(start..self.uri.len())
    }

    /// The URI without its scheme: the form that authorization policies and metrics use.
    pub fn principal(&self) -> &str {
        self.part(SCHEME.len()..self.uri.len())
    }

    /// The whole URI, as it stands in a certificate.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The text behind the URI, to be replaced by an equal one.
    pub(crate) fn shared_uri(&mut self) -> &mut Arc<str> {
        &mut self.uri
    }

    fn part(&self, range: Range<usize>) -> &str {
        self.uri.get(range).unwrap_or_default()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.uri)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.uri)
    }
}

impl FromStr for Identity {
    type Err = IdentityError;

    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let rest = text.strip_prefix(SCHEME).ok_or(IdentityError::Scheme)?;
        let mut parts = rest.split('/');
        let mut next = || parts.next().ok_or(IdentityError::Shape);
        let (trust_domain, ns, namespace, sa, service_account) =
            (next()?, next()?, next()?, next()?, next()?);
        if ns != "ns" || sa != "sa" || parts.next().is_some() {
            return Err(IdentityError::Shape);
        }
        Self::new(trust_domain, namespace, service_account)
    }
}

/// Why a text is not an [`Identity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Another scheme, or none.
    #[error("identity does not start with spiffe://")]
    Scheme,
    /// Missing, extra or unexpected path segments.
    #[error("identity is not of the form spiffe://<trust domain>/ns/<namespace>/sa/<account>")]
    Shape,
    /// A part of no characters.
    #[error("identity has an empty {part}")]
    Empty {
        /// Which part.
        part: &'static str,
    },
    /// A character outside the part's alphabet, or a segment of dots.
    #[error("identity has a {part} with characters that a SPIFFE ID may not hold")]
    Character {
        /// Which part.
        part: &'static str,
    },
    /// Longer than SPIFFE IDs may be.
    #[error("identity is longer than a SPIFFE ID may be")]
    TooLong,
}

/// A pod as node agents name it: the key under which a proxy finds its own workload.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRef {
    /// The pod's name.
    pub name: Arc<str>,
    /// The pod's namespace.
    pub namespace: Arc<str>,
    /// The service account it runs as.
    pub service_account: Arc<str>,
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (service account {})", self.namespace, self.name, self.service_account)
    }
}

pub(crate) fn trust_domain_is_legal(text: &str) -> Result<(), IdentityError> {
    const PART: &str = "trust domain";
    let legal = |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
    if text.is_empty() {
        Err(IdentityError::Empty { part: PART })
    } else if text.len() > MAX_TRUST_DOMAIN {
        Err(IdentityError::TooLong)
    } else if !text.bytes().all(legal) {
        Err(IdentityError::Character { part: PART })
    } else {
        Ok(())
    }
}

pub(crate) fn segment_is_legal(part: &'static str, text: &str) -> Result<(), IdentityError> {
    let legal = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'-' | b'_');
    if text.is_empty() {
        Err(IdentityError::Empty { part })
    } else if !text.bytes().all(legal) || text == "." || text == ".." {
        Err(IdentityError::Character { part })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: Result<&str, IdentityError>) {
        let got = text.parse::<Identity>();
        assert_eq!(got.as_ref().map(Identity::principal).map_err(|e| *e), want);
        if let Ok(identity) = got {
            assert_eq!(identity.to_string(), text);
        }
    }

    #[test]
    fn only_exact_spiffe_ids_parse() {
        use IdentityError::{Character, Empty, Scheme, Shape, TooLong};
        check("spiffe://cluster.local/ns/shop/sa/web", Ok("cluster.local/ns/shop/sa/web"));
        check("spiffe://td_1-x/ns/Shop/sa/web.v1_2", Ok("td_1-x/ns/Shop/sa/web.v1_2"));
        check("", Err(Scheme));
        check("SPIFFE://td/ns/a/sa/b", Err(Scheme));
        check("https://td/ns/a/sa/b", Err(Scheme));
        check("spiffe://td", Err(Shape));
        check("spiffe://td/ns/a/sa", Err(Shape));
        check("spiffe://td/ns/a/sa/b/", Err(Shape));
        check("spiffe://td/ns/a/sa/b/c", Err(Shape));
        check("spiffe://td/NS/a/sa/b", Err(Shape));
        check("spiffe://td/sa/a/ns/b", Err(Shape));
        check("spiffe:///ns/a/sa/b", Err(Empty { part: "trust domain" }));
        check("spiffe://td/ns//sa/b", Err(Empty { part: "namespace" }));
        check("spiffe://td/ns/a/sa/", Err(Empty { part: "service account" }));
        check("spiffe://TD/ns/a/sa/b", Err(Character { part: "trust domain" }));
        check("spiffe://td:1/ns/a/sa/b", Err(Character { part: "trust domain" }));
        check("spiffe://u@td/ns/a/sa/b", Err(Character { part: "trust domain" }));
        check("spiffe://td/ns/%61/sa/b", Err(Character { part: "namespace" }));
        check("spiffe://td/ns/../sa/b", Err(Character { part: "namespace" }));
        check("spiffe://td/ns/a/sa/b?q", Err(Character { part: "service account" }));
        check("spiffe://td/ns/a/sa/b#f", Err(Character { part: "service account" }));
        check("spiffe://td/ns/ä/sa/b", Err(Character { part: "namespace" }));
        check(&format!("spiffe://{}/ns/a/sa/b", "a".repeat(256)), Err(TooLong));
        check(&format!("spiffe://td/ns/{}/sa/b", "a".repeat(2048)), Err(TooLong));
    }

    #[test]
    fn parts_are_those_of_the_text() {
        let identity: Identity = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        assert_eq!(identity.trust_domain(), "cluster.local");
        assert_eq!(identity.namespace(), "shop");
        assert_eq!(identity.service_account(), "web");
    }
}
