//! Certificates over keys that others hold, and the one that the authority's own server presents.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use culvert_mesh::Identity;
use pem::Pem;
use rand::Rng as _;
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DistinguishedName, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::{Authority, AuthorityError, BACKDATE};
use crate::issuer::Issued;

/// A certificate over a key that its holder keeps.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The certificate, as PEM.
    pub certificate: String,
    /// Every root that its holder's peers may chain to, as PEM, the one that signed it first.
    pub roots: String,
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// When it ends.
    pub not_after: SystemTime,
}

impl Authority {
    /// Signs a certificate for `identity` over the key of a PKCS#10 request in PEM, valid for `ttl`, but never longer
    /// than the root.
    ///
    /// The request only proves that the caller holds the key: what it asks for beside that is ignored.
    pub fn sign(
        &self,
        request: &str,
        identity: &Identity,
        ttl: Duration,
    ) -> Result<Signed, AuthorityError> {
        let request =
            CertificateSigningRequestParams::from_pem(request).map_err(AuthorityError::Request)?;
        let sign = |source| AuthorityError::Sign { subject: identity.to_string(), source };
        let uri = identity.to_string().try_into().map_err(sign)?;
        let (not_before, not_after) = self.life(ttl)?;
        let mut params = leaf(vec![SanType::URI(uri)], not_before, not_after);
        let serial: [u8; 16] = serial();
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        let leaf = params.signed_by(&request.public_key, &self.issuer).map_err(sign)?;
        let roots = self.roots.iter().map(|root| Pem::new("CERTIFICATE", root.as_ref()));
        Ok(Signed {
            certificate: leaf.pem(),
            roots: pem::encode_many(&roots.collect::<Vec<_>>()),
            serial: format!("{:032x}", u128::from_be_bytes(serial)),
            not_after,
        })
    }

    /// Issues a certificate for a TLS server of these host names and IP addresses, over a fresh key.
    pub fn issue_server(&self, names: &[String]) -> Result<Issued, AuthorityError> {
        let subject = || names.first().cloned().unwrap_or_default();
        let sign = |source| AuthorityError::Sign { subject: subject(), source };
        let (not_before, not_after) = self.life(self.ttl)?;
        let names = names
            .iter()
            .map(|name| match name.parse::<IpAddr>() {
                Ok(ip) => Ok(SanType::IpAddress(ip)),
                Err(_) => name.as_str().try_into().map(SanType::DnsName),
            })
            .collect::<Result<_, _>>()
            .map_err(sign)?;
        self.over_fresh_key(leaf(names, not_before, not_after)).map_err(sign)
    }

    /// From when to when a certificate is valid that is asked for `ttl`, as of now.
    pub(super) fn life(&self, ttl: Duration) -> Result<(SystemTime, SystemTime), AuthorityError> {
        let now = SystemTime::now();
        if now >= self.not_after {
            return Err(AuthorityError::NotValid(self.root_path.clone()));
        }
        let not_after = now.checked_add(ttl).map_or(self.not_after, |end| end.min(self.not_after));
        Ok((now - BACKDATE, not_after))
    }

    /// Signs what `params` say over a key that was never used before.
    pub(super) fn over_fresh_key(&self, params: CertificateParams) -> Result<Issued, rcgen::Error> {
        let key = KeyPair::generate()?;
        let leaf = params.signed_by(&key, &self.issuer)?;
        Ok(Issued {
            chain: vec![leaf.into()],
            key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            roots: self.roots.clone(),
        })
    }
}

/// A certificate that signs no others, for TLS in either role.
pub(super) fn leaf(
    names: Vec<SanType>,
    not_before: SystemTime,
    not_after: SystemTime,
) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.not_before = not_before.into();
    params.not_after = not_after.into();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = names;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    params
}

/// Positive and never the same again (RFC 5280 §4.1.2.2).
fn serial() -> [u8; 16] {
    let mut serial: [u8; 16] = rand::rng().random();
    serial[0] = (serial[0] & 0x7f) | 0x40;
    serial
}

#[cfg(test)]
mod tests {
    use rcgen::PublicKeyData as _;

    use super::*;
    use crate::x509;

    fn authority() -> (tempfile::TempDir, Authority) {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "test root").unwrap();
        (dir, authority)
    }

    fn request(name: &str) -> (KeyPair, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let request = params.serialize_request(&key).unwrap().pem().unwrap();
        (key, request)
    }

    fn identity() -> Identity {
        "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap()
    }

    #[test]
    fn a_request_says_which_key_and_nothing_else() {
        let (_dir, authority) = authority();
        let (key, request) = request("evil.example.com");
        let signed = authority.sign(&request, &identity(), Duration::from_hours(1)).unwrap();
        let der = pem::parse(&signed.certificate).unwrap().into_contents().into();
        let leaf = x509::parse(&der).unwrap();
        assert_eq!(leaf.public_key().raw, key.subject_public_key_info());
        assert_eq!(x509::identities(&leaf), [identity()]);
        assert_eq!(leaf.subject_alternative_name().unwrap().unwrap().value.general_names.len(), 1);
        assert!(!leaf.is_ca());
        assert_eq!(leaf.subject().iter().count(), 0);
    }

    #[test]
    fn two_certificates_over_one_key_have_different_serials() {
        let (_dir, authority) = authority();
        let (_key, request) = request("x");
        let sign = || authority.sign(&request, &identity(), Duration::from_hours(1)).unwrap();
        assert_ne!(sign().serial, sign().serial);
    }

    #[test]
    fn a_request_that_its_key_did_not_sign_is_refused() {
        let (_dir, authority) = authority();
        let (_key, request) = request("x");
        let mut der = pem::parse(&request).unwrap().into_contents();
        let last = der.len() - 1;
        der[last] ^= 1;
        let forged = pem::encode(&Pem::new("CERTIFICATE REQUEST", der));
        for request in [forged.as_str(), "", "-----BEGIN CERTIFICATE REQUEST-----"] {
            let refused = authority.sign(request, &identity(), Duration::from_hours(1));
            assert!(matches!(refused, Err(AuthorityError::Request(_))), "{refused:?}");
        }
    }

    #[test]
    fn a_certificate_does_not_outlive_the_root() {
        let (_dir, authority) = authority();
        let (_key, request) = request("x");
        let century = Duration::from_hours(24 * 365 * 100);
        let signed = authority.sign(&request, &identity(), century).unwrap();
        assert!(signed.not_after <= authority.not_after);
    }

    #[test]
    fn a_servers_certificate_has_its_names_and_addresses() {
        let (_dir, authority) = authority();
        let issued = authority.issue_server(&["cp.example".into(), "10.0.0.1".into()]).unwrap();
        let leaf = x509::parse(&issued.chain[0]).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap().value.general_names.len();
        assert_eq!(names, 2);
    }
}
