//! The embedded certificate authority: a root certificate and its key in a folder.
//!
//! It signs for whoever asks; who may ask for which identity is the caller's matter. The files are read once, at start.

mod rotation;
mod signing;

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use culvert_mesh::Identity;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose,
    PublicKeyData as _, SanType,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::error::X509Error;

use crate::issuer::{Issued, Issuer, IssuerError, Issuing};
use crate::x509;
pub use rotation::Rotated;
pub use signing::Signed;

const ROOT_FILE: &str = "ca.pem";
const KEY_FILE: &str = "ca-key.pem";
const ROOT_LIFETIME: Duration = Duration::from_hours(24 * 365 * 10);
const LEAF_LIFETIME: Duration = Duration::from_hours(24);
/// Permissions that nobody but the key's owner may have.
const OTHERS: u32 = 0o077;
/// Peers' clocks may be behind ours by as much before they refuse a fresh certificate.
const BACKDATE: Duration = Duration::from_mins(1);

/// Why the embedded authority cannot be loaded, created or used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// One of the two files is not there.
    #[error("{} is missing; put the mesh's root certificate in {ROOT_FILE} and its key in {KEY_FILE} there", .0.display())]
    Missing(PathBuf),
    /// One of the two files cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others than the owner may read the key.
    #[error("{} is accessible to others (mode {mode:03o}); run `chmod 600` on it", path.display())]
    Exposed {
        /// The key file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A file is not what it should be.
    #[error("{} holds no usable {what}: {reason}; it must be PEM", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The first certificate may not sign others.
    #[error("{} does not start with a certificate authority; its first certificate must be one that may sign", .0.display())]
    NotAuthority(PathBuf),
    /// The root certificate is not valid now.
    #[error("{} is not valid now; replace it, or set the clock if that is wrong", .0.display())]
    NotValid(PathBuf),
    /// Key and certificate are not of one pair.
    #[error("{} is not the key of {}; replace one of them", key.display(), root.display())]
    Mismatch {
        /// The key file.
        key: PathBuf,
        /// The certificate file.
        root: PathBuf,
    },
    /// `create` found an authority.
    #[error("{} exists already; remove it first if the mesh shall have a new root", .0.display())]
    Exists(PathBuf),
    /// `create` could not write.
    #[error("write {}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What was asked for is no request that can be signed.
    #[error("the request is not a PKCS#10 request that its own key has signed")]
    Request(#[source] rcgen::Error),
    /// A step of a rotation comes before every node can know of the last one.
    #[error("the last step of the rotation was less than {} ago, so nodes may not know of it; wait", hours(*.0))]
    TooEarly(Duration),
    /// A certificate could not be made.
    #[error("sign a certificate for {subject}")]
    Sign {
        /// For whom.
        subject: String,
        /// What the library said.
        source: rcgen::Error,
    },
}

/// A root certificate with its key, which signs workload certificates.
pub struct Authority {
    issuer: rcgen::Issuer<'static, KeyPair>,
    roots: Vec<CertificateDer<'static>>,
    root_path: PathBuf,
    /// Leaves never outlive the root: some peers verify the whole path's validity.
    not_after: SystemTime,
    ttl: Duration,
}

impl Authority {
    /// Reads `ca.pem` (first the certificate that signs, then further roots to trust) and `ca-key.pem` in `dir`.
    ///
    /// The key must be accessible to its owner only.
    pub fn load(dir: &Path) -> Result<Self, AuthorityError> {
        let root_path = dir.join(ROOT_FILE);
        let key_path = dir.join(KEY_FILE);

        let root_pem = read(&root_path)?;
        let malformed = |reason: String| AuthorityError::Malformed {
            path: root_path.clone(),
            what: "certificate",
            reason,
        };
        let roots = CertificateDer::pem_slice_iter(&root_pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| malformed(error.to_string()))?;
        let first = roots.first().ok_or_else(|| malformed("no certificate in it".to_owned()))?;
        let certificate = x509::parse(first).map_err(|error| malformed(error.to_string()))?;
        if !may_sign(&certificate).map_err(|error| malformed(error.to_string()))? {
            return Err(AuthorityError::NotAuthority(root_path));
        }
        let (not_before, not_after) = x509::validity(&certificate);
        let now = SystemTime::now();
        if now < not_before || now >= not_after {
            return Err(AuthorityError::NotValid(root_path));
        }

        refuse_exposed(&key_path)?;
        let key_pem = read(&key_path)?;
        let malformed = |reason: String| AuthorityError::Malformed {
            path: key_path.clone(),
            what: "key",
            reason,
        };
        let key = PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|error| malformed(error.to_string()))?;
        let key = KeyPair::try_from(&key).map_err(|error| malformed(error.to_string()))?;
        if key.subject_public_key_info() != certificate.public_key().raw {
            return Err(AuthorityError::Mismatch { key: key_path, root: root_path });
        }

        let issuer = rcgen::Issuer::from_ca_cert_der(first, key).map_err(|error| {
            AuthorityError::Malformed {
                path: root_path.clone(),
                what: "certificate",
                reason: error.to_string(),
            }
        })?;
        Ok(Self { issuer, roots, root_path, not_after, ttl: LEAF_LIFETIME })
    }

    /// Makes a new root (ECDSA P-256, valid for ten years) and writes it to `dir`, the key with mode 0600.
    ///
    /// The folder is made if it is missing; files that exist are left alone and are an error.
    pub fn create(dir: &Path, common_name: &str) -> Result<Self, AuthorityError> {
        let root_path = dir.join(ROOT_FILE);
        let key_path = dir.join(KEY_FILE);
        if root_path.exists() {
            return Err(AuthorityError::Exists(root_path));
        }
        let (root, key) = Self::make_root(common_name)?;
        fs::create_dir_all(dir)
            .map_err(|source| AuthorityError::Write { path: dir.to_owned(), source })?;
        write_new(&key_path, 0o600, &key.serialize_pem())?;
        if let Err(error) = write_new(&root_path, 0o644, &root.pem()) {
            // A key without its root would make every later attempt fail with `Exists`.
            if let Err(left) = fs::remove_file(&key_path) {
                tracing::warn!(path = %key_path.display(), error = %left, "remove a key that has no root");
            }
            return Err(error);
        }
        Self::load(dir)
    }

    fn make_root(common_name: &str) -> Result<(rcgen::Certificate, KeyPair), AuthorityError> {
        let sign =
            |source| AuthorityError::Sign { subject: format!("the root {common_name}"), source };
        let key = KeyPair::generate().map_err(sign)?;
        let now = SystemTime::now();
        let mut params = CertificateParams::default();
        params.not_before = (now - BACKDATE).into();
        params.not_after = (now + ROOT_LIFETIME).into();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let root = params.self_signed(&key).map_err(sign)?;
        Ok((root, key))
    }

    /// Issues certificates that are valid for `ttl` from now on, instead of 24 hours.
    #[must_use]
    pub fn with_ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// The certificates of `ca.pem`: what peers are verified against.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Signs a certificate for `identity` over a fresh P-256 key.
    ///
    /// Its subject is empty and its SPIFFE URI the one, critical, alternative name (X.509-SVID §4.1). It is backdated by
    /// a minute, for peers whose clock is behind, and never outlives the root.
    pub fn issue(&self, identity: &Identity) -> Result<Issued, AuthorityError> {
        let (not_before, not_after) = self.life(self.ttl)?;
        self.issue_for(identity, not_before, not_after)
    }

    pub(crate) fn issue_for(
        &self,
        identity: &Identity,
        not_before: SystemTime,
        not_after: SystemTime,
    ) -> Result<Issued, AuthorityError> {
        let sign = |source| AuthorityError::Sign { subject: identity.to_string(), source };
        let uri = identity.to_string().try_into().map_err(sign)?;
        let params = signing::leaf(vec![SanType::URI(uri)], not_before, not_after);
        self.over_fresh_key(params).map_err(sign)
    }
}

