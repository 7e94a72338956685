//! Tokens and certificates, good and bad.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use jsonwebtoken::{EncodingKey, Header};
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::{Value, json};

use super::*;
use crate::{objects, world::Change};

const TOKEN: &str = "a-token-of-node-one";

fn write(path: &Path, mode: u32, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn callers(options: CallerOptions) -> Result<Callers, CallersError> {
    let placements = Arc::new(Placements::default());
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "ztunnel-x", "namespace": "istio-system", "uid": "u1" },
        "spec": { "nodeName": "n1", "serviceAccountName": "ztunnel" },
    });
    let (key, object) = objects::read(pod).unwrap().unwrap();
    placements.apply(&[Change::Set(key, object)]);
    Callers::new(&options, placements)
}

fn by_token(callers: &Callers, header: &str) -> Result<Caller, Refusal> {
    let mut metadata = MetadataMap::new();
    metadata.insert("authorization", header.parse().unwrap());
    callers.identify(&metadata, &Extensions::new())
}

fn node(name: &str) -> Caller {
    Caller::Node { node: name.to_owned(), pod: None }
}

#[test]
fn a_nodes_token_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.yaml");
    write(&path, 0o600, &format!("n1: {TOKEN}\nn2: another-long-token\n"));
    let options = CallerOptions { node_tokens: Some(path.clone()), ..CallerOptions::default() };
    let callers = callers(options).unwrap();
    assert_eq!(by_token(&callers, &format!("Bearer {TOKEN}")), Ok(node("n1")));
    assert_eq!(by_token(&callers, &format!("bearer {TOKEN}\n").replace('\n', " ")), Ok(node("n1")));
    assert_eq!(by_token(&callers, "Bearer another-long-token"), Ok(node("n2")));
    for bad in ["Bearer ", "Bearer", &format!("Basic {TOKEN}"), TOKEN] {
        assert_eq!(by_token(&callers, bad), Err(Refusal::Header), "{bad}");
    }
    let unknown = by_token(&callers, "Bearer a-token-of-node-onf").unwrap_err();
    assert!(matches!(&unknown, Refusal::Token(_)));
    assert!(!unknown.to_string().contains("node-onf"), "{unknown}");
    let none = callers.identify(&MetadataMap::new(), &Extensions::new());
    assert_eq!(none, Err(Refusal::Nothing));

    write(&path, 0o600, "n3: a-third-and-long-token\n");
    callers.refresh();
    assert_eq!(by_token(&callers, "Bearer a-third-and-long-token"), Ok(node("n3")));
    assert!(by_token(&callers, &format!("Bearer {TOKEN}")).is_err(), "it was taken away");
    write(&path, 0o600, "nonsense");
    callers.refresh();
    assert_eq!(by_token(&callers, "Bearer a-third-and-long-token"), Ok(node("n3")));
}

#[test]
fn a_file_of_tokens_is_secret_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.yaml");
    let open = || {
        let options = CallerOptions { node_tokens: Some(path.clone()), ..CallerOptions::default() };
        callers(options).unwrap_err().to_string()
    };
    assert!(open().contains("read the nodes' tokens"));
    write(&path, 0o640, &format!("n1: {TOKEN}"));
    assert!(open().contains("chmod 600"));
    for text in ["n1: short", "[]", &format!("n1: {TOKEN}\nn2: {TOKEN}"), &format!("'': {TOKEN}")] {
        write(&path, 0o600, text);
        let error = open();
        assert!(error.contains("not a YAML mapping"), "{error}");
        assert!(!error.contains(TOKEN));
    }
}

struct Issuer {
    key: EncodingKey,
    _dir: tempfile::TempDir,
    callers: Callers,
}

impl Issuer {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let path = dir.path().join("keys.pem");
        fs::write(&path, key.public_key_pem()).unwrap();
        let rules = TokenRules {
            keys: path,
            issuer: Some("https://issuer".to_owned()),
            audience: "istio-ca".to_owned(),
        };
        let callers = callers(CallerOptions {
            tokens: Some(rules),
            node_accounts: vec!["istio-system/ztunnel".to_owned()],
            ..CallerOptions::default()
        });
        let key = EncodingKey::from_ec_pem(key.serialize_pem().as_bytes()).unwrap();
        Self { key, _dir: dir, callers: callers.unwrap() }
    }

    /// Who a token with these claims is, after `change` has been at them.
    fn claims(&self, change: impl FnOnce(&mut Value)) -> Result<Caller, Refusal> {
        let mut claims = json!({
            "iss": "https://issuer", "aud": ["istio-ca"], "exp": 4_000_000_000_u64,
            "kubernetes.io": {
                "namespace": "istio-system",
                "serviceaccount": { "name": "ztunnel", "uid": "s" },
                "pod": { "name": "ztunnel-x", "uid": "u1" },
            },
        });
        change(&mut claims);
        self.sign(&claims, &self.key)
    }

    fn sign(&self, claims: &Value, key: &EncodingKey) -> Result<Caller, Refusal> {
        let header = Header::new(jsonwebtoken::Algorithm::ES256);
        let token = jsonwebtoken::encode(&header, claims, key).unwrap();
        by_token(&self.callers, &format!("Bearer {token}"))
    }
}

