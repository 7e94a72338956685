//! What is read out of X.509 certificates; which of them are trusted is decided in `peer`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use culvert_mesh::Identity;
use rustls_pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::error::X509Error;
use x509_parser::extensions::GeneralName;
use x509_parser::time::ASN1Time;

/// Parses one DER certificate.
pub(crate) fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, X509Error> {
    match x509_parser::parse_x509_certificate(der) {
        Ok((_, certificate)) => Ok(certificate),
        Err(x509_parser::nom::Err::Error(error) | x509_parser::nom::Err::Failure(error)) => {
            Err(error)
        }
        Err(x509_parser::nom::Err::Incomplete(_)) => Err(X509Error::InvalidCertificate),
    }
}

/// The SPIFFE identities among the URI names of a certificate, in its order; other names are skipped.
pub(crate) fn identities(certificate: &X509Certificate<'_>) -> Vec<Identity> {
    let Ok(Some(names)) = certificate.subject_alternative_name() else { return Vec::new() };
    let uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    uris.filter_map(|uri| uri.parse().ok()).collect()
}

/// When a certificate becomes valid and when it ends; times before 1970 read as 1970.
pub(crate) fn validity(certificate: &X509Certificate<'_>) -> (SystemTime, SystemTime) {
    let validity = certificate.validity();
    (system_time(validity.not_before), system_time(validity.not_after))
}

fn system_time(time: ASN1Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0))
}
