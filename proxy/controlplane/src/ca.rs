//! The certificate authority's service: who may have which identity, and the signing.
//!
//! A node gets the identities of what runs on it, and nothing else. What a request says of its subject is ignored.

mod audit;

#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use culvert_mesh::Identity;
use culvert_proto::istio::v1::auth::{
    IstioCertificateRequest, IstioCertificateResponse,
    istio_certificate_service_server::IstioCertificateService,
};
use culvert_tls::{Authority, AuthorityError};
use prost_types::{Struct, value::Kind as Value};
use tonic::{Request, Response, Status};

pub use self::audit::AuditError;
use self::audit::{Audit, Issued};
use crate::{
    callers::{Caller, Callers},
    metrics::Metrics,
    placements::Placements,
};

/// Where a request says for whom a node asks.
const IMPERSONATED: &str = "ImpersonatedIdentity";
/// A request's key and names take far less.
const MAX_REQUEST: usize = 64 * 1024;
/// Nobody could renew a shorter one in time.
const MIN_TTL: Duration = Duration::from_secs(10);

/// What the authority signs with, kept in step with its folder.
#[derive(Debug)]
pub(crate) struct Signer {
    dir: PathBuf,
    current: RwLock<(Option<Version>, Arc<Authority>)>,
}

/// What identifies a version of the authority's files.
type Version = [(u64, u64, i64, i64); 2];

impl Signer {
    /// Loads the authority of `dir`, or makes one there if there is none at all.
    pub(crate) fn open(dir: &Path, trust_domain: &str) -> Result<Self, AuthorityError> {
        let version = version(dir);
        let authority = match Authority::load(dir) {
            Err(AuthorityError::Missing(_)) if is_new(dir) => {
                tracing::info!(dir = %dir.display(), "making a root of trust");
                Authority::create(dir, &format!("culvert root of {trust_domain}"))?
            }
            loaded => loaded?,
        };
        Ok(Self { dir: dir.to_owned(), current: RwLock::new((version, Arc::new(authority))) })
    }

    pub(crate) fn current(&self) -> Arc<Authority> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&current.1)
    }

    /// Loads it again if its files changed; `true` if that gave another one. Bad files change nothing.
    pub(crate) fn refresh(&self) -> bool {
        let now = version(&self.dir);
        let seen = self.current.read().unwrap_or_else(PoisonError::into_inner).0;
        if now.is_none() || now == seen {
            return false;
        }
        match Authority::load(&self.dir) {
            Ok(authority) => {
                tracing::info!(roots = authority.roots().len(), "root of trust read again");
                let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                *current = (now, Arc::new(authority));
                true
            }
            Err(error) => {
                // Between the two files of a rotation this is so for a moment.
                let error = culvert_mesh::error::chain(&error);
                tracing::warn!(error, "root of trust stays as it is");
                false
            }
        }
    }
}

fn is_new(dir: &Path) -> bool {
    ["ca.pem", "ca-key.pem"].iter().all(|file| !dir.join(file).exists())
}

fn version(dir: &Path) -> Option<Version> {
    use std::os::unix::fs::MetadataExt as _;
    let of = |file: &str| {
        let m = std::fs::metadata(dir.join(file)).ok()?;
        Some((m.ino(), m.size(), m.mtime(), m.mtime_nsec()))
    };
    Some([of("ca.pem")?, of("ca-key.pem")?])
}

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    signer: Arc<Signer>,
    callers: Arc<Callers>,
    placements: Arc<Placements>,
    audit: Arc<Audit>,
    trust_domain: String,
    /// The longest life of a certificate, and the one of those that ask for none.
    ttl: Duration,
    metrics: Metrics,
}

/// Why a certificate is not given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Denied {
    #[error("{identity} does not run on {caller}")]
    Elsewhere { identity: Identity, caller: Caller },
    #[error("{identity} is not of trust domain {trust_domain}")]
    TrustDomain { identity: Identity, trust_domain: String },
    #[error("{caller} is not {identity}, and not of an account that acts for a node")]
    Other { identity: Identity, caller: Caller },
    #[error("{caller} says for no identity that it asks; nodes have none of their own")]
    Nobody { caller: Caller },
}

