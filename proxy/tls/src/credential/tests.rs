use std::io;
use std::sync::Mutex;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, SanType};
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::version::TLS12;
use rustls_pki_types::{PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::*;
use crate::profile::KeyExchange;
use crate::{Authority, HandshakeError, peer_identity};

const TTL: Duration = Duration::from_hours(1);
const UNKNOWN_ISSUER: &str =
    "peer certificate has an unknown issuer: it chains to none of our roots";

fn id(uri: &str) -> Identity {
    uri.parse().unwrap()
}

fn web() -> Identity {
    id("spiffe://cluster.local/ns/shop/sa/web")
}

fn db() -> Identity {
    id("spiffe://cluster.local/ns/shop/sa/db")
}

fn stranger() -> Identity {
    id("spiffe://elsewhere.org/ns/shop/sa/web")
}

fn authority() -> Authority {
    named("root")
}

fn named(name: &str) -> Authority {
    let dir = tempfile::tempdir().unwrap();
    Authority::create(dir.path(), name).unwrap()
}

fn credential(authority: &Authority, identity: &Identity) -> Credential {
    Credential::new(&Profile::default(), identity, 1, authority.issue(identity).unwrap()).unwrap()
}

fn expired(authority: &Authority, identity: &Identity) -> Credential {
    let now = SystemTime::now();
    let issued = authority.issue_for(identity, now - 2 * TTL, now - TTL).unwrap();
    Credential::new(&Profile::default(), identity, 1, issued).unwrap()
}

fn premature(authority: &Authority, identity: &Identity) -> Credential {
    let now = SystemTime::now();
    let issued = authority.issue_for(identity, now + TTL, now + 2 * TTL).unwrap();
    Credential::new(&Profile::default(), identity, 1, issued).unwrap()
}

type Client = client::TlsStream<DuplexStream>;
type Server = server::TlsStream<DuplexStream>;

/// Shakes hands and passes a byte each way, so that a TLS 1.3 client learns whether its certificate was accepted.
async fn connect(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
) -> (Result<Client, HandshakeError>, Result<Server, HandshakeError>) {
    let (near, far) = duplex(16 * 1024);
    let dial = async {
        let name = ServerName::try_from("ignored.example").unwrap();
        let mut stream = TlsConnector::from(client).connect(name, near).await?;
        stream.write_all(b"a").await?;
        stream.read_u8().await?;
        Ok::<_, io::Error>(stream)
    };
    let accept = async {
        let mut stream = TlsAcceptor::from(server).accept(far).await?;
        stream.read_u8().await?;
        stream.write_all(b"b").await?;
        Ok::<_, io::Error>(stream)
    };
    let (dialled, accepted) = tokio::join!(Box::pin(dial), Box::pin(accept));
    (dialled.map_err(Into::into), accepted.map_err(Into::into))
}

/// The two ends' errors, an empty text for an end that was satisfied.
pub(crate) async fn errors(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
) -> (String, String) {
    let (client, server) = connect(client, server).await;
    (
        client.err().map_or_else(String::new, |e| e.to_string()),
        server.err().map_or_else(String::new, |e| e.to_string()),
    )
}

#[tokio::test]
async fn both_ends_learn_whom_they_speak_to() {
    let ca = authority();
    let (client, server) = connect(
        credential(&ca, &web()).client_config(&[db()]),
        credential(&ca, &db()).server_config(),
    )
    .await;
    let (client, server) = (client.unwrap(), server.unwrap());
    assert_eq!(peer_identity(client.get_ref().1.peer_certificates().unwrap()), Some(db()));
    assert_eq!(peer_identity(server.get_ref().1.peer_certificates().unwrap()), Some(web()));
}

#[tokio::test]
async fn the_handshake_has_the_profile_of_hbone() {
    let ca = authority();
    let (client, _server) = connect(
        credential(&ca, &web()).client_config(&[db()]),
        credential(&ca, &db()).server_config(),
    )
    .await;
    let client = client.unwrap();
    let session = client.get_ref().1;
    assert_eq!(session.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    assert_eq!(
        session.negotiated_cipher_suite().map(|suite| suite.suite()),
        Some(rustls::CipherSuite::TLS13_AES_256_GCM_SHA384)
    );
    assert_eq!(session.alpn_protocol(), Some(b"h2".as_slice()));
    assert_eq!(session.tls13_tickets_received(), 0);
}

#[test]
fn cipher_suites_are_those_of_hbone_in_its_order() {
    let suites: Vec<_> = Profile::default()
        .provider
        .cipher_suites
        .iter()
        .map(rustls::SupportedCipherSuite::suite)
        .collect();
    assert_eq!(
        suites,
        [
            rustls::CipherSuite::TLS13_AES_256_GCM_SHA384,
            rustls::CipherSuite::TLS13_AES_128_GCM_SHA256
        ]
    );
}

#[tokio::test]
async fn post_quantum_ends_agree_on_nothing_else() {
    let ca = authority();
    let pq = Profile::new(KeyExchange::PostQuantum);
    let of = |profile: &Profile, identity: &Identity| {
        Credential::new(profile, identity, 1, ca.issue(identity).unwrap()).unwrap()
    };
    let classic = {
        let profile = Profile::default();
        let mut provider = CryptoProvider::clone(&profile.provider);
        provider.kx_groups.retain(|group| group.name() == rustls::NamedGroup::X25519);
        assert_eq!(provider.kx_groups.len(), 1);
        Profile { provider: Arc::new(provider), ..profile }
    };
    for other in [&pq, &Profile::default()] {
        for (client, server) in [(&pq, other), (other, &pq)] {
            let client = of(client, &web()).client_config(&[db()]);
            let (client, _server) = connect(client, of(server, &db()).server_config()).await;
            let client = client.unwrap();
            let group = client.get_ref().1.negotiated_key_exchange_group().unwrap();
            assert_eq!(group.name(), rustls::NamedGroup::X25519MLKEM768);
        }
    }
    for (client, server) in [(&pq, &classic), (&classic, &pq)] {
        let client = of(client, &web()).client_config(&[db()]);
        let (client, server) = errors(client, of(server, &db()).server_config()).await;
        assert!(!client.is_empty() && !server.is_empty(), "{client:?} {server:?}");
    }
}

#[tokio::test]
async fn peers_of_an_alias_are_accepted_and_others_are_not() {
    let ca = authority();
    let profile = Profile::default().with_trust_domain_aliases(["elsewhere.org".to_owned()]);
    let own = Credential::new(&profile, &db(), 1, ca.issue(&db()).unwrap()).unwrap();
    for (peer, accepted) in
        [(stranger(), true), (web(), true), (id("spiffe://third.org/ns/shop/sa/web"), false)]
    {
        let client = credential(&ca, &peer).client_config(&[db()]);
        let (_, error) = errors(client, own.server_config()).await;
        assert_eq!(error.is_empty(), accepted, "{peer}: {error}");
    }
    // An alias is no root of trust.
    let client = trusting(&ca, Some(&credential(&named("other root"), &stranger())));
    assert_eq!(errors(client, own.server_config()).await.1, UNKNOWN_ISSUER);
}

/// A mesh moves to another root: first everybody gets to trust both, then certificates of the new one, then that alone.
#[tokio::test]
async fn a_root_is_replaced_while_every_pair_of_neighbouring_steps_talks() {
    let (old, new) = (authority(), named("new root"));
    let both = [old.roots(), new.roots()].concat();
    let step = |signer: &Authority, roots: &[CertificateDer<'static>], identity: &Identity| {
        let issued = Issued { roots: roots.to_vec(), ..signer.issue(identity).unwrap() };
        Credential::new(&Profile::default(), identity, 1, issued).unwrap()
    };
    let steps = [(&old, old.roots()), (&old, &both), (&new, &both), (&new, new.roots())];
    for (i, (signer, roots)) in steps.iter().enumerate() {
        for (j, (other, others)) in steps.iter().enumerate() {
            let client = step(signer, roots, &web()).client_config(&[db()]);
            let server = step(other, others, &db()).server_config();
            let (client, server) = errors(client, server).await;
            let talks = client.is_empty() && server.is_empty();
            assert_eq!(talks, i.abs_diff(j) <= 1, "{i} {j}: {client} {server}");
        }
    }
}

#[tokio::test]
async fn the_second_connection_is_not_resumed() {
    let ca = authority();
    let (client, server) =
        (credential(&ca, &web()).client_config(&[db()]), credential(&ca, &db()).server_config());
    for _ in 0..2 {
        let (ours, theirs) = connect(Arc::clone(&client), Arc::clone(&server)).await;
        theirs.unwrap();
        assert_eq!(ours.unwrap().get_ref().1.handshake_kind(), Some(rustls::HandshakeKind::Full));
    }
}

#[tokio::test]
async fn any_of_the_expected_identities_will_do() {
    let ca = authority();
    let client = credential(&ca, &web()).client_config(&[web(), db()]);
    assert_eq!(
        errors(client, credential(&ca, &db()).server_config()).await,
        (String::new(), String::new())
    );
}

/// Outbound refusals: what our client says and which alert the other end gets.
#[tokio::test]
async fn outbound_peers_are_refused_with_the_reason() {
    let (ca, namesake, other) = (authority(), authority(), named("other root"));
    let cases = [
        (
            credential(&ca, &db()),
            vec![web()],
            "peer is spiffe://cluster.local/ns/shop/sa/db, expected spiffe://cluster.local/ns/shop/sa/web",
            "CertificateUnknown",
        ),
        (
            credential(&ca, &db()),
            vec![],
            "peer is spiffe://cluster.local/ns/shop/sa/db, expected nobody: the destination has no identity",
            "CertificateUnknown",
        ),
        (credential(&other, &db()), vec![db()], UNKNOWN_ISSUER, "UnknownCA"),
        (credential(&namesake, &db()), vec![db()], UNKNOWN_ISSUER, "UnknownCA"),
        (expired(&ca, &db()), vec![db()], "peer certificate has expired", "CertificateExpired"),
        (
            premature(&ca, &db()),
            vec![db()],
            "peer certificate is not valid yet; compare both nodes' clocks",
            "CertificateExpired",
        ),
    ];
    for (peer, expected, want, alert) in cases {
        let got =
            errors(credential(&ca, &web()).client_config(&expected), peer.server_config()).await;
        assert_eq!(
            got,
            (want.to_owned(), format!("peer refused the handshake with alert {alert}"))
        );
    }
}

/// Inbound refusals: what our server says and which alert the client gets.
#[tokio::test]
async fn inbound_peers_are_refused_with_the_reason() {
    let (ca, namesake, other) = (authority(), authority(), named("other root"));
    let cases = [
        (
            credential(&ca, &stranger()),
            "peer spiffe://elsewhere.org/ns/shop/sa/web is not of trust domain cluster.local",
            "CertificateUnknown",
        ),
        (credential(&other, &web()), UNKNOWN_ISSUER, "UnknownCA"),
        (credential(&namesake, &web()), UNKNOWN_ISSUER, "UnknownCA"),
        (expired(&ca, &web()), "peer certificate has expired", "CertificateExpired"),
        (
            premature(&ca, &web()),
            "peer certificate is not valid yet; compare both nodes' clocks",
            "CertificateExpired",
        ),
    ];
    for (peer, want, alert) in cases {
        // Its own view of us is not at stake here.
        let client = trusting(&ca, Some(&peer));
        let got = errors(client, credential(&ca, &db()).server_config()).await;
        assert_eq!(
            got,
            (format!("peer refused the handshake with alert {alert}"), want.to_owned())
        );
    }
}

#[tokio::test]
async fn outbound_peers_may_be_of_another_trust_domain_when_expected() {
    let ca = authority();
    let server = credential(&ca, &stranger());
    // Inbound it would be refused for its trust domain: only the client's judgement counts here.
    let client = credential(&ca, &web()).client_config(&[stranger()]);
    let (client, _) = errors(client, server.server_config()).await;
    assert_eq!(client, "peer refused the handshake with alert CertificateUnknown");
}

#[tokio::test]
async fn a_client_without_certificate_is_refused() {
    let ca = authority();
    let (_, server) = errors(trusting(&ca, None), credential(&ca, &db()).server_config()).await;
    assert_eq!(server, "peer sent no certificate");
}

#[tokio::test]
async fn a_peer_without_spiffe_name_is_refused() {
    let ca = Anonymous::new();
    let Issued { chain, key, .. } = ca.issue(&["nameless.example"]);
    let nameless = SingleCertAndKey::from(
        CertifiedKey::from_der(chain, key, &Profile::default().provider).unwrap(),
    );
    let own = Credential::new(
        &Profile::default(),
        &web(),
        1,
        ca.issue(&["spiffe://cluster.local/ns/shop/sa/web"]),
    )
    .unwrap();

    let mut client = ClientConfig::clone(&own.client_config(&[web()]));
    client.client_auth_cert_resolver = Arc::new(nameless);
    let (_, error) = errors(Arc::new(client), own.server_config()).await;
    assert_eq!(error, "peer certificate has no spiffe identity");
}

#[tokio::test]
async fn a_second_name_of_our_trust_domain_does_not_let_a_stranger_in() {
    let ca = Anonymous::new();
    let names = ["spiffe://elsewhere.org/ns/shop/sa/web", "spiffe://cluster.local/ns/shop/sa/web"];
    let stranger = Credential::new(&Profile::default(), &stranger(), 1, ca.issue(&names)).unwrap();
    let own = Credential::new(
        &Profile::default(),
        &db(),
        1,
        ca.issue(&["spiffe://cluster.local/ns/shop/sa/db"]),
    )
    .unwrap();
    let (_, error) = errors(stranger.client_config(&[db()]), own.server_config()).await;
    assert_eq!(
        error,
        "peer spiffe://elsewhere.org/ns/shop/sa/web is not of trust domain cluster.local"
    );
}

#[tokio::test]
async fn a_tls12_client_is_refused() {
    let ca = authority();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(ca.roots().iter().cloned());
    let client = ClientConfig::builder_with_provider(Arc::new(
        rustls::crypto::aws_lc_rs::default_provider(),
    ))
    .with_protocol_versions(&[&TLS12])
    .unwrap()
    .with_root_certificates(roots)
    .with_no_client_auth();
    let (client, server) = errors(Arc::new(client), credential(&ca, &db()).server_config()).await;
    assert_eq!(
        (client.as_str(), server.as_str()),
        ("peer refused the handshake with alert ProtocolVersion", "tls handshake")
    );
}

#[tokio::test]
async fn a_peer_that_hangs_up_is_told_apart() {
    let ca = authority();
    let (near, far) = duplex(1024);
    drop(near);
    let error =
        TlsAcceptor::from(credential(&ca, &db()).server_config()).accept(far).await.unwrap_err();
    assert!(matches!(HandshakeError::from(error), HandshakeError::Closed));
}

#[tokio::test]
async fn no_server_name_is_sent() {
    let ca = authority();
    let seen = Arc::new(Seen { inner: credential(&ca, &db()), names: Mutex::default() });
    let mut server = ServerConfig::clone(&seen.inner.server);
    server.cert_resolver = Arc::<Seen>::clone(&seen);
    let (client, server) =
        errors(credential(&ca, &web()).client_config(&[db()]), Arc::new(server)).await;
    assert_eq!((client, server), (String::new(), String::new()));
    assert_eq!(*seen.names.lock().unwrap(), [None]);
}

#[test]
fn unusable_issued_certificates_are_refused() {
    let ca = authority();
    let issued = || ca.issue(&web()).unwrap();
    let no_roots = Issued { roots: vec![], ..issued() };
    let bad_root = Issued { roots: vec![CertificateDer::from(vec![1, 2, 3])], ..issued() };
    let cases = [
        (Issued { chain: vec![], ..issued() }, "issued chain is empty"),
        (
            Issued { chain: vec![CertificateDer::from(vec![1, 2, 3])], ..issued() },
            "parse issued certificate",
        ),
        (
            ca.issue(&db()).unwrap(),
            "issued certificate is for spiffe://cluster.local/ns/shop/sa/db, not spiffe://cluster.local/ns/shop/sa/web",
        ),
        (Issued { key: issued().key, ..issued() }, "issued key does not fit its certificate"),
        (no_roots, "none of the 0 issued roots can be used"),
        (bad_root, "none of the 1 issued roots can be used"),
    ];
    for (issued, want) in cases {
        assert_eq!(
            Credential::new(&Profile::default(), &web(), 1, issued).unwrap_err().to_string(),
            want
        );
    }
}

#[tokio::test]
async fn roots_that_cannot_be_read_are_skipped() {
    let ca = authority();
    let mut issued = ca.issue(&web()).unwrap();
    issued.roots.insert(0, CertificateDer::from(vec![1, 2, 3]));
    let client =
        Credential::new(&Profile::default(), &web(), 1, issued).unwrap().client_config(&[db()]);
    assert_eq!(
        errors(client, credential(&ca, &db()).server_config()).await,
        (String::new(), String::new())
    );
}

#[test]
fn validity_excludes_its_end() {
    let ca = authority();
    let credential = credential(&ca, &web());
    let (start, end) = (credential.not_before(), credential.not_after());
    let second = Duration::from_secs(1);
    let got = [start - second, start, end - second, end].map(|now| credential.is_valid_at(now));
    assert_eq!(got, [false, true, true, false]);
}

#[test]
fn the_server_configuration_is_made_once() {
    let credential = credential(&authority(), &web());
    assert!(Arc::ptr_eq(&credential.server_config(), &credential.server_config()));
}

#[test]
fn debug_output_holds_no_key() {
    let ca = authority();
    let issued = ca.issue(&web()).unwrap();
    let bytes = issued.key.secret_der().to_vec();
    let credential = Credential::new(&Profile::default(), &web(), 7, issued).unwrap();
    let text = format!("{credential:?}");
    let decimal = bytes[..8].iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    assert!(!text.contains(&decimal) && !text.contains("key"), "{text}");
}

#[test]
fn peer_identity_is_the_first_spiffe_name_of_the_leaf() {
    let ca = Anonymous::new();
    #[track_caller]
    fn check(ca: &Anonymous, names: &[&str], want: Option<Identity>) {
        assert_eq!(peer_identity(&ca.issue(names).chain), want);
    }
    check(&ca, &["spiffe://cluster.local/ns/shop/sa/web"], Some(web()));
    check(&ca, &["https://x.example", "spiffe://cluster.local/ns/shop/sa/web"], Some(web()));
    check(
        &ca,
        &["spiffe://cluster.local/ns/shop", "spiffe://cluster.local/ns/shop/sa/db"],
        Some(db()),
    );
    check(&ca, &["nameless.example"], None);
    assert_eq!(peer_identity(&[]), None);
    assert_eq!(peer_identity(&[CertificateDer::from(vec![0x30])]), None);
}

/// A client that trusts `ca` for whoever answers as `db`, with `own` certificate or none.
fn trusting(ca: &Authority, own: Option<&Credential>) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(&credential(ca, &web()).client_config(&[db()]));
    config.client_auth_cert_resolver = match own {
        Some(own) => Arc::clone(&own.client.client_auth_cert_resolver),
        None => Arc::new(NoCertificate),
    };
    Arc::new(config)
}

/// Records the server names that clients send.
#[derive(Debug)]
struct Seen {
    inner: Credential,
    names: Mutex<Vec<Option<String>>>,
}

impl ResolvesServerCert for Seen {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.names.lock().unwrap().push(hello.server_name().map(ToOwned::to_owned));
        self.inner.server.cert_resolver.resolve(hello)
    }
}

/// Sends an empty certificate message.
#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// An authority that signs any name, unlike ours.
struct Anonymous {
    issuer: rcgen::Issuer<'static, KeyPair>,
    root: CertificateDer<'static>,
}

impl Anonymous {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key).unwrap().into();
        Self { issuer: rcgen::Issuer::new(params, key), root }
    }

    fn issue(&self, names: &[&str]) -> Issued {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names
            .iter()
            .map(|name| {
                let text = (*name).try_into().unwrap();
                if name.contains("://") { SanType::URI(text) } else { SanType::DnsName(text) }
            })
            .collect();
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        Issued { chain: vec![leaf.into()], key, roots: vec![self.root.clone()] }
    }
}
