//! Which sources follow from which arguments.

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    control: ControlArgs,
}

fn parse(words: &[&str], environment: &[(&str, &str)]) -> Result<Control, ControlError> {
    let mut args = Line::parse_from(std::iter::once(&"culvert").chain(words)).control;
    // Whatever the machine of the test says.
    let given = |flag: &str| words.contains(&flag);
    if !given("--kubernetes") {
        args.kubernetes = None;
    }
    let environment = environment.iter().map(|(key, value)| (key.into(), value.into()));
    Control::new(args, "n1", "c1", environment)
}

/// Mesh file, control plane and authority.
fn sources(words: &[&str]) -> Result<(bool, Option<String>, String), String> {
    let control = parse(words, &[]).map_err(|error| culvert_mesh::error::chain(&error))?;
    let ca = match control.ca {
        Ca::Dir(dir) => dir.display().to_string(),
        Ca::Server(server) => server.address.to_string(),
    };
    Ok((control.mesh.is_some(), control.xds.map(|xds| xds.server.address.to_string()), ca))
}

#[test]
fn mesh_and_certificates_come_from_what_is_given() {
    let found =
        |mesh, xds: Option<&str>, ca: &str| Ok((mesh, xds.map(str::to_owned), ca.to_owned()));
    let istiod = ["--kubernetes", "10.0.0.1"];
    for (words, want) in [
        (&["--mesh", "m", "--ca-dir", "d"][..], found(true, None, "d")),
        (
            &["--xds-address", "x:1", "--ca-address", "https://c:2"],
            found(false, Some("https://x:1"), "https://c:2"),
        ),
        (
            &["--mesh", "m", "--xds-address", "x:1", "--ca-dir", "d"],
            found(true, Some("https://x:1"), "d"),
        ),
        (&["--mesh", "m", "--xds-address", "", "--ca-dir", "d"], found(true, None, "d")),
        (
            &["--mesh", "", "--xds-address", "x:1", "--ca-dir", "d"],
            found(false, Some("https://x:1"), "d"),
        ),
        (&istiod, found(false, Some(ISTIOD), ISTIOD)),
        (&["--kubernetes", "h", "--mesh", "m", "--ca-dir", "d"], found(true, None, "d")),
        (&["--kubernetes", "h", "--mesh", "m"], found(true, None, ISTIOD)),
    ] {
        assert_eq!(sources(words), want, "{words:?}");
    }
}

#[test]
fn contradictions_and_gaps_are_refused_with_the_flags() {
    for (words, want) in [
        (&[][..], "nothing tells of the mesh"),
        (&["--ca-dir", "d"], "nothing tells of the mesh"),
        (&["--kubernetes", "h", "--xds-address", ""], "nothing tells of the mesh"),
        (&["--mesh", "m"], "nothing signs certificates"),
        (&["--mesh", "m", "--ca-address", ""], "nothing signs certificates"),
        (&["--mesh", "m", "--ca-dir", "d", "--ca-address", "c"], "contradict each other"),
        (
            &["--mesh", "m", "--ca-dir", "d", "--xds-on-demand"],
            "--xds-on-demand needs --xds-address",
        ),
        (
            &["--xds-address", "http://x", "--ca-dir", "d"],
            "--xds-address: \"http://x\" is not https",
        ),
        (&["--mesh", "m", "--ca-address", "a b"], "--ca-address: \"a b\" is not an address"),
    ] {
        let error = sources(words).unwrap_err();
        assert!(error.contains(want), "{words:?}: {error}");
    }
}

#[test]
fn variables_describe_the_node_and_add_headers() {
    let words =
        ["--xds-address", "x:1", "--ca-address", "c:1", "--pod-name", "p", "--auth-token", "t0ken"];
    let set = [
        ("ISTIO_META_A", "1"),
        ("ISTIO_METAJSON_B", "{\"c\": [1]}"),
        ("XDS_HEADER_x-one", "hidden"),
        ("CA_HEADER_x-two", "2"),
        ("OTHER", "3"),
    ];
    let control = parse(&words, &set).unwrap();
    let xds = control.xds.as_ref().unwrap();
    assert_eq!(xds.node.metadata.get("A").map(String::as_str), Some("1"));
    assert_eq!(xds.node.structured.len(), 1);
    assert_eq!(xds.server.headers[0].0, "x-one");
    let Ca::Server(ca) = &control.ca else { panic!("{control:?}") };
    assert_eq!(ca.headers[0].0, "x-two");
    assert_eq!(ca.cluster_id, "c1");
    let shown = format!("{control:?}");
    assert!(!shown.contains("t0ken") && !shown.contains("hidden"), "{shown}");
    for (name, value, want) in [
        ("ISTIO_METAJSON_B", "{", "ISTIO_METAJSON_B: must be JSON"),
        ("XDS_HEADER_x y", "1", "XDS_HEADER_x y"),
        ("CA_HEADER_x", "a\nb", "CA_HEADER_x"),
    ] {
        let error = parse(&words, &[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn roots_and_tokens_are_files_or_texts() {
    assert_eq!(roots("SYSTEM"), Roots::System);
    assert_eq!(roots("/x/root.pem"), Roots::File("/x/root.pem".into()));
    assert!(matches!(roots("-----BEGIN CERTIFICATE-----"), Roots::Pem(_)));
    assert_eq!(token("./not/there/yet"), Token::File("./not/there/yet".into()));
    assert_eq!(token("eyJhbGciOi"), Token::Text("eyJhbGciOi".into()));
}
