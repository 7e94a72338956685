//! Addresses, credentials, and connections to servers that are not what they should be.

use std::path::Path;

use super::*;
use crate::testing::{self, Pki, TestServer, ads};

#[test]
fn addresses_are_https_and_nothing_else() {
    for (text, want) in [
        ("https://istiod.istio-system.svc:15012", Ok("https://istiod.istio-system.svc:15012")),
        ("istiod:15012", Ok("https://istiod:15012")),
        ("istiod", Ok("https://istiod:443")),
        ("https://10.0.0.1:1/", Ok("https://10.0.0.1:1")),
        ("https://[fd00::1]:1", Ok("https://[fd00::1]:1")),
        ("http://istiod:15010", Err("is not https")),
        ("unix:///x", Err("is not an address")),
        ("https://a/path", Err("is not an address")),
        ("https://a?q", Err("is not an address")),
        ("https://user@a:1", Err("is not an address")),
        ("https://a:x", Err("is not an address")),
        ("https://a:99999", Err("is not an address")),
        ("https://", Err("is not an address")),
        ("", Err("is not an address")),
        ("a b", Err("is not an address")),
    ] {
        let got = text.parse::<Address>().map_err(|error| error.to_string());
        match (&got, want) {
            (Ok(address), Ok(want)) => assert_eq!(address.to_string(), want),
            (Err(error), Err(want)) => assert!(error.contains(want), "{text}: {error}"),
            _ => panic!("{text}: {got:?}"),
        }
    }
}

#[tokio::test]
async fn tokens_that_cannot_be_sent_are_refused_and_never_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    let token = Token::File(path.clone());
    assert!(token.header().await.unwrap_err().to_string().contains("read "));
    for (contents, usable) in [("", false), (" \n", false), ("a\nb", false), ("secret\n", true)] {
        std::fs::write(&path, contents).unwrap();
        match token.header().await {
            Ok(header) => {
                assert!(usable, "{contents:?}");
                assert_eq!(header, "Bearer secret");
                assert!(header.is_sensitive());
                assert!(!format!("{header:?}").contains("secret"));
            }
            Err(error) => assert!(!usable && error.to_string().contains("no token"), "{error}"),
        }
    }
    assert!(!format!("{:?}", Token::Text("secret".into())).contains("secret"));
}

#[tokio::test]
async fn roots_are_a_file_a_text_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("root.pem");
    std::fs::write(&path, "no certificate").unwrap();
    let empty = Roots::File(path.clone()).load().await.unwrap_err().to_string();
    assert!(empty.contains("root.pem") && empty.contains("no usable certificate"), "{empty}");
    let pem = Pki::new().root_pem() + &Pki::new().root_pem();
    std::fs::write(&path, &pem).unwrap();
    assert_eq!(Roots::File(path).load().await.unwrap().len(), 2);
    assert_eq!(Roots::Pem(pem).load().await.unwrap().len(), 2);
    assert!(Roots::File(Path::new("/nowhere").into()).load().await.is_err());
}

/// What becomes of a connection to a server called `name`, dialled by its address and maybe known as `alternative`.
async fn connect(name: &str, alternative: Option<&str>) -> Result<(), String> {
    let pki = Pki::new();
    let (service, _streams) = ads();
    let running = TestServer::start(([127, 0, 0, 1], 0).into(), pki.server(name), service).await;
    let mut to = testing::server(running.address, Roots::Pem(pki.root_pem()), None);
    to.alternative_name = alternative.map(str::to_owned);
    let connected = to.connect().await;
    connected.map(drop).map_err(|error| culvert_mesh::error::chain(&error))
}

#[tokio::test]
async fn a_server_is_proved_by_its_address_or_by_its_alternative_name() {
    assert_eq!(connect("127.0.0.1", None).await, Ok(()));
    assert_eq!(connect("127.0.0.1", Some("istiod")).await, Ok(()));
    assert_eq!(connect("istiod", Some("istiod")).await, Ok(()));
    for alternative in [None, Some("other")] {
        let error = connect("istiod", alternative).await.unwrap_err();
        assert!(error.contains("not valid for name"), "{error}");
    }
    let error = connect("istiod", Some("not a name")).await.unwrap_err();
    assert!(error.contains("is not a host name"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up() {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let pem = Pki::new().root_pem();
    let to = testing::server(listener.local_addr().unwrap(), Roots::Pem(pem), None);
    let error = to.connect().await.err().unwrap();
    assert!(matches!(error, ConnectError::Deadline { .. }), "{error}");
}
