//! Where this machine gets Debian's packages from: read from apt's own sources, so that no mirror is named here.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Where apt keeps its sources.
const APT: &str = "/etc/apt";

/// Names of Debian's releases, as sources spell them.
const RELEASES: [&str; 9] = [
    "stable",
    "oldstable",
    "testing",
    "unstable",
    "sid",
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
];

/// One place with packages of Debian.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Source {
    uri: String,
    suites: Vec<String>,
    /// As it stands there: a file, or a whole key.
    signed_by: Option<String>,
}

impl Source {
    /// An apt source in the deb822 format for `suite` at the same place.
    pub(super) fn with_suite(&self, suite: &str) -> String {
        let key = self.signed_by.as_ref().map(|key| format!("Signed-By: {key}\n"));
        format!(
            "Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n{}",
            self.uri,
            key.unwrap_or_default()
        )
    }

    /// Security updates of every release are in a place of their own.
    fn may_have(&self, suite: &str) -> bool {
        let security = |suite: &str| suite.ends_with("-security");
        self.suites.iter().any(|own| security(own) == security(suite))
    }

    fn is_debian(&self) -> bool {
        self.suites.iter().any(|suite| {
            RELEASES.contains(&suite.split_once('-').map_or(suite.as_str(), |(release, _)| release))
        })
    }
}

/// The machine's sources that may have `suite`, in its own order.
pub(super) fn of_machine(suite: &str) -> Result<Vec<Source>> {
    let mut files = vec![PathBuf::from(APT).join("sources.list")];
    let parts = Path::new(APT).join("sources.list.d");
    if parts.is_dir() {
        let entries = fs::read_dir(&parts).with_context(|| format!("read {}", parts.display()))?;
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut sources = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let read = || fs::read_to_string(file).with_context(|| format!("read {}", file.display()));
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(read()?.lines().filter_map(one_line)),
            Some("sources") => sources.extend(read()?.split("\n\n").flat_map(stanza)),
            _ => {}
        }
    }
    sources.retain(|source| source.is_debian() && source.may_have(suite));
    Ok(sources)
}

/// `deb [signed-by=FILE] URI SUITE COMPONENT...`
fn one_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim().strip_prefix("deb ")?.trim();
    let (options, rest) = match line.strip_prefix('[') {
        Some(options) => options.split_once(']')?,
        None => ("", line),
    };
    let mut words = rest.split_whitespace();
    let source = Source {
        uri: words.next()?.to_owned(),
        suites: vec![words.next()?.to_owned()],
        signed_by: options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned),
    };
    words.any(|component| component == "main").then_some(source)
}

/// One stanza of a deb822 file: a source for each of its URIs.
fn stanza(text: &str) -> Vec<Source> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                *value += "\n";
                *value += line;
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    let field = |name: &str| {
        fields.iter().find(|(own, _)| own == name).map_or("", |(_, value)| value.as_str())
    };
    let has = |name, word| field(name).split_whitespace().any(|own| own == word);
    if !has("types", "deb") || !has("components", "main") || field("enabled") == "no" {
        return Vec::new();
    }
    let signed_by = Some(field("signed-by").to_owned()).filter(|key| !key.is_empty());
    field("uris")
        .split_whitespace()
        .map(|uri| Source {
            uri: uri.to_owned(),
            suites: field("suites").split_whitespace().map(str::to_owned).collect(),
            signed_by: signed_by.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(suites: &[&str], signed_by: Option<&str>) -> Source {
        Source {
            uri: "http://mirror.example/debian".into(),
            suites: suites.iter().map(|&suite| suite.to_owned()).collect(),
            signed_by: signed_by.map(str::to_owned),
        }
    }

    #[test]
    fn a_source_on_one_line_is_read() {
        assert_eq!(
            one_line("deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian sid main # x"),
            Some(source(&["sid"], Some("/k.gpg")))
        );
        assert_eq!(
            one_line("deb http://mirror.example/debian bookworm contrib main"),
            Some(source(&["bookworm"], None))
        );
    }

    #[test]
    fn what_brings_no_binary_packages_of_debian_is_left_out() {
        for line in
            ["# deb http://m sid main", "deb-src http://m sid main", "deb http://m sid x", ""]
        {
            assert_eq!(one_line(line), None, "{line}");
        }
        assert!(!source(&["nodistro"], None).is_debian());
        assert_eq!(
            stanza("Types: deb\nURIs: http://m\nSuites: sid\nComponents: main\nEnabled: no"),
            []
        );
    }

    #[test]
    fn a_stanza_is_read_with_a_key_of_many_lines() {
        let text = "# mirror\nTypes: deb\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main\nSigned-By:\n KEY\n .\n END\n";
        let read = stanza(text);
        assert_eq!(read, [source(&["bookworm", "bookworm-updates"], Some("\n KEY\n .\n END"))]);
        assert!(
            read[0]
                .with_suite("sid")
                .ends_with("Suites: sid\nComponents: main\nSigned-By: \n KEY\n .\n END\n")
        );
    }

    #[test]
    fn security_updates_are_looked_for_where_security_updates_are() {
        let archive = source(&["bookworm", "bookworm-updates"], None);
        let security = source(&["bookworm-security"], None);
        assert!(archive.may_have("sid") && !archive.may_have("bullseye-security"));
        assert!(security.may_have("bullseye-security") && !security.may_have("sid"));
        assert!(archive.is_debian() && security.is_debian());
    }
}
