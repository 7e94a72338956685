use super::*;

fn web() -> Identity {
    "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap()
}

fn created() -> (tempfile::TempDir, Authority) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::create(dir.path(), "culvert test root").unwrap();
    (dir, authority)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// Damages a fresh authority's folder, then says what `load` makes of it, with the folder's name cut out.
#[track_caller]
fn check(damage: impl FnOnce(&Path), want: &str) {
    let (dir, _) = created();
    damage(dir.path());
    let error = Authority::load(dir.path()).map(|_| ()).unwrap_err();
    let text = error.to_string().replace(&format!("{}/", dir.path().display()), "");
    assert!(text.contains(want), "{text:?} does not say {want:?}");
}

fn replace_root(dir: &Path, change: impl FnOnce(&mut CertificateParams)) {
    let key = KeyPair::from_pem(&fs::read_to_string(dir.join(KEY_FILE)).unwrap()).unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    change(&mut params);
    fs::write(dir.join(ROOT_FILE), params.self_signed(&key).unwrap().pem()).unwrap();
}

#[test]
fn created_files_are_readable_as_they_should_be() {
    let (dir, _) = created();
    assert_eq!(
        (mode(&dir.path().join(KEY_FILE)), mode(&dir.path().join(ROOT_FILE)) & 0o600),
        (0o600, 0o600)
    );
}

#[test]
fn created_root_is_valid_for_ten_years() {
    let (_dir, authority) = created();
    let left = authority.not_after.duration_since(SystemTime::now()).unwrap();
    assert!(
        left > Duration::from_hours(24 * 3649) && left < Duration::from_hours(24 * 3651),
        "{left:?}"
    );
}

#[test]
fn an_existing_authority_is_not_overwritten() {
    for present in [ROOT_FILE, KEY_FILE] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(present), "mine").unwrap();
        let error = Authority::create(dir.path(), "other").unwrap_err();
        assert!(
            matches!(error, AuthorityError::Exists(ref path) if path.ends_with(present)),
            "{error}"
        );
        assert_eq!(fs::read(dir.path().join(present)).unwrap(), b"mine");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn unusable_folders_are_refused_with_the_file_and_the_remedy() {
    check(
        |dir| fs::remove_file(dir.join(ROOT_FILE)).unwrap(),
        "ca.pem is missing; put the mesh's root",
    );
    check(
        |dir| fs::remove_file(dir.join(KEY_FILE)).unwrap(),
        "ca-key.pem is missing; put the mesh's root",
    );
    check(
        |dir| {
            fs::remove_file(dir.join(ROOT_FILE)).unwrap();
            fs::create_dir(dir.join(ROOT_FILE)).unwrap();
        },
        "read ca.pem",
    );
    for exposed in [0o640, 0o604, 0o644] {
        check(
            |dir| {
                fs::set_permissions(dir.join(KEY_FILE), fs::Permissions::from_mode(exposed))
                    .unwrap();
            },
            &format!(
                "ca-key.pem is accessible to others (mode {exposed:03o}); run `chmod 600` on it"
            ),
        );
    }
    check(
        |dir| fs::write(dir.join(ROOT_FILE), "").unwrap(),
        "ca.pem holds no usable certificate: no certificate in it",
    );
    check(
        |dir| fs::write(dir.join(KEY_FILE), "junk").unwrap(),
        "ca-key.pem holds no usable key: no items found",
    );
    check(
        |dir| {
            fs::write(
                dir.join(ROOT_FILE),
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            )
            .unwrap();
        },
        "ca.pem holds no usable certificate: ",
    );
    check(
        |dir| {
            let other = KeyPair::generate().unwrap().serialize_pem();
            fs::write(dir.join(KEY_FILE), other).unwrap();
        },
        "ca-key.pem is not the key of ca.pem; replace one of them",
    );
    check(
        |dir| replace_root(dir, |params| params.is_ca = IsCa::ExplicitNoCa),
        "ca.pem does not start with a certificate authority",
    );
    check(
        |dir| {
            replace_root(dir, |params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]);
        },
        "ca.pem does not start with a certificate authority",
    );
    check(
        |dir| replace_root(dir, |params| params.not_after = rcgen::date_time_ymd(2001, 1, 1)),
        "ca.pem is not valid now; replace it",
    );
}

