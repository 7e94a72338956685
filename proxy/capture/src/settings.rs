//! What a pod may choose about its own capture, as its annotations say it; how the programs are told is `exclusions`'s.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use culvert_abi::HBONE_PORT;
use ipnet::IpNet;

const BYPASS_INBOUND: &str = "ambient.istio.io/bypass-inbound-capture";
const DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";
const REROUTE: &str = "istio.io/reroute-virtual-interfaces";
const INBOUND_PORTS: &str = "culvert.io/exclude-inbound-ports";
const OUTBOUND_PORTS: &str = "culvert.io/exclude-outbound-ports";
const OUTBOUND_CIDRS: &str = "culvert.io/exclude-outbound-cidrs";
const INTERFACES: &str = "culvert.io/exclude-interfaces";

/// Most entries of one annotation: what a pod asks for must not take the room of others.
pub const MAX_ENTRIES: usize = 64;

/// Longest name of an interface (`IFNAMSIZ`, without the NUL).
const MAX_NAME: usize = 15;

/// How a pod wants to be captured. The default captures everything but DNS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// DNS queries go to the proxy's DNS server.
    pub capture_dns: bool,
    /// Plaintext to the pod reaches the application; port 15008 is captured still.
    pub bypass_inbound: bool,
    /// Plaintext to these ports reaches the application.
    pub exclude_inbound_ports: BTreeSet<u16>,
    /// Connections to these ports of others leave as they are.
    pub exclude_outbound_ports: BTreeSet<u16>,
    /// Connections, and DNS queries, to these networks leave as they are.
    pub exclude_outbound_cidrs: BTreeSet<IpNet>,
    /// What comes and goes by these interfaces is left alone; port 15008 of their addresses is captured still.
    pub exclude_interfaces: BTreeSet<String>,
    /// TCP that these interfaces bring in is captured as the pod's own.
    pub reroute_interfaces: BTreeSet<String>,
}

/// An annotation that cannot be what its pod meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: {reason}")]
pub struct SettingsError {
    /// The annotation's name.
    pub annotation: &'static str,
    /// What is wrong, and the remedy.
    pub reason: String,
}

impl Settings {
    /// What a pod's annotations say; `capture_dns` where they do not say. Annotations of other names are passed over.
    pub fn of_annotations(
        annotations: &BTreeMap<String, String>,
        capture_dns: bool,
    ) -> Result<Self, SettingsError> {
        let get = |name: &'static str| Annotation { name, value: annotations.get(name) };
        Ok(Self {
            capture_dns: get(DNS_CAPTURE).flag()?.unwrap_or(capture_dns),
            bypass_inbound: get(BYPASS_INBOUND).flag()?.unwrap_or(false),
            exclude_inbound_ports: get(INBOUND_PORTS).list(inbound_port)?,
            exclude_outbound_ports: get(OUTBOUND_PORTS).list(port)?,
            exclude_outbound_cidrs: get(OUTBOUND_CIDRS).list(network)?,
            exclude_interfaces: get(INTERFACES).list(interface)?,
            reroute_interfaces: get(REROUTE).list(interface)?,
        })
    }

    /// Whether anything goes around the proxy that it would carry otherwise.
    pub fn bypasses(&self) -> bool {
        !self.bypassed().is_empty()
    }

    /// The same settings, but nothing goes around the proxy.
    #[must_use]
    pub fn without_bypass(self) -> Self {
        let Self { capture_dns, reroute_interfaces, .. } = self;
        Self { capture_dns, reroute_interfaces, ..Self::default() }
    }

    /// What goes around the proxy, for people.
    pub fn bypassed(&self) -> String {
        let mut parts = Vec::new();
        if self.bypass_inbound {
            parts.push("all inbound plaintext".to_owned());
        }
        let mut add = |what: &str, entries: Vec<String>| {
            if !entries.is_empty() {
                parts.push(format!("{what} {}", entries.join(", ")));
            }
        };
        add("inbound ports", texts(&self.exclude_inbound_ports));
        add("outbound ports", texts(&self.exclude_outbound_ports));
        add("outbound networks", texts(&self.exclude_outbound_cidrs));
        add("interfaces", texts(&self.exclude_interfaces));
        parts.join("; ")
    }
}

