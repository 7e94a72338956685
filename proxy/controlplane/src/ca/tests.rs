//! Who gets what, and what is kept of it.

use std::{fs, os::unix::fs::PermissionsExt as _};

use prometheus_client::registry::Registry;
use prost_types::Value as Wire;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use tonic::Code;

use super::*;
use crate::{callers::CallerOptions, objects, world::Change};

const TOKEN: &str = "Bearer a-token-of-node-one";

struct Scene {
    dir: tempfile::TempDir,
    certificates: Certificates,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tokens = dir.path().join("tokens.yaml");
        fs::write(&tokens, "n1: a-token-of-node-one\n").unwrap();
        fs::set_permissions(&tokens, fs::Permissions::from_mode(0o600)).unwrap();
        let certificates = Self::open(dir.path());
        Self { dir, certificates }
    }

    fn open(dir: &Path) -> Certificates {
        let placements = Arc::new(Placements::default());
        for (name, node) in [("web", "n1"), ("ledger", "n2")] {
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": name, "namespace": "shop" },
                "spec": { "nodeName": node, "serviceAccountName": name },
            });
            let (key, object) = objects::read(pod).unwrap().unwrap();
            placements.apply(&[Change::Set(key, object)]);
        }
        let options = CallerOptions {
            node_tokens: Some(dir.join("tokens.yaml")),
            ..CallerOptions::default()
        };
        let callers = Arc::new(Callers::new(&options, Arc::clone(&placements)).unwrap());
        let signer = Arc::new(Signer::open(&dir.join("ca"), "cluster.local").unwrap());
        let metrics = Metrics::register(&mut Registry::default());
        let domain = "cluster.local".to_owned();
        let ttl = Duration::from_hours(24);
        Certificates::new(signer, callers, placements, domain, ttl, metrics).unwrap()
    }

    async fn ask(&self, token: &str, identity: Option<&str>) -> Result<Vec<String>, Status> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["evil".to_owned()]).unwrap();
        let csr = params.serialize_request(&key).unwrap().pem().unwrap();
        let metadata = identity.map(|identity| Struct {
            fields: [(
                IMPERSONATED.to_owned(),
                Wire { kind: Some(Value::StringValue(identity.to_owned())) },
            )]
            .into(),
        });
        let mut request =
            Request::new(IstioCertificateRequest { csr, validity_duration: 3600, metadata });
        if !token.is_empty() {
            request.metadata_mut().insert("authorization", token.parse().unwrap());
        }
        let response = self.certificates.create_certificate(request).await?;
        Ok(response.into_inner().cert_chain)
    }

    fn record(&self) -> String {
        fs::read_to_string(self.dir.path().join("ca/issued.jsonl")).unwrap()
    }
}

const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

#[tokio::test]
async fn a_node_gets_what_runs_on_it() {
    let scene = Scene::new();
    let chain = scene.ask(TOKEN, Some(WEB)).await.unwrap();
    assert_eq!(chain.len(), 2, "the leaf and the roots");
    assert!(chain.iter().all(|pem| pem.starts_with("-----BEGIN CERTIFICATE-----")));
    let record = scene.record();
    assert!(record.contains(WEB) && record.contains("node n1"), "{record}");
    assert!(!record.contains("a-token"), "{record}");
}

#[tokio::test]
async fn a_node_gets_nothing_else() {
    let scene = Scene::new();
    for (token, identity, code) in [
        (TOKEN, Some("spiffe://cluster.local/ns/shop/sa/ledger"), Code::PermissionDenied),
        (TOKEN, Some("spiffe://cluster.local/ns/bank/sa/web"), Code::PermissionDenied),
        (TOKEN, Some("spiffe://other/ns/shop/sa/web"), Code::PermissionDenied),
        (TOKEN, None, Code::PermissionDenied),
        (TOKEN, Some("web"), Code::InvalidArgument),
        (TOKEN, Some(""), Code::InvalidArgument),
        ("Bearer another-long-token", Some(WEB), Code::Unauthenticated),
        ("", Some(WEB), Code::Unauthenticated),
    ] {
        let status = scene.ask(token, identity).await.unwrap_err();
        assert_eq!(status.code(), code, "{identity:?}: {status:?}");
    }
    assert_eq!(scene.record(), "");
}

#[test]
fn an_account_is_itself_and_nobody_else() {
    let scene = Scene::new();
    let account = Caller::Account { namespace: "shop".into(), account: "web".into() };
    let grant = |asked: Option<&str>| {
        scene.certificates.grant(&account, asked.map(|text| text.parse().unwrap()))
    };
    assert_eq!(grant(None).unwrap().uri(), WEB);
    assert_eq!(grant(Some(WEB)).unwrap().uri(), WEB);
    let other = grant(Some("spiffe://cluster.local/ns/shop/sa/ledger"));
    assert!(matches!(other, Err(Denied::Other { .. })), "{other:?}");
}

#[test]
fn a_certificates_life_is_bounded() {
    let scene = Scene::new();
    let hours = Duration::from_hours;
    for (asked, given) in [
        (3600, hours(1)),
        (1, Duration::from_secs(10)),
        (0, hours(24)),
        (-5, hours(24)),
        (i64::MAX, hours(24)),
    ] {
        assert_eq!(scene.certificates.ttl(asked), given, "{asked}");
    }
}

#[tokio::test]
async fn root_and_record_survive_a_restart() {
    let scene = Scene::new();
    let before = scene.ask(TOKEN, Some(WEB)).await.unwrap();
    let again = Scene { certificates: Scene::open(scene.dir.path()), dir: scene.dir };
    let after = again.ask(TOKEN, Some(WEB)).await.unwrap();
    assert_eq!(before[1], after[1], "the root is the same");
    assert_eq!(again.record().lines().count(), 2);
    for file in ["ca/ca-key.pem", "ca/issued.jsonl"] {
        let mode = fs::metadata(again.dir.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}

#[tokio::test]
async fn a_new_root_is_told_before_it_signs() {
    let scene = Scene::new();
    let roots = |chain: &[String]| chain[1].matches("BEGIN").count();
    assert_eq!(roots(&scene.ask(TOKEN, Some(WEB)).await.unwrap()), 1);
    Authority::rotate(&scene.dir.path().join("ca"), "new", None).unwrap();
    assert!(scene.certificates.signer.refresh());
    assert!(!scene.certificates.signer.refresh(), "once");
    assert_eq!(roots(&scene.ask(TOKEN, Some(WEB)).await.unwrap()), 2);
    fs::write(scene.dir.path().join("ca/ca.pem"), "nonsense").unwrap();
    assert!(!scene.certificates.signer.refresh());
    assert_eq!(roots(&scene.ask(TOKEN, Some(WEB)).await.unwrap()), 2, "a bad file changes nothing");
}
