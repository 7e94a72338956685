//! The certificate authority both nodes share, and leaf certificates for scripted peers, good and bad.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SanType, SerialNumber,
};
use time::{Duration, OffsetDateTime};

/// A P-256 root with its key, written to a folder as culvert's `--ca-dir` wants it.
#[derive(Debug)]
pub struct Ca {
    dir: PathBuf,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A leaf certificate with its key, both PEM.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// The certificate.
    pub cert: String,
    /// Its PKCS#8 key.
    pub key: String,
    serial: SerialNumber,
}

/// Whether a leaf is within its validity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// From an hour ago to an hour from now.
    Current,
    /// Ended an hour ago.
    Expired,
}

impl Ca {
    /// Makes a root and writes `ca.pem` and `ca-key.pem` (0600) to `dir`, which is created.
    pub fn create(dir: &Path) -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named("culvert test root");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (params.not_before, params.not_after) = around_now(Validity::Current);
        params.not_after += Duration::days(30);
        let pem = params.self_signed(&key)?.pem();

        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        fs::write(dir.join("ca.pem"), &pem)?;
        fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(dir.join("ca-key.pem"))?
            .write_all(key.serialize_pem().as_bytes())?;
        Ok(Self { dir: dir.to_owned(), pem, issuer: Issuer::new(params, key) })
    }

    /// The folder with `ca.pem` and `ca-key.pem`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The root certificate, PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A leaf for client and server use whose only subject alternative name is the URI `spiffe`.
    pub fn issue(&self, spiffe: &str, validity: Validity) -> Result<Leaf> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(spiffe.try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = around_now(validity);
        self.sign(params)
    }

    /// A leaf of a server called `name`.
    pub fn issue_server(&self, name: &str) -> Result<Leaf> {
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        (params.not_before, params.not_after) = around_now(Validity::Current);
        self.sign(params)
    }

    fn sign(&self, mut params: CertificateParams) -> Result<Leaf> {
        let key = KeyPair::generate()?;
        // As random as the key is.
        let serial = key.public_key_raw().get(1..9).unwrap_or_default();
        let serial = SerialNumber::from_slice(serial);
        params.serial_number = Some(serial.clone());
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Leaf { cert: cert.pem(), key: key.serialize_pem(), serial })
    }

    /// The list of what is revoked from now on, PEM.
    pub fn revoke(&self, leaves: &[&Leaf]) -> Result<String> {
        let now = OffsetDateTime::now_utc();
        let revoked = leaves.iter().map(|leaf| RevokedCertParams {
            serial_number: leaf.serial.clone(),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: now,
            next_update: now + Duration::DAY,
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Ok(list.signed_by(&self.issuer)?.pem()?)
    }
}

impl Leaf {
    /// Writes `NAME.pem` and `NAME-key.pem` to `dir` for programs that read files.
    pub fn write(&self, dir: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
        let (cert, key) = (dir.join(format!("{name}.pem")), dir.join(format!("{name}-key.pem")));
        fs::write(&cert, &self.cert)?;
        fs::write(&key, &self.key)?;
        Ok((cert, key))
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn around_now(validity: Validity) -> (OffsetDateTime, OffsetDateTime) {
    let now = OffsetDateTime::now_utc();
    let hour = Duration::HOUR;
    match validity {
        Validity::Current => (now - hour, now + hour),
        Validity::Expired => (now - 2 * hour, now - hour),
    }
}
