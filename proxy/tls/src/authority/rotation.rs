//! A new root takes the old one's place, in steps that no node notices.
//!
//! ```text
//!  ca.pem: old       prepare      ca.pem: old, new     activate     ca.pem: new, old     finish     ca.pem: new
//!  ca-key: old      ─────────▶    ca-key: old         ─────────▶    ca-key: new         ────────▶   ca-key: new
//!                                 next-ca-key: new
//! ```
//!
//! Between two steps every certificate is renewed at least once, and with it the roots that its holder trusts.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::{
    Authority, AuthorityError, KEY_FILE, LEAF_LIFETIME, ROOT_FILE, read, unreadable, write_new,
};

const NEXT_KEY_FILE: &str = "next-ca-key.pem";

/// The step that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotated {
    /// The new root is told to everybody, and signs nothing.
    Prepared,
    /// The new root signs; the old one is still trusted.
    Activated,
    /// The old root is gone.
    Finished,
}

impl Authority {
    /// Takes the next step of a rotation of the authority in `dir`.
    ///
    /// `Activated` and `Finished` want that the step before was at least a leaf's life (24 hours, or what `wait` says)
    /// ago.
    pub fn rotate(
        dir: &Path,
        common_name: &str,
        wait: Option<Duration>,
    ) -> Result<Rotated, AuthorityError> {
        let root_path = dir.join(ROOT_FILE);
        let next_key_path = dir.join(NEXT_KEY_FILE);
        let wait = wait.unwrap_or(LEAF_LIFETIME);
        let pems =
            pem::parse_many(read(&root_path)?).map_err(|error| AuthorityError::Malformed {
                path: root_path.clone(),
                what: "certificate",
                reason: error.to_string(),
            })?;
        let roots: Vec<_> =
            pems.iter().map(|pem| CertificateDer::from(pem.contents().to_vec())).collect();

        if next_key_path.exists() {
            long_ago(&next_key_path, wait)?;
            let next = of_key(&roots, &next_key_path)?;
            let others = roots.iter().enumerate().filter(|(index, _)| *index != next);
            let ordered: Vec<_> =
                roots.get(next).into_iter().chain(others.map(|(_, root)| root)).collect();
            // A crash in between leaves a key that is not the first root's; the step can be taken again.
            replace(&root_path, 0o644, &encode(&ordered))?;
            fs::rename(&next_key_path, dir.join(KEY_FILE))
                .map_err(|source| AuthorityError::Write { path: next_key_path, source })?;
            return Ok(Rotated::Activated);
        }
        if roots.len() > 1 {
            long_ago(&root_path, wait)?;
            Self::load(dir)?;
            let first: Vec<_> = roots.iter().take(1).collect();
            replace(&root_path, 0o644, &encode(&first))?;
            return Ok(Rotated::Finished);
        }
        Self::load(dir)?;
        let (root, key) = Self::make_root(common_name)?;
        write_new(&next_key_path, 0o600, &key.serialize_pem())?;
        let new = CertificateDer::from(root);
        let both: Vec<_> = roots.iter().chain([&new]).collect();
        if let Err(error) = replace(&root_path, 0o644, &encode(&both)) {
            // A key whose root nobody knows would be activated next.
            drop(fs::remove_file(&next_key_path));
            return Err(error);
        }
        Ok(Rotated::Prepared)
    }
}

/// Which of `roots` is of the key at `path`.
fn of_key(roots: &[CertificateDer<'_>], path: &Path) -> Result<usize, AuthorityError> {
    let malformed =
        |reason: String| AuthorityError::Malformed { path: path.to_owned(), what: "key", reason };
    let key = rustls_pki_types::PrivateKeyDer::from_pem_slice(&read(path)?)
        .map_err(|error| malformed(error.to_string()))?;
    let key = rcgen::KeyPair::try_from(&key).map_err(|error| malformed(error.to_string()))?;
    let of_key = |root: &CertificateDer<'_>| {
        use rcgen::PublicKeyData as _;
        crate::x509::parse(root)
            .is_ok_and(|root| root.public_key().raw == key.subject_public_key_info())
    };
    let found = roots.iter().position(of_key);
    found.ok_or_else(|| malformed("it is of none of the roots; remove it to begin again".into()))
}

fn encode(roots: &[&CertificateDer<'_>]) -> String {
    let pems = roots.iter().map(|root| pem::Pem::new("CERTIFICATE", root.to_vec()));
    pem::encode_many(&pems.collect::<Vec<_>>())
}

fn long_ago(path: &Path, wait: Duration) -> Result<(), AuthorityError> {
    let written = fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .map_err(|source| unreadable(path, source))?;
    let age = SystemTime::now().duration_since(written).unwrap_or_default();
    if age >= wait { Ok(()) } else { Err(AuthorityError::TooEarly(wait)) }
}

/// Replaces a file as a whole.
fn replace(path: &Path, mode: u32, text: &str) -> Result<(), AuthorityError> {
    let fresh = path.with_extension("new");
    if let Err(error) = fs::remove_file(&fresh)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(AuthorityError::Write { path: fresh, source: error });
    }
    write_new(&fresh, mode, text)?;
    fs::rename(&fresh, path)
        .map_err(|source| AuthorityError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

    fn roots(dir: &Path) -> Vec<CertificateDer<'static>> {
        Authority::load(dir).unwrap().roots().to_vec()
    }

    #[test]
    fn a_root_is_told_before_it_signs_and_trusted_after() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let old = Authority::create(dir, "old").unwrap().roots()[0].clone();

        assert_eq!(Authority::rotate(dir, "new", AT_ONCE).unwrap(), Rotated::Prepared);
        let both = roots(dir);
        assert_eq!((both.len(), &both[0]), (2, &old), "the old root signs");
        let mode = fs::metadata(dir.join(NEXT_KEY_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        assert_eq!(Authority::rotate(dir, "new", AT_ONCE).unwrap(), Rotated::Activated);
        let turned = roots(dir);
        assert_eq!(turned, [both[1].clone(), old], "the new root signs");

        assert_eq!(Authority::rotate(dir, "new", AT_ONCE).unwrap(), Rotated::Finished);
        assert_eq!(roots(dir), [both[1].clone()]);
    }

    #[test]
    fn a_step_waits_until_every_node_knows_of_the_last() {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path(), "old").unwrap();
        Authority::rotate(dir.path(), "new", None).unwrap();
        let before = roots(dir.path());
        let early = Authority::rotate(dir.path(), "new", None);
        assert!(matches!(early, Err(AuthorityError::TooEarly(_))), "{early:?}");
        assert_eq!(roots(dir.path()), before);
    }

    #[test]
    fn an_interrupted_activation_is_taken_up_again() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        Authority::create(dir, "old").unwrap();
        Authority::rotate(dir, "new", AT_ONCE).unwrap();
        let [old, new] = <[_; 2]>::try_from(roots(dir)).unwrap();
        replace(&dir.join(ROOT_FILE), 0o644, &encode(&[&new, &old])).unwrap();
        assert_eq!(Authority::rotate(dir, "new", AT_ONCE).unwrap(), Rotated::Activated);
        assert_eq!(roots(dir), [new, old]);
    }
}
