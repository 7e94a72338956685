//! Tokens of Kubernetes service accounts, verified with the keys of their issuer.

use std::{fmt, io, path::PathBuf};

use jsonwebtoken::{
    Algorithm, DecodingKey, Validation,
    errors::ErrorKind,
    jwk::{AlgorithmParameters, EllipticCurve, JwkSet},
};
use serde::Deserialize;

/// How tokens are verified.
#[derive(Clone, Debug)]
pub struct TokenRules {
    /// The issuer's public keys: a JSON Web Key Set, or one key in PEM.
    pub keys: PathBuf,
    /// Who must have issued them; `None`: whoever holds the keys.
    pub issuer: Option<String>,
    /// Whom they must be meant for.
    pub audience: String,
}

/// Why tokens cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum AccountsError {
    /// The keys cannot be read.
    #[error("read the token issuer's keys in {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// They are no keys.
    #[error("{} holds no usable key; it must be a JSON Web Key Set or a public key in PEM, of RSA, P-256 or P-384", .0.display())]
    Malformed(PathBuf),
}

/// What a token says of its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claims {
    pub(super) namespace: String,
    pub(super) account: String,
    /// Name and uid.
    pub(super) pod: Option<(String, String)>,
    pub(super) node: Option<String>,
}

/// The issuer's keys and what is asked of tokens.
pub(super) struct Accounts {
    keys: Vec<Key>,
    issuer: Option<String>,
    audience: String,
}

struct Key {
    id: Option<String>,
    algorithms: &'static [Algorithm],
    verifying: DecodingKey,
}

/// Written by hand, so that no key is formatted.
impl fmt::Debug for Accounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accounts")
            .field("keys", &self.keys.len())
            .field("audience", &self.audience)
            .finish_non_exhaustive()
    }
}

const RSA: &[Algorithm] = &[Algorithm::RS256, Algorithm::RS384, Algorithm::RS512];
const P256: &[Algorithm] = &[Algorithm::ES256];
const P384: &[Algorithm] = &[Algorithm::ES384];

#[derive(Deserialize)]
struct Token {
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Deserialize)]
struct Kubernetes {
    namespace: String,
    serviceaccount: Named,
    pod: Option<Named>,
    node: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    #[serde(default)]
    uid: String,
}

impl Accounts {
    pub(super) fn open(rules: &TokenRules) -> Result<Self, AccountsError> {
        let path = || rules.keys.clone();
        let bytes = std::fs::read(&rules.keys)
            .map_err(|source| AccountsError::Read { path: path(), source })?;
        let keys = keys(&bytes).filter(|keys| !keys.is_empty());
        let keys = keys.ok_or_else(|| AccountsError::Malformed(path()))?;
        Ok(Self { keys, issuer: rules.issuer.clone(), audience: rules.audience.clone() })
    }

    /// Whose `token` is. An error says what is wrong with it, without repeating any of it.
    pub(super) fn verify(&self, token: &str) -> Result<Claims, String> {
        let header = jsonwebtoken::decode_header(token).ok();
        let header = header.ok_or_else(|| "it is no JSON Web Token".to_owned())?;
        let named = |key: &&Key| {
            // Either side may leave the name out.
            (key.id.is_none() || header.kid.is_none() || key.id == header.kid)
                && key.algorithms.contains(&header.alg)
        };
        let mut reason = "none of the issuer's keys is of its kind";
        for key in self.keys.iter().filter(named) {
            let mut validation = Validation::new(header.alg);
            validation.validate_nbf = true;
            validation.set_audience(&[&self.audience]);
            validation.set_required_spec_claims(&["exp", "aud"]);
            if let Some(issuer) = &self.issuer {
                validation.set_issuer(&[issuer]);
                validation.set_required_spec_claims(&["exp", "aud", "iss"]);
            }
            match jsonwebtoken::decode::<Token>(token, &key.verifying, &validation) {
                Ok(token) => return Ok(token.claims.into()),
                Err(error) => reason = why(error.kind()),
            }
        }
        Err(reason.to_owned())
    }
}

/// What is wrong with a token.
fn why(error: &ErrorKind) -> &'static str {
    match error {
        ErrorKind::ExpiredSignature => "it has expired",
        ErrorKind::ImmatureSignature => "it is not valid yet",
        ErrorKind::InvalidAudience => "it is meant for another audience",
        ErrorKind::InvalidIssuer => "it is of another issuer",
        ErrorKind::InvalidSignature => "its signature is wrong",
        _ => "it lacks what a service account's token says",
    }
}

impl From<Token> for Claims {
    fn from(token: Token) -> Self {
        let Kubernetes { namespace, serviceaccount, pod, node } = token.kubernetes;
        Self {
            namespace,
            account: serviceaccount.name,
            pod: pod.map(|pod| (pod.name, pod.uid)),
            node: node.map(|node| node.name),
        }
    }
}

fn keys(bytes: &[u8]) -> Option<Vec<Key>> {
    if let Ok(set) = serde_json::from_slice::<JwkSet>(bytes) {
        let keys = set.keys.iter().filter_map(|jwk| {
            let algorithms = match &jwk.algorithm {
                AlgorithmParameters::RSA(_) => RSA,
                AlgorithmParameters::EllipticCurve(curve) => match curve.curve {
                    EllipticCurve::P256 => P256,
                    EllipticCurve::P384 => P384,
                    _ => return None,
                },
                _ => return None,
            };
            let key = DecodingKey::from_jwk(jwk).ok()?;
            Some(Key { id: jwk.common.key_id.clone(), algorithms, verifying: key })
        });
        return Some(keys.collect());
    }
    let rsa = DecodingKey::from_rsa_pem(bytes).ok().map(|key| (RSA, key));
    let (algorithms, key) = rsa.or_else(|| {
        // The curve shows in the key's length only; a wrong guess verifies nothing.
        let key = DecodingKey::from_ec_pem(bytes).ok()?;
        let point = key.as_bytes().len();
        Some((if point > 65 { P384 } else { P256 }, key))
    })?;
    Some(vec![Key { id: None, algorithms, verifying: key }])
}
