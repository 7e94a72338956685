//! The file of revocation lists, kept in step with what TLS refuses. What a list means is `culvert-tls`'s.

use std::{io, path::PathBuf};

use culvert_tls::{RevocationError, Revocations};

use crate::{error::chain, watch::WatchedFile};

/// Why the file gave no lists.
#[derive(Debug, thiserror::Error)]
pub enum RevocationFileError {
    /// It could not be read.
    #[error("read revocation lists in {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// What is in it cannot be used.
    #[error("use revocation lists in {}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: RevocationError,
    },
}

/// The file, followed.
pub(crate) struct RevocationFile {
    file: WatchedFile,
    revocations: Revocations,
}

impl RevocationFile {
    /// Reads the file for the first time, when a mistake in it is still an error. One that is not there yet revokes
    /// nothing until it is.
    pub(crate) fn open(path: PathBuf) -> Result<(Self, Revocations), RevocationFileError> {
        let revocations = Revocations::none();
        let mut this = Self { file: WatchedFile::new(path), revocations: revocations.clone() };
        let read = this.file.read_bytes();
        match this.use_lists(read) {
            Err(RevocationFileError::Read { path, source })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                tracing::warn!(path = %path.display(), "no revocation lists yet: nothing is revoked");
            }
            read => read?,
        }
        Ok((this, revocations))
    }

    /// Follows the file: a good new version takes effect on new and on open connections, a bad one leaves the last good
    /// one in force and says so.
    pub(crate) async fn run(mut self) {
        loop {
            let read = self.file.bytes_changed().await;
            if let Err(error) = self.use_lists(read) {
                let error = chain(&error);
                tracing::error!(error, "revocation lists refused; keeping the last good ones");
            }
        }
    }

    fn use_lists(&self, read: io::Result<Vec<u8>>) -> Result<(), RevocationFileError> {
        let path = || self.file.path().to_owned();
        let bytes = read.map_err(|source| RevocationFileError::Read { path: path(), source })?;
        let lists = self.revocations.replace(&bytes);
        let lists =
            lists.map_err(|source| RevocationFileError::Refused { path: path(), source })?;
        tracing::info!(lists, "revocation lists loaded");
        Ok(())
    }
}