#[test]
fn every_certificate_of_the_root_file_is_a_root() {
    let (dir, authority) = created();
    let (other_dir, other) = created();
    let mut pem = fs::read_to_string(dir.path().join(ROOT_FILE)).unwrap();
    pem.push_str(&fs::read_to_string(other_dir.path().join(ROOT_FILE)).unwrap());
    fs::write(dir.path().join(ROOT_FILE), pem).unwrap();
    let roots = Authority::load(dir.path()).unwrap().issue(&web()).unwrap().roots;
    assert_eq!(roots, [authority.roots(), other.roots()].concat());
}

#[test]
fn a_leaf_names_its_identity_and_nothing_else() {
    let (_dir, authority) = created();
    let issued = authority.issue(&web()).unwrap();
    assert_eq!(issued.chain.len(), 1);
    let leaf = x509::parse(&issued.chain[0]).unwrap();
    let names = leaf.subject_alternative_name().unwrap().unwrap();
    assert!(names.critical);
    assert_eq!(names.value.general_names.len(), 1);
    assert_eq!(x509::identities(&leaf), [web()]);
    assert_eq!(leaf.subject().iter().count(), 0);
}

#[test]
fn a_leaf_serves_both_sides_and_signs_nothing() {
    let (_dir, authority) = created();
    let issued = authority.issue(&web()).unwrap();
    let leaf = x509::parse(&issued.chain[0]).unwrap();
    let usage = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.server_auth && usage.client_auth && !usage.any);
    assert!(!may_sign(&leaf).unwrap());
}

#[test]
fn a_leaf_lives_for_its_ttl_and_never_longer_than_the_root() {
    let (_dir, authority) = created();
    let root_end = authority.not_after;
    let cases = [
        (None, Duration::from_hours(24)),
        (Some(Duration::from_hours(1)), Duration::from_hours(1)),
        (
            Some(Duration::from_hours(24 * 365 * 50)),
            root_end.duration_since(SystemTime::now()).unwrap(),
        ),
        (Some(Duration::MAX), root_end.duration_since(SystemTime::now()).unwrap()),
    ];
    let mut authority = authority;
    for (ttl, want) in cases {
        if let Some(ttl) = ttl {
            authority = authority.with_ttl(ttl);
        }
        let issued = authority.issue(&web()).unwrap();
        let (not_before, not_after) = x509::validity(&x509::parse(&issued.chain[0]).unwrap());
        let got = not_after.duration_since(not_before).unwrap();
        let drift = got.abs_diff(want + BACKDATE);
        assert!(drift <= Duration::from_secs(5), "{ttl:?}: {got:?}, not {want:?}");
        assert!(not_before + BACKDATE <= SystemTime::now());
    }
}

#[test]
fn each_leaf_has_its_own_key_and_serial() {
    let (_dir, authority) = created();
    let (one, two) = (authority.issue(&web()).unwrap(), authority.issue(&web()).unwrap());
    assert_ne!(one.key, two.key);
    let serial = |issued: &Issued| x509::parse(&issued.chain[0]).unwrap().tbs_certificate.serial;
    assert_ne!(serial(&one), serial(&two));
}

#[test]
fn debug_output_holds_no_key() {
    let (_dir, authority) = created();
    let issued = authority.issue(&web()).unwrap();
    let der = issued.key.secret_der();
    let text = format!("{authority:?} {issued:?} {issued:#?}");
    // Derived output would list the bytes in decimal or hex, or say that there is a key.
    let decimal = der[..8].iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    assert!(!text.contains(&decimal) && !text.contains("key"), "{text}");
}
