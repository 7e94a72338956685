//! The client against an authority that signs with a real root, over real TLS and gRPC.

use std::sync::Mutex as Lock;

use culvert_proto::istio::v1::auth::IstioCertificateResponse;
use culvert_proto::istio::v1::auth::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use culvert_tls::Certificates;
use rcgen::CertificateSigningRequestParams;
use tonic::{Request, Response};

use super::*;
use crate::server::{Roots, Token};
use crate::testing::{self, Pki, TestServer};

type Answer = Result<Vec<String>, Status>;

/// Signs what it is asked for, unless it is told what to answer. Remembers the requests.
#[derive(Clone)]
struct Authority {
    pki: Arc<Pki>,
    answer: Arc<Lock<Option<Answer>>>,
    asked: Arc<Lock<Vec<(String, IstioCertificateRequest)>>>,
}

#[tonic::async_trait]
impl IstioCertificateService for Authority {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let token = request.metadata().get("authorization").unwrap().to_str().unwrap().to_owned();
        let asked = request.into_inner();
        let csr = CertificateSigningRequestParams::from_pem(&asked.csr).unwrap();
        self.asked.lock().unwrap().push((token, asked));
        let answer = self.answer.lock().unwrap().clone();
        let cert_chain = answer.unwrap_or_else(|| {
            let leaf = csr.signed_by(&self.pki.0).unwrap();
            Ok(vec![leaf.pem(), self.pki.root_pem()])
        })?;
        Ok(Response::new(IstioCertificateResponse { cert_chain }))
    }
}

struct World {
    authority: Authority,
    server: TestServer,
    client: CaClient,
    folder: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let pki = Arc::new(Pki::new());
        let authority =
            Authority { pki: Arc::clone(&pki), answer: Arc::default(), asked: Arc::default() };
        let service = IstioCertificateServiceServer::new(authority.clone());
        let server =
            TestServer::start(([127, 0, 0, 1], 0).into(), pki.server("localhost"), service).await;
        let folder = tempfile::tempdir().unwrap();
        let (root, token) = (folder.path().join("root.pem"), folder.path().join("token"));
        std::fs::write(&root, pki.root_pem()).unwrap();
        std::fs::write(&token, "one").unwrap();
        let to = testing::server(server.address, Roots::File(root), Some(Token::File(token)));
        Self { authority, server, client: CaClient::new(to, Duration::from_hours(2)), folder }
    }

    fn answers(&self, answer: Answer) {
        *self.authority.answer.lock().unwrap() = Some(answer);
    }

    async fn issue(&self) -> Result<Issued, CaError> {
        self.client.request(&identity()).await
    }
}

fn identity() -> Identity {
    "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap()
}

#[tokio::test]
async fn a_certificate_is_asked_for_in_the_name_of_the_pod() {
    let world = World::new().await;
    let World { authority, client, server: _server, folder: _folder } = world;
    // The store checks that identity, key and roots fit.
    let credential = Certificates::new(client).fetch(&identity()).await.unwrap();
    assert_eq!(credential.identity(), &identity());
    assert_eq!((credential.chain().len(), credential.roots().len()), (1, 1));
    let (token, asked) = authority.asked.lock().unwrap().pop().unwrap();
    assert_eq!(token, "Bearer one");
    assert_eq!(asked.validity_duration, 7200);
    let fields = asked.metadata.unwrap().fields;
    let for_whom = Some(Kind::StringValue("spiffe://cluster.local/ns/shop/sa/web".into()));
    assert_eq!(fields["ImpersonatedIdentity"].kind, for_whom);
    assert!(!asked.csr.contains("PRIVATE"));
}

#[tokio::test]
async fn calls_share_a_connection_until_it_or_the_roots_go_and_each_has_the_token_of_its_time() {
    let mut world = World::new().await;
    world.issue().await.unwrap();
    std::fs::write(world.folder.path().join("token"), "two").unwrap();
    world.issue().await.unwrap();
    assert_eq!(world.server.accepted(), 1);
    let more = Pki::new().root_pem() + &world.authority.pki.root_pem();
    std::fs::write(world.folder.path().join("root.pem"), more).unwrap();
    world.issue().await.unwrap();
    assert_eq!(world.server.accepted(), 2);
    let address = world.server.kill().await;
    let service = IstioCertificateServiceServer::new(world.authority.clone());
    let tls = world.authority.pki.server("localhost");
    world.server = TestServer::start(address, tls, service).await;
    let again = async {
        // The first call may still find the connection that is about to be seen as gone.
        while world.issue().await.is_err() {}
    };
    timeout(testing::PATIENCE, again).await.unwrap();
    assert_eq!(world.server.accepted(), 1);
    let tokens: Vec<_> =
        world.authority.asked.lock().unwrap().iter().map(|(token, _)| token.clone()).collect();
    assert_eq!(tokens, ["Bearer one", "Bearer two", "Bearer two", "Bearer two"]);
}

#[tokio::test]
async fn each_certificate_has_a_key_of_its_own() {
    let world = World::new().await;
    let (one, two) = tokio::join!(world.issue(), world.issue());
    assert_ne!(one.unwrap().key.secret_der(), two.unwrap().key.secret_der());
    assert_eq!(world.server.accepted(), 1);
}

#[tokio::test]
async fn refusals_say_what_to_look_at() {
    let world = World::new().await;
    for (status, want) in [
        (Status::unauthenticated("bad token"), "does not accept this node's token: bad token"),
        (
            Status::permission_denied("no pod"),
            "no certificate for spiffe://cluster.local/ns/shop/sa/web: no pod",
        ),
        (Status::unavailable("later"), "is unavailable: later"),
        (Status::resource_exhausted("later"), "is unavailable: later"),
        (Status::internal("broken"), "failed: broken"),
    ] {
        world.answers(Err(status));
        let error = world.issue().await.unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[tokio::test]
async fn answers_that_are_no_chain_are_refused() {
    let world = World::new().await;
    let root = world.authority.pki.root_pem();
    for (chain, want) in [
        (vec![], "no chain of a certificate and its root"),
        (vec![root.clone()], "no chain of a certificate and its root"),
        (vec![root.clone(), String::new()], "an element without a certificate"),
        (vec!["nonsense".to_owned(), root.clone()], "an element without a certificate"),
        (
            vec![
                "-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n".to_owned(),
                root.clone(),
            ],
            "an element that is not PEM",
        ),
    ] {
        world.answers(Ok(chain));
        let error = world.issue().await.unwrap_err().to_string();
        assert!(error.ends_with(want), "{error}");
    }
    // Intermediates stay between the leaf and the roots, of which there may be several.
    world.answers(Ok(vec![root.clone(), root.clone(), root.clone() + &root]));
    let issued = world.issue().await.unwrap();
    assert_eq!((issued.chain.len(), issued.roots.len()), (2, 2));
}