#[test]
fn a_pod_of_a_trusted_account_acts_for_its_node() {
    let issuer = Issuer::new();
    let caller = issuer.claims(|_| {}).unwrap();
    let pod = Some("istio-system/ztunnel-x".to_owned());
    assert_eq!(caller, Caller::Node { node: "n1".to_owned(), pod });
    let other = issuer.claims(|claims| {
        claims["kubernetes.io"]["namespace"] = "shop".into();
        claims["kubernetes.io"]["serviceaccount"]["name"] = "web".into();
    });
    let (namespace, account) = ("shop".to_owned(), "web".to_owned());
    assert_eq!(other, Ok(Caller::Account { namespace, account }));
}

#[test]
fn a_token_is_its_pods_and_nobody_elses() {
    let issuer = Issuer::new();
    let pod = |field: &'static str, value: &'static str| {
        move |claims: &mut Value| claims["kubernetes.io"]["pod"][field] = value.into()
    };
    let refused = |result: Result<Caller, Refusal>| matches!(result, Err(Refusal::Pod(_)));
    assert!(refused(issuer.claims(pod("uid", "u2"))), "another pod has taken the name");
    assert!(refused(issuer.claims(pod("name", "ztunnel-gone"))));
    let unbound = issuer.claims(|claims| claims["kubernetes.io"]["pod"] = Value::Null);
    assert!(matches!(unbound, Err(Refusal::Token(_))));
    let elsewhere = |claims: &mut Value| claims["kubernetes.io"]["node"] = json!({ "name": "n9" });
    assert!(refused(issuer.claims(elsewhere)), "the pod is on n1");
    let vouched = issuer.claims(|claims| {
        claims["kubernetes.io"]["pod"]["name"] = "ztunnel-unknown".into();
        claims["kubernetes.io"]["node"] = json!({ "name": "n9" });
    });
    assert!(matches!(vouched, Ok(Caller::Node { node, .. }) if node == "n9"));
}

#[test]
fn a_token_is_good_for_one_issuer_audience_and_time() {
    let issuer = Issuer::new();
    let reason = |result: Result<Caller, Refusal>| match result {
        Err(Refusal::Token(reason)) => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(issuer.claims(|c| c["exp"] = 1.into())).contains("expired"));
    assert!(reason(issuer.claims(|c| c["aud"] = "x".into())).contains("audience"));
    assert!(reason(issuer.claims(|c| c["iss"] = "x".into())).contains("issuer"));
    assert!(
        reason(issuer.claims(|c| c["nbf"] = 4_000_000_000_u64.into())).contains("not valid yet")
    );
    for field in ["exp", "aud", "iss", "kubernetes.io"] {
        let without = issuer.claims(|claims| drop(claims.as_object_mut().unwrap().remove(field)));
        reason(without);
    }
    let other = KeyPair::generate().unwrap();
    let other = EncodingKey::from_ec_pem(other.serialize_pem().as_bytes()).unwrap();
    assert!(reason(issuer.sign(&json!({}), &other)).contains("signature"));
    // "alg": "none", and a secret that would be the public key.
    for token in ["eyJhbGciOiJub25lIn0.e30.", "x.y.z", ""] {
        assert!(by_token(&issuer.callers, &format!("Bearer {token}")).is_err());
    }
    let confused = EncodingKey::from_secret(b"anything");
    let header = Header::new(jsonwebtoken::Algorithm::HS256);
    let token = jsonwebtoken::encode(&header, &json!({}), &confused).unwrap();
    assert!(reason(by_token(&issuer.callers, &format!("Bearer {token}"))).contains("kind"));
}

#[test]
fn a_certificate_names_a_node_as_kubelets_does() {
    let callers = callers(CallerOptions::default()).unwrap();
    let certificate = |names: &[&str]| {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for name in names {
            params.distinguished_name.push(DnType::CommonName, *name);
        }
        let der = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone();
        let mut extensions = Extensions::new();
        extensions.insert(Proven(Arc::from([der])));
        callers.identify(&MetadataMap::new(), &extensions)
    };
    assert_eq!(certificate(&["system:node:n1"]), Ok(node("n1")));
    for names in [&["n1"][..], &["system:node:"], &[]] {
        assert_eq!(certificate(names), Err(Refusal::Certificate), "{names:?}");
    }
}
