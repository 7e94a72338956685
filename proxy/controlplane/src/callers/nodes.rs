//! Tokens of machines, which a file names: what a node is known by where there is no Kubernetes.

use std::{
    collections::HashMap,
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

/// Short ones can be guessed.
const MIN_TOKEN: usize = 16;

/// Why the file of tokens cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// It cannot be read.
    #[error("read the nodes' tokens in {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others may read it.
    #[error("{} is accessible to others (mode {mode:03o}); run `chmod 600` on it", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It says something else. What it says is not repeated.
    #[error("{} is not a YAML mapping of nodes to tokens of at least {MIN_TOKEN} characters, each its own", .0.display())]
    Malformed(PathBuf),
}

/// The tokens, known by their digests alone.
#[derive(Debug)]
pub(super) struct Nodes {
    path: PathBuf,
    seen: (u64, u64, i64, i64),
    by_digest: HashMap<[u8; 32], String>,
}

impl Nodes {
    pub(super) fn open(path: PathBuf) -> Result<Self, NodesError> {
        let (seen, by_digest) = read(&path)?;
        Ok(Self { path, seen, by_digest })
    }

    /// Reads the file again if it changed.
    pub(super) fn refresh(&mut self) -> Result<(), NodesError> {
        let metadata = std::fs::metadata(&self.path)
            .map_err(|source| NodesError::Read { path: self.path.clone(), source })?;
        let now = version(&metadata);
        if now != self.seen {
            // Once, even if it is bad: it would be reported for ever.
            self.seen = now;
            self.by_digest = read(&self.path)?.1;
        }
        Ok(())
    }

    /// The node that `token` is of. Looked up by digest, so that the time it takes tells nothing of other tokens.
    pub(super) fn find(&self, token: &str) -> Option<&str> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        self.by_digest.get(&digest).map(String::as_str)
    }
}

type Read = ((u64, u64, i64, i64), HashMap<[u8; 32], String>);

fn read(path: &Path) -> Result<Read, NodesError> {
    let failed = |source| NodesError::Read { path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(NodesError::Exposed { path: path.to_owned(), mode });
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let malformed = || NodesError::Malformed(path.to_owned());
    // The parser's error might quote a token.
    let nodes: HashMap<String, String> =
        serde_saphyr::from_str(&text).ok().ok_or_else(malformed)?;
    let count = nodes.len();
    let by_digest: HashMap<_, _> = nodes
        .into_iter()
        .filter(|(node, token)| !node.is_empty() && token.len() >= MIN_TOKEN)
        .map(|(node, token)| (Sha256::digest(token).into(), node))
        .collect();
    if by_digest.len() < count {
        return Err(malformed());
    }
    Ok((version(&metadata), by_digest))
}

fn version(metadata: &Metadata) -> (u64, u64, i64, i64) {
    (metadata.ino(), metadata.size(), metadata.mtime(), metadata.mtime_nsec())
}