/// Signs in place: a P-256 key and signature take some 100 µs, less than a move to another thread is worth.
impl Issuer for Authority {
    fn issue<'a>(&'a self, identity: &'a Identity) -> Issuing<'a> {
        Box::pin(
            async move { self.issue(identity).map_err(|error| -> IssuerError { Arc::new(error) }) },
        )
    }
}

/// Written by hand, so that the key cannot reach a log.
impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority")
            .field("root", &self.root_path)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

fn may_sign(
    certificate: &x509_parser::certificate::X509Certificate<'_>,
) -> Result<bool, X509Error> {
    let authority =
        certificate.basic_constraints()?.is_some_and(|constraints| constraints.value.ca);
    let signs = certificate.key_usage()?.is_none_or(|usage| usage.value.key_cert_sign());
    Ok(authority && signs)
}

fn hours(duration: Duration) -> String {
    format!("{} h", duration.as_secs().div_ceil(3600))
}

fn read(path: &Path) -> Result<Vec<u8>, AuthorityError> {
    fs::read(path).map_err(|source| unreadable(path, source))
}

fn refuse_exposed(path: &Path) -> Result<(), AuthorityError> {
    let metadata = fs::metadata(path).map_err(|source| unreadable(path, source))?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & OTHERS == 0 {
        Ok(())
    } else {
        Err(AuthorityError::Exposed { path: path.to_owned(), mode })
    }
}

fn unreadable(path: &Path, source: io::Error) -> AuthorityError {
    match source.kind() {
        io::ErrorKind::NotFound => AuthorityError::Missing(path.to_owned()),
        _ => AuthorityError::Read { path: path.to_owned(), source },
    }
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), AuthorityError> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = opened.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => AuthorityError::Exists(path.to_owned()),
        _ => AuthorityError::Write { path: path.to_owned(), source },
    })
}

#[cfg(test)]
mod tests;
