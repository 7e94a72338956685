//! What a connection is proved by: roots for the server, a token for this node. Read again each time they are used.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use http::HeaderValue;
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

/// No token and no bundle of roots is larger.
const MAX_FILE: usize = 4 << 20;

/// Whose certificates prove a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// Those of a PEM file, which is read for each connection.
    File(PathBuf),
    /// Those that this machine trusts.
    System,
    /// Those of this PEM text.
    Pem(String),
}

/// What proves this node to a server: a bearer token (RFC 6750 §2.1). Never shown.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// The contents of a file, which is read for each connection or call.
    File(PathBuf),
    /// This text.
    Text(String),
}

/// Why roots or a token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// There is no root.
    #[error("{0} no usable certificate; give the control plane's root as PEM")]
    NoRoot(String),
    /// The token cannot be sent.
    #[error("{0} no token that can be sent; it must be one line of text")]
    Token(String),
    /// The verifier refuses the roots.
    #[error("verify by the control plane's roots")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
    /// The name cannot be a server's.
    #[error("{0:?} is not a host name; correct the alternative name")]
    Name(String),
    /// TLS refuses its configuration.
    #[error("configure tls")]
    Tls(#[source] rustls::Error),
}

impl Roots {
    /// The roots as of now.
    pub(crate) async fn load(&self) -> Result<Arc<RootCertStore>, CredentialsError> {
        let (from, certificates) = match self {
            Self::File(path) => {
                let pem = read(path.clone()).await?;
                (format!("{} holds", path.display()), parse(&pem))
            }
            Self::System => {
                let loaded = rustls_native_certs::load_native_certs();
                ("this machine's store has".to_owned(), loaded.certs)
            }
            Self::Pem(text) => ("the text given as root has".to_owned(), parse(text.as_bytes())),
        };
        let mut roots = RootCertStore::empty();
        let (added, _ignored) = roots.add_parsable_certificates(certificates);
        if added == 0 { Err(CredentialsError::NoRoot(from)) } else { Ok(Arc::new(roots)) }
    }
}

impl Token {
    /// The value of the `authorization` header as of now.
    pub(crate) async fn header(&self) -> Result<HeaderValue, CredentialsError> {
        let (from, text) = match self {
            Self::File(path) => {
                let bytes = read(path.clone()).await?;
                let text = String::from_utf8(bytes).unwrap_or_default();
                (format!("{} holds", path.display()), text)
            }
            Self::Text(text) => ("the token given is".to_owned(), text.clone()),
        };
        let text = text.trim();
        let header = HeaderValue::try_from(format!("Bearer {text}"));
        match header {
            Ok(mut header) if !text.is_empty() => {
                header.set_sensitive(true);
                Ok(header)
            }
            _ => Err(CredentialsError::Token(from)),
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Text(_) => f.write_str("Text(..)"),
        }
    }
}

fn parse(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect()
}

async fn read(path: PathBuf) -> Result<Vec<u8>, CredentialsError> {
    let failed = |source| CredentialsError::Read { path: path.clone(), source };
    let metadata = tokio::fs::metadata(&path).await.map_err(failed)?;
    if metadata.len() > MAX_FILE as u64 {
        return Err(failed(io::ErrorKind::FileTooLarge.into()));
    }
    tokio::fs::read(&path).await.map_err(failed)
}