fn texts(entries: &BTreeSet<impl fmt::Display>) -> Vec<String> {
    entries.iter().map(ToString::to_string).collect()
}

struct Annotation<'a> {
    name: &'static str,
    value: Option<&'a String>,
}

impl Annotation<'_> {
    fn refuse(&self, reason: String) -> SettingsError {
        SettingsError { annotation: self.name, reason }
    }

    fn flag(&self) -> Result<Option<bool>, SettingsError> {
        // As Go's strconv.ParseBool, which Istio reads them with.
        match self.value.map(String::as_str) {
            None => Ok(None),
            Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(Some(true)),
            Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(Some(false)),
            Some(other) => Err(self.refuse(format!("{other:?} must be true or false"))),
        }
    }

    fn list<T: Ord>(
        &self,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<BTreeSet<T>, SettingsError> {
        let value = self.value.map_or("", String::as_str);
        let entries = value.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        if entries.clone().count() > MAX_ENTRIES {
            return Err(self.refuse(format!("a pod may have {MAX_ENTRIES} entries; remove some")));
        }
        entries
            .map(|entry| parse(entry).map_err(|why| self.refuse(format!("{entry:?} {why}"))))
            .collect()
    }
}

fn port(entry: &str) -> Result<u16, String> {
    match entry.parse::<u16>() {
        Ok(0) | Err(_) => Err("must be a port, from 1 to 65535".to_owned()),
        Ok(port) => Ok(port),
    }
}

fn inbound_port(entry: &str) -> Result<u16, String> {
    match port(entry)? {
        HBONE_PORT => Err("is the mesh's own port; remove it".to_owned()),
        port => Ok(port),
    }
}

fn network(entry: &str) -> Result<IpNet, String> {
    let net = entry.parse().map(|net: IpNet| net.trunc());
    let host = || entry.parse().map(|ip: IpAddr| IpNet::from(ip.to_canonical()));
    match net.or_else(|_not_a_network| host()) {
        Ok(IpNet::V6(v6)) if v6.prefix_len() >= 96 && v6.addr().to_ipv4_mapped().is_some() => {
            Err("must be written as IPv4".to_owned())
        }
        Ok(net) => Ok(net),
        Err(_neither) => Err("must be a network such as 10.0.0.0/8 or fd00::/8".to_owned()),
    }
}

