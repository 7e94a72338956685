//! A client of a mesh's certificate authority (`istio.v1.auth.IstioCertificateService`).
//!
//! It makes the key and the request, has it signed, and takes the answer apart. When to ask for whom, and what to do
//! when the authority fails, is decided by `culvert-tls`; whether a certificate that came is fit for use as well.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use culvert_mesh::Identity;
use culvert_proto::istio::v1::auth::IstioCertificateRequest;
use culvert_proto::istio::v1::auth::istio_certificate_service_client::IstioCertificateServiceClient;
use culvert_tls::{Issued, Issuer, IssuerError, Issuing};
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::RootCertStore;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::server::{Channel, ConnectError, CredentialsError, Server};

/// For one call.
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// The largest answer: a chain and many roots.
const MAX_MESSAGE: usize = 4 << 20;
/// Under which the authority finds for whom the node asks.
const IMPERSONATED: &str = "ImpersonatedIdentity";

/// Why the authority gave no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// There is no connection to it.
    #[error("reach the certificate authority")]
    Connect(#[from] ConnectError),
    /// The token cannot be used.
    #[error("prepare a request to the certificate authority")]
    Credentials(#[from] CredentialsError),
    /// No key or request could be made.
    #[error("make a certificate request for {identity}")]
    Request {
        /// For whom.
        identity: Identity,
        /// What the library said.
        source: rcgen::Error,
    },
    /// It does not accept this node's token.
    #[error("the certificate authority does not accept this node's token: {0}")]
    Unauthenticated(String),
    /// It does not let this node ask for that identity.
    #[error(
        "the certificate authority gives this node no certificate for {identity}: {message}; is a pod of it on this node?"
    )]
    Denied {
        /// For whom.
        identity: Identity,
        /// What it said.
        message: String,
    },
    /// It cannot answer now.
    #[error("the certificate authority is unavailable: {0}")]
    Unavailable(String),
    /// It refused or failed otherwise.
    #[error("the certificate authority failed: {message} ({code})")]
    Failed {
        /// The kind of failure.
        code: Code,
        /// What it said.
        message: String,
    },
    /// It did not answer.
    #[error("the certificate authority gave no answer within {} s", CALL_DEADLINE.as_secs())]
    Deadline,
    /// Its answer is not a chain from a leaf to a root.
    #[error("the certificate authority sent {0}")]
    Chain(&'static str),
}

/// The authority, as an issuer of certificates for any identity that it lets this node ask for.
#[derive(Debug)]
pub struct CaClient {
    server: Server,
    ttl: Duration,
    open: Mutex<Option<Arc<Open>>>,
}

/// A connection, and the task that drives it; both end with the last call over it.
#[derive(Debug)]
struct Open {
    channel: Channel,
    /// The roots that the server was proved by.
    roots: Arc<RootCertStore>,
    _driver: JoinSet<()>,
}

impl CaClient {
    /// A client of `server` that asks for certificates which are valid for `ttl`.
    pub fn new(server: Server, ttl: Duration) -> Self {
        Self { server, ttl, open: Mutex::default() }
    }

    async fn request(&self, identity: &Identity) -> Result<Issued, CaError> {
        let (key, csr) = csr(identity)
            .map_err(|source| CaError::Request { identity: identity.clone(), source })?;
        let open = self.open().await?;
        let channel = self.server.refresh(&open.channel).await?;
        let mut service = IstioCertificateServiceClient::with_origin(channel, self.server.origin())
            .max_decoding_message_size(MAX_MESSAGE);
        let text = Value { kind: Some(Kind::StringValue(identity.to_string())) };
        let request = IstioCertificateRequest {
            csr,
            validity_duration: i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(Struct { fields: [(IMPERSONATED.to_owned(), text)].into() }),
        };
        let answer = timeout(CALL_DEADLINE, service.create_certificate(request)).await;
        let answer = answer.map_err(|_elapsed| CaError::Deadline)?;
        let answer = answer.map_err(|status| refused(identity, &status))?.into_inner();
        let (chain, roots) = chain(&answer.cert_chain)?;
        Ok(Issued { chain, key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(), roots })
    }

    /// The connection of the last call, or a new one where that has ended or the roots have changed.
    async fn open(&self) -> Result<Arc<Open>, CaError> {
        let mut open = self.open.lock().await;
        let roots = self.server.roots.load().await?;
        let fits = |open: &&Arc<Open>| !open.channel.is_closed() && open.roots.roots == roots.roots;
        if let Some(open) = open.as_ref().filter(fits) {
            return Ok(Arc::clone(open));
        }
        let (channel, connection) = self.server.connect_with(Arc::clone(&roots)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to the certificate authority ended");
            }
        });
        Ok(Arc::clone(open.insert(Arc::new(Open { channel, roots, _driver: driver }))))
    }
}

impl Issuer for CaClient {
    fn issue<'a>(&'a self, identity: &'a Identity) -> Issuing<'a> {
        Box::pin(async move {
            self.request(identity).await.map_err(|error| -> IssuerError { Arc::new(error) })
        })
    }
}

/// A fresh P-256 key and a request for `identity`: an empty subject, and the SPIFFE URI as its one name.
fn csr(identity: &Identity) -> Result<(KeyPair, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    let csr = params.serialize_request(&key)?.pem()?;
    Ok((key, csr))
}

/// The workload's certificate and intermediates, and the roots.
type Chain = (Vec<CertificateDer<'static>>, Vec<CertificateDer<'static>>);

/// Takes an answer apart: leaf first, roots last, each element PEM of one or more certificates.
fn chain(elements: &[String]) -> Result<Chain, CaError> {
    let [leaf, between @ .., roots] = elements else {
        return Err(CaError::Chain("no chain of a certificate and its root"));
    };
    // Of the leaf's element the first certificate counts; what follows it there leads towards the root.
    let mut chain = certificates(leaf)?;
    for element in between {
        chain.extend(certificates(element)?);
    }
    Ok((chain, certificates(roots)?))
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, CaError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match read {
        Ok(read) if !read.is_empty() => Ok(read),
        Ok(_) => Err(CaError::Chain("an element without a certificate")),
        Err(_) => Err(CaError::Chain("an element that is not PEM")),
    }
}

fn refused(identity: &Identity, status: &Status) -> CaError {
    let message = status.message().to_owned();
    match status.code() {
        Code::Unauthenticated => CaError::Unauthenticated(message),
        Code::PermissionDenied => CaError::Denied { identity: identity.clone(), message },
        Code::Unavailable | Code::ResourceExhausted | Code::Cancelled => {
            CaError::Unavailable(message)
        }
        code => CaError::Failed { code, message },
    }
}
