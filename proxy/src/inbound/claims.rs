//! What the headers of a CONNECT say of its sender, as far as it is taken for records.
//!
//! Nothing here reaches policy: who may connect is decided by the certificate and the address alone.

use std::sync::Arc;

use culvert_carry::hbone::headers::{Baggage, FORWARDED_NETWORK};
use culvert_mesh::Identity;
use culvert_observe::Claims;
use http::HeaderMap;

/// What is taken from the headers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// The sender is in another network: its address is somebody else's here.
    pub(super) is_foreign: bool,
    /// What it says of itself.
    pub(super) claims: Option<Arc<Claims>>,
}

impl Told {
    /// `identity` is what the sender has proved; nobody is taken at their word about another namespace.
    pub(super) fn read(headers: &HeaderMap, identity: Option<&Identity>, network: &str) -> Self {
        let from = headers.get(FORWARDED_NETWORK).map(http::HeaderValue::as_bytes);
        let is_foreign = from.is_some_and(|from| !from.eq_ignore_ascii_case(network.as_bytes()));
        let said = Baggage::parse(headers);
        let claims = identity
            .filter(|identity| identity.namespace() == said.namespace)
            .map(|_| Arc::new(claims(said)));
        Self { is_foreign, claims }
    }
}

fn claims(said: Baggage) -> Claims {
    let has_place = !said.region.is_empty() || !said.zone.is_empty();
    Claims {
        workload: said.workload.into(),
        canonical_name: said.service.into(),
        canonical_revision: said.version.into(),
        namespace: said.namespace.into(),
        cluster: said.cluster.into(),
        locality: has_place.then(|| (said.region.into(), said.zone.into())),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn read(headers: &[(&'static str, &str)], identity: Option<&str>, network: &str) -> Told {
        let headers = headers.iter().map(|(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        });
        let identity = identity.map(|uri| uri.parse().unwrap());
        Told::read(&headers.collect(), identity.as_ref(), network)
    }

    #[test]
    fn a_sender_is_taken_at_its_word_about_its_own_namespace_alone() {
        let shop = Some("spiffe://cluster.local/ns/shop/sa/web");
        let bank = Some("spiffe://cluster.local/ns/bank/sa/web");
        let said =
            "k8s.namespace.name=shop,k8s.deployment.name=web,service.name=w,service.version=v2";
        for (baggage, identity, want) in [
            (said, shop, Some("web")),
            (said, bank, None),
            (said, None, None),
            ("k8s.deployment.name=web", shop, None),
            ("k8s.namespace.name=shop", shop, Some("")),
            ("", shop, None),
        ] {
            let told = read(&[("baggage", baggage)], identity, "");
            let workload = told.claims.map(|claims| claims.workload.to_string());
            assert_eq!(workload.as_deref(), want, "{baggage:?} by {identity:?}");
        }
        let said = format!("{said},cloud.region=r,k8s.cluster.name=c");
        let claims = read(&[("baggage", &said)], shop, "").claims.unwrap();
        let want = Claims {
            workload: "web".into(),
            canonical_name: "w".into(),
            canonical_revision: "v2".into(),
            namespace: "shop".into(),
            cluster: "c".into(),
            locality: Some(("r".into(), "".into())),
        };
        assert_eq!(*claims, want);
    }

    #[test]
    fn an_address_of_another_network_is_nobodys_here() {
        for (from, network, want) in [
            (None, "", false),
            (None, "one", false),
            (Some("one"), "one", false),
            (Some("ONE"), "one", false),
            (Some("two"), "one", true),
            (Some("two"), "", true),
            (Some(""), "", false),
        ] {
            let headers: Vec<_> =
                from.map(|from| ("x-forwarded-network", from)).into_iter().collect();
            assert_eq!(read(&headers, None, network).is_foreign, want, "{from:?} in {network:?}");
        }
    }
}
