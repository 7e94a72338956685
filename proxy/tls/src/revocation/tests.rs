use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use rustls::ClientConfig;
use time::OffsetDateTime;
use tokio::time::timeout;

use super::*;
use crate::credential::tests::errors;
use crate::issuer::Issued;
use crate::{Credential, Profile};

/// One whose first bit is set is a byte longer in a certificate than it is here.
const WEB: &[u8] = &[0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10];
const DB: &[u8] = &[0x01, 0x23, 0x45, 0x67];

/// An authority that chooses serial numbers and revokes them.
struct Revoking {
    issuer: Issuer<'static, KeyPair>,
    root: CertificateDer<'static>,
}

impl Revoking {
    fn new(usages: Vec<KeyUsagePurpose>) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = usages;
        let root = params.self_signed(&key).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), root }
    }

    fn ordinary() -> Self {
        Self::new(vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign])
    }

    fn credential(&self, profile: &Profile, identity: &str, serial: &[u8]) -> Credential {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.serial_number = Some(SerialNumber::from_slice(serial));
        params.subject_alt_names = vec![SanType::URI(identity.try_into().unwrap())];
        let chain = vec![params.signed_by(&key, &self.issuer).unwrap().der().clone()];
        let key = rustls_pki_types::PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let issued = Issued { chain, key, roots: vec![self.root.clone()] };
        Credential::new(profile, &identity.parse().unwrap(), 1, issued).unwrap()
    }

    fn list(&self, serials: &[&[u8]]) -> String {
        let now = OffsetDateTime::now_utc();
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from_slice(serial),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: now - time::Duration::HOUR,
            // It has ended, which is no reason to trust what it revokes.
            next_update: now - time::Duration::MINUTE,
            crl_number: SerialNumber::from_slice(&[1]),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

struct Pair {
    revocations: Revocations,
    web: Credential,
    db: Credential,
}

impl Pair {
    fn new(ca: &Revoking) -> Self {
        let revocations = Revocations::none();
        let profile = Profile::default().with_revocations(revocations.clone());
        let web = ca.credential(&profile, "spiffe://td/ns/shop/sa/web", WEB);
        let db = ca.credential(&profile, "spiffe://td/ns/shop/sa/db", DB);
        Self { revocations, web, db }
    }

    fn client(&self) -> Arc<ClientConfig> {
        self.web.client_config(&[self.db.identity().clone()])
    }

    async fn connect(&self) -> (String, String) {
        errors(self.client(), self.db.server_config()).await
    }
}

#[tokio::test]
async fn a_revoked_peer_is_refused_in_both_directions_and_lists_take_effect_at_once() {
    let ca = Revoking::ordinary();
    let pair = Pair::new(&ca);
    let good = (String::new(), String::new());
    let alert = "peer refused the handshake with alert CertificateRevoked".to_owned();
    let revoked = "peer certificate revoked by CRL".to_owned();
    assert_eq!(pair.connect().await, good);
    pair.revocations.replace(ca.list(&[DB]).as_bytes()).unwrap();
    assert_eq!(pair.connect().await, (revoked.clone(), alert.clone()));
    pair.revocations.replace(ca.list(&[WEB]).as_bytes()).unwrap();
    assert_eq!(pair.connect().await, (alert, revoked));
    pair.revocations.replace(ca.list(&[&[7]]).as_bytes()).unwrap();
    assert_eq!(pair.connect().await, good);
    pair.revocations.replace(ca.list(&[WEB]).as_bytes()).unwrap();
    pair.revocations.replace(b" \n").unwrap();
    assert_eq!(pair.connect().await, good);
}

#[tokio::test]
async fn a_list_of_another_authority_revokes_nothing() {
    let ca = Revoking::ordinary();
    let mut other = CertificateParams::default();
    other.distinguished_name.push(rcgen::DnType::CommonName, "another");
    let other = Revoking { issuer: Issuer::new(other, KeyPair::generate().unwrap()), ..ca };
    let ca = Revoking::ordinary();
    let pair = Pair::new(&ca);
    pair.revocations.replace(other.list(&[DB, WEB]).as_bytes()).unwrap();
    assert_eq!(pair.connect().await, (String::new(), String::new()));
}

#[tokio::test]
async fn a_list_that_names_the_peer_and_cannot_be_verified_revokes_it() {
    let ca = Revoking::new(vec![KeyUsagePurpose::KeyCertSign]);
    let signing = Revoking {
        issuer: {
            let mut params = CertificateParams::default();
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            Issuer::new(params, KeyPair::generate().unwrap())
        },
        root: ca.root.clone(),
    };
    let pair = Pair::new(&ca);
    pair.revocations.replace(signing.list(&[DB]).as_bytes()).unwrap();
    assert_eq!(pair.connect().await.0, "peer certificate revoked by CRL");
}

#[tokio::test]
async fn a_live_connection_learns_that_its_peer_is_revoked() {
    let ca = Revoking::ordinary();
    let pair = Pair::new(&ca);
    let mut lives = tokio::task::JoinSet::new();
    lives.spawn(pair.web.outbound_lifetime(pair.db.chain()).revoked());
    pair.revocations.replace(ca.list(&[WEB]).as_bytes()).unwrap();
    let waited = timeout(Duration::from_millis(50), lives.join_next()).await;
    assert!(waited.is_err(), "it is the other one that is revoked");
    pair.revocations.replace(ca.list(&[WEB, DB]).as_bytes()).unwrap();
    timeout(Duration::from_secs(10), lives.join_next()).await.unwrap().unwrap().unwrap();
    // One that was accepted just before the list came.
    timeout(Duration::from_secs(10), pair.db.inbound_lifetime(pair.web.chain()).revoked())
        .await
        .unwrap();
}

#[test]
fn a_file_that_cannot_be_used_changes_nothing() {
    let ca = Revoking::ordinary();
    let revocations = Revocations::none();
    let good = ca.list(&[WEB]);
    assert_eq!(revocations.replace(good.as_bytes()).unwrap(), 1);
    let two = format!("{good}{good}");
    let cut = good.get(..good.len() / 2).unwrap();
    let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for bad in ["no list", cut, certificate] {
        revocations.replace(bad.as_bytes()).unwrap_err();
        assert_eq!(revocations.lists.load().len(), 1, "{bad}");
    }
    assert_eq!(revocations.replace(two.as_bytes()).unwrap(), 2);
    let der = pem::parse(&good).unwrap();
    assert_eq!(revocations.replace(der.contents()).unwrap(), 1);
}

#[test]
fn no_bytes_make_the_parser_panic() {
    let list = Revoking::ordinary().list(&[WEB, DB]);
    let der = pem::parse(&list).unwrap().into_contents();
    for file in [list.as_bytes(), &der] {
        for at in 0..file.len() {
            for change in [0x00, 0x7f, 0x80, 0xff] {
                let mut file = file.to_vec();
                file[at] ^= change;
                drop(parse(&file));
                drop(parse(&file[..at]));
            }
        }
    }
}