fn interface(entry: &str) -> Result<String, String> {
    let plain = |c: char| !c.is_whitespace() && c != '/' && c != ':' && !c.is_control();
    if entry.len() > MAX_NAME || matches!(entry, "." | "..") || !entry.chars().all(plain) {
        return Err(format!("must be an interface's name, at most {MAX_NAME} bytes long"));
    }
    if entry == "lo" {
        return Err("never leads out of a pod; remove it".to_owned());
    }
    Ok(entry.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(annotations: &[(&str, &str)], dns: bool) -> Result<Settings, SettingsError> {
        let annotations = annotations.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        Settings::of_annotations(&annotations.collect(), dns)
    }

    #[test]
    fn flags_are_read_as_istio_reads_them() {
        for (value, want) in
            [("true", true), ("1", true), ("T", true), ("False", false), ("0", false)]
        {
            let got = settings(&[(BYPASS_INBOUND, value), (DNS_CAPTURE, value)], !want).unwrap();
            assert_eq!((got.bypass_inbound, got.capture_dns), (want, want), "{value}");
        }
        for value in ["", "yes", "TrUe", " true"] {
            let error = settings(&[(BYPASS_INBOUND, value)], false).unwrap_err();
            assert_eq!(error.annotation, BYPASS_INBOUND);
            assert!(error.to_string().ends_with("must be true or false"), "{error}");
        }
    }

    #[test]
    fn what_is_not_annotated_is_as_the_node_has_it() {
        let others = [("sidecar.istio.io/inject", "maybe"), ("culvert.io/else", "x")];
        assert_eq!(settings(&others, false).unwrap(), Settings::default());
        let dns = Settings { capture_dns: true, ..Settings::default() };
        assert_eq!(settings(&[], true).unwrap(), dns);
    }

    #[test]
    fn lists_are_separated_by_commas_and_spaces_do_not_count() {
        let got = settings(
            &[
                (INBOUND_PORTS, "9090, 8080,9090"),
                (OUTBOUND_PORTS, "5432,"),
                (OUTBOUND_CIDRS, "10.1.2.3/8, fd00::/8,192.0.2.1,::/0, ::ffff:192.0.2.2"),
                (INTERFACES, "net1,net2"),
                (REROUTE, "br-abc"),
            ],
            false,
        )
        .unwrap();
        assert_eq!(texts(&got.exclude_inbound_ports), ["8080", "9090"]);
        assert_eq!(texts(&got.exclude_outbound_ports), ["5432"]);
        let cidrs = ["10.0.0.0/8", "192.0.2.1/32", "192.0.2.2/32", "::/0", "fd00::/8"];
        assert_eq!(texts(&got.exclude_outbound_cidrs), cidrs);
        assert_eq!(texts(&got.exclude_interfaces), ["net1", "net2"]);
        assert_eq!(texts(&got.reroute_interfaces), ["br-abc"]);
        assert_eq!(
            got.bypassed(),
            "inbound ports 8080, 9090; outbound ports 5432; outbound networks 10.0.0.0/8, 192.0.2.1/32, \
             192.0.2.2/32, ::/0, fd00::/8; interfaces net1, net2"
        );
    }

    #[test]
    fn entries_that_cannot_be_meant_are_refused_with_a_remedy() {
        let many = vec!["10.0.0.0/8"; MAX_ENTRIES + 1].join(",");
        for (annotation, value, want) in [
            (INBOUND_PORTS, "0", "\"0\" must be a port"),
            (INBOUND_PORTS, "80-90", "must be a port"),
            (INBOUND_PORTS, "15008", "the mesh's own port"),
            (OUTBOUND_PORTS, "65536", "must be a port"),
            (OUTBOUND_CIDRS, "10.0.0.0/33", "must be a network"),
            (OUTBOUND_CIDRS, "db.example", "must be a network"),
            (OUTBOUND_CIDRS, "::ffff:10.0.0.0/104", "written as IPv4"),
            (OUTBOUND_CIDRS, many.as_str(), "64 entries; remove some"),
            (INTERFACES, "lo", "remove it"),
            (INTERFACES, "an-interface-name", "at most 15 bytes"),
            (REROUTE, "a/b", "an interface's name"),
            (REROUTE, "a b", "an interface's name"),
        ] {
            let error = settings(&[(annotation, value)], false).unwrap_err();
            assert_eq!(error.annotation, annotation);
            assert!(error.to_string().contains(want), "{error}");
        }
    }

    #[test]
    fn what_a_node_does_not_allow_is_taken_out_and_nothing_else() {
        let all = settings(
            &[
                (BYPASS_INBOUND, "true"),
                (DNS_CAPTURE, "true"),
                (INBOUND_PORTS, "1"),
                (OUTBOUND_PORTS, "2"),
                (OUTBOUND_CIDRS, "10.0.0.0/8"),
                (INTERFACES, "net1"),
                (REROUTE, "br0"),
            ],
            false,
        )
        .unwrap();
        assert!(all.bypasses());
        let left = all.without_bypass();
        assert!(!left.bypasses());
        let want = settings(&[(DNS_CAPTURE, "true"), (REROUTE, "br0")], false).unwrap();
        assert_eq!(left, want);
    }
}
