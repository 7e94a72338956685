//! A scripted HBONE peer: TLS and HTTP/2 straight to a node's port 15008, well behaved or not.
//!
//! Shares no code with culvert. Used inside `Netns::run`; every step has a deadline.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Method, Request, Uri};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
    SupportedProtocolVersion,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    ca::{Ca, Leaf},
    poll,
};

const LIMIT: Duration = Duration::from_secs(15);

/// How the peer presents itself.
#[derive(Debug)]
pub struct Peer {
    config: ClientConfig,
}

/// What came of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The TLS or HTTP/2 handshake did not succeed, or the connection ended before an answer.
    Closed(String),
    /// An HTTP status with what was received after sending the payload and ending the stream.
    Status(u16, Vec<u8>),
}

impl Answer {
    /// The status; `None` if there was none.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Status(status, _) => Some(*status),
            Self::Closed(_) => None,
        }
    }
}

impl Peer {
    /// A peer that speaks TLS 1.3 and presents `leaf`, if any.
    pub fn new(ca: &Ca, leaf: Option<&Leaf>) -> Result<Self> {
        Self::with_versions(ca, leaf, &[&rustls::version::TLS13])
    }

    /// A peer that speaks only `versions`.
    pub fn with_versions(
        ca: &Ca,
        leaf: Option<&Leaf>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(ca.pem().as_bytes())?)?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyName(verifier)));
        let mut config = match leaf {
            Some(leaf) => builder.with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(leaf.cert.as_bytes())?],
                PrivateKeyDer::from_pem_slice(leaf.key.as_bytes())?,
            )?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.enable_sni = false;
        Ok(Self { config })
    }

    /// CONNECT for `authority` over a connection to `to`; sends `payload` after a 200 and reads to the end.
    pub fn connect(&self, to: SocketAddr, authority: &str, payload: &[u8]) -> Result<Answer> {
        let request = Request::builder()
            .method(Method::CONNECT)
            .uri(Uri::builder().authority(authority).build()?)
            .body(())?;
        self.ask(to, request, payload)
    }

    /// Any request over a connection to `to`.
    pub fn ask(&self, to: SocketAddr, request: Request<()>, payload: &[u8]) -> Result<Answer> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            // The port must be open, whatever happens on the connection.
            let tcp = timeout(poll::patient(LIMIT), TcpStream::connect(to))
                .await
                .with_context(|| format!("dial {to} within {LIMIT:?}"))?
                .with_context(|| format!("dial {to}"))?;
            let talk = Box::pin(self.talk(tcp, request, payload));
            let answer = timeout(poll::patient(LIMIT), talk)
                .await
                .with_context(|| format!("{to}: no end within {LIMIT:?}"))?;
            Ok(answer.unwrap_or_else(|error| Answer::Closed(format!("{error:#}"))))
        })
    }

    async fn talk(&self, tcp: TcpStream, request: Request<()>, payload: &[u8]) -> Result<Answer> {
        let tls = self.secure(tcp).await.context("TLS handshake")?;
        let (client, connection) = h2::client::handshake(tls).await.context("HTTP/2 handshake")?;
        let driver = tokio::spawn(connection);
        let answer = exchange(client, request, payload).await;
        driver.abort();
        answer
    }

    /// On the heap, as the state of a TLS session is large.
    async fn secure(&self, tcp: TcpStream) -> Result<Box<TlsStream<TcpStream>>> {
        let name = ServerName::try_from("unused.invalid")?;
        let connector = TlsConnector::from(Arc::new(self.config.clone()));
        Ok(Box::new(Box::pin(connector.connect(name, tcp)).await?))
    }
}

async fn exchange(
    client: h2::client::SendRequest<Bytes>,
    request: Request<()>,
    payload: &[u8],
) -> Result<Answer> {
    let mut client = client.ready().await.context("HTTP/2 connection")?;
    let connects = request.method() == Method::CONNECT;
    let (response, mut sender) = client.send_request(request, !connects)?;
    let response = response.await.context("response")?;
    let status = response.status().as_u16();
    if status != 200 {
        return Ok(Answer::Status(status, Vec::new()));
    }
    if connects {
        sender.send_data(Bytes::copy_from_slice(payload), true)?;
    }
    let mut body = response.into_body();
    let mut received = Vec::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk.context("body")?;
        body.flow_control().release_capacity(chunk.len())?;
        received.extend_from_slice(&chunk);
    }
    Ok(Answer::Status(status, received))
}

/// Verifies the chain but not the name: the mesh knows peers by their URI, and the pods' addresses are in no
/// certificate.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        use rustls::CertificateError::{NotValidForName, NotValidForNameContext};
        match self.0.verify_server_cert(leaf, intermediates, name, ocsp, now) {
            // The name is looked at last, after the chain has been accepted.
            Err(TlsError::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })) => {
                Ok(ServerCertVerified::assertion())
            }
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
