//! The record of what was issued: one JSON line a certificate, on disk before the certificate is given.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use culvert_mesh::Identity;
use serde_json::json;

use crate::callers::Caller;

const FILE: &str = "issued.jsonl";
const OLD_FILE: &str = "issued.1.jsonl";
/// Some 300 000 certificates; two such files are kept.
const MAX_SIZE: u64 = 64 << 20;

/// The record cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("write the record of certificates in {}", path.display())]
pub struct AuditError {
    path: PathBuf,
    source: io::Error,
}

/// The record.
#[derive(Debug)]
pub(super) struct Audit {
    dir: PathBuf,
    file: Mutex<(File, u64)>,
}

/// One certificate.
pub(super) struct Issued<'a> {
    pub(super) serial: &'a str,
    pub(super) identity: &'a Identity,
    pub(super) caller: &'a Caller,
    pub(super) not_after: SystemTime,
}

impl Audit {
    pub(super) fn open(dir: &Path) -> Result<Self, AuditError> {
        let file = open(dir)?;
        Ok(Self { dir: dir.to_owned(), file: Mutex::new(file) })
    }

    pub(super) fn note(&self, issued: &Issued<'_>) -> Result<(), AuditError> {
        let seconds =
            |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let line = json!({
            "time": seconds(SystemTime::now()),
            "serial": issued.serial,
            "identity": issued.identity.uri(),
            "caller": issued.caller.to_string(),
            "notAfter": seconds(issued.not_after),
        });
        let line = format!("{line}\n");
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.1 > MAX_SIZE {
            let path = self.dir.join(FILE);
            std::fs::rename(&path, self.dir.join(OLD_FILE))
                .map_err(|source| AuditError { path, source })?;
            *file = open(&self.dir)?;
        }
        file.0
            .write_all(line.as_bytes())
            .map_err(|source| AuditError { path: self.dir.join(FILE), source })?;
        file.1 += u64::try_from(line.len()).unwrap_or_default();
        Ok(())
    }
}

fn open(dir: &Path) -> Result<(File, u64), AuditError> {
    let path = dir.join(FILE);
    let opened = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    let file = opened.and_then(|file| Ok((file.metadata()?.len(), file)));
    file.map(|(length, file)| (file, length)).map_err(|source| AuditError { path, source })
}