impl Certificates {
    pub(crate) fn new(
        signer: Arc<Signer>,
        callers: Arc<Callers>,
        placements: Arc<Placements>,
        trust_domain: String,
        ttl: Duration,
        metrics: Metrics,
    ) -> Result<Self, AuditError> {
        let audit = Arc::new(Audit::open(&signer.dir)?);
        Ok(Self { signer, callers, placements, audit, trust_domain, ttl, metrics })
    }

    /// The identity that `caller` gets, if it may have it.
    fn grant(&self, caller: &Caller, asked: Option<Identity>) -> Result<Identity, Denied> {
        let identity = match (asked, caller) {
            (Some(identity), _) => identity,
            (None, Caller::Account { namespace, account }) => {
                Identity::new(&self.trust_domain, namespace, account)
                    .map_err(|_illegal| Denied::Nobody { caller: caller.clone() })?
            }
            (None, Caller::Node { .. }) => {
                return Err(Denied::Nobody { caller: caller.clone() });
            }
        };
        if identity.trust_domain() != self.trust_domain {
            let trust_domain = self.trust_domain.clone();
            return Err(Denied::TrustDomain { identity, trust_domain });
        }
        let (namespace, account) = (identity.namespace(), identity.service_account());
        match caller {
            Caller::Node { node, .. } if self.placements.runs(node, namespace, account) => {
                Ok(identity)
            }
            Caller::Node { .. } => Err(Denied::Elsewhere { identity, caller: caller.clone() }),
            Caller::Account { namespace: own, account: name }
                if own == namespace && name == account =>
            {
                Ok(identity)
            }
            Caller::Account { .. } => Err(Denied::Other { identity, caller: caller.clone() }),
        }
    }

    fn ttl(&self, seconds: i64) -> Duration {
        match u64::try_from(seconds) {
            Ok(0) | Err(_) => self.ttl,
            Ok(seconds) => Duration::from_secs(seconds).clamp(MIN_TTL, self.ttl.max(MIN_TTL)),
        }
    }
}

#[tonic::async_trait]
impl IstioCertificateService for Certificates {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        self.metrics.asked();
        let caller = self.callers.identify(request.metadata(), request.extensions());
        let caller = caller.map_err(|refusal| {
            self.metrics.refused();
            tracing::warn!(target: "audit", %refusal, "certificate refused");
            Status::unauthenticated(refusal.to_string())
        })?;
        let request = request.into_inner();
        let asked = request.metadata.as_ref().and_then(impersonated);
        let asked = asked.map(str::parse::<Identity>).transpose().map_err(|error| {
            self.metrics.refused();
            tracing::warn!(target: "audit", %caller, %error, "certificate refused");
            Status::invalid_argument(error.to_string())
        })?;
        let identity = self.grant(&caller, asked).map_err(|denied| {
            self.metrics.refused();
            tracing::warn!(target: "audit", %caller, reason = %denied, "certificate refused");
            Status::permission_denied(denied.to_string())
        })?;
        if request.csr.len() > MAX_REQUEST {
            return Err(Status::invalid_argument("the request is too long"));
        }
        let ttl = self.ttl(request.validity_duration);
        let signed = self.signer.current().sign(&request.csr, &identity, ttl);
        let signed = signed.map_err(|error| {
            let text = culvert_mesh::error::chain(&error);
            tracing::warn!(target: "audit", %caller, %identity, error = text, "certificate not signed");
            match error {
                AuthorityError::Request(_) => Status::invalid_argument(text),
                _ => Status::internal("the authority cannot sign"),
            }
        })?;
        // What is not on record is not given.
        let record = Issued {
            serial: &signed.serial,
            identity: &identity,
            caller: &caller,
            not_after: signed.not_after,
        };
        self.audit.note(&record).map_err(|error| {
            let error = culvert_mesh::error::chain(&error);
            tracing::error!(target: "audit", error, "certificate withheld");
            Status::unavailable("the authority cannot keep its record")
        })?;
        tracing::info!(target: "audit", %caller, %identity, serial = signed.serial, "certificate issued");
        self.metrics.issued();
        let cert_chain = vec![signed.certificate, signed.roots];
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}

fn impersonated(metadata: &Struct) -> Option<&str> {
    match metadata.fields.get(IMPERSONATED)?.kind.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => Some(""),
    }
}
