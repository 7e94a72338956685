//! Where the mesh and the certificates come from: files, a control plane, or both.

use std::{collections::BTreeMap, convert::Infallible, ffi::OsString, path::PathBuf};

use clap::Args;
use culvert_control::{
    Server,
    server::{Address, AddressError, Roots, Token},
    xds::{Mode, NodeIdentity},
};
use http::{HeaderName, HeaderValue};

/// Where Istio mounts the control plane's root into its pods.
const ROOT: &str = "/var/run/secrets/istio/root-cert.pem";
/// Where Istio mounts the pod's token.
const TOKEN: &str = "/var/run/secrets/tokens/istio-token";
/// The control plane of a cluster that runs Istio.
const ISTIOD: &str = "https://istiod.istio-system.svc:15012";
/// Instead of a file: the roots of this machine.
const SYSTEM: &str = "SYSTEM";

/// Arguments on where the mesh and the certificates come from.
#[derive(Args, Debug)]
pub struct ControlArgs {
    /// Workloads, services and policies, in ztunnel's local format; read again when it changes
    #[arg(long, env = "LOCAL_XDS_PATH", value_name = "FILE", value_parser = path)]
    pub mesh: Option<PathBuf>,
    /// Directory of the embedded certificate authority: ca.pem and ca-key.pem
    #[arg(long, env = "CULVERT_CA_DIR", value_name = "DIR", value_parser = path)]
    pub ca_dir: Option<PathBuf>,
    /// Control plane that tells of workloads, services and policies; empty is none [default: istiod in a cluster, unless
    /// --mesh is given]
    #[arg(long, env = "XDS_ADDRESS", value_name = "URI")]
    pub xds_address: Option<String>,
    /// Certificate authority that signs for the node's pods [default: istiod in a cluster, unless --ca-dir is given]
    #[arg(long, env = "CA_ADDRESS", value_name = "URI")]
    pub ca_address: Option<String>,
    /// What proves the control plane: a PEM file, which is read again for each connection, PEM itself, or SYSTEM for the
    /// roots of this machine
    #[arg(long, env = "XDS_ROOT_CA", value_name = "FILE|PEM|SYSTEM", default_value = ROOT)]
    pub xds_root: String,
    /// What proves the certificate authority, likewise
    #[arg(long, env = "CA_ROOT_CA", value_name = "FILE|PEM|SYSTEM", default_value = ROOT)]
    pub ca_root: String,
    /// Another name that the control plane's certificate may have
    #[arg(long, env = "ALT_XDS_HOSTNAME", value_name = "NAME")]
    pub alt_xds_hostname: Option<String>,
    /// Another name that the certificate authority's certificate may have
    #[arg(long, env = "ALT_CA_HOSTNAME", value_name = "NAME")]
    pub alt_ca_hostname: Option<String>,
    /// Token that proves this node to both: a file, which is read again each time, or the token itself [default:
    /// /var/run/secrets/tokens/istio-token where there is one]
    #[arg(long, env = "AUTH_TOKEN", value_name = "FILE|TOKEN", hide_env_values = true)]
    pub auth_token: Option<String>,
    /// Name of culvert's own pod, told to the control plane
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value = "")]
    pub pod_name: String,
    /// Namespace of culvert's own pod
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", default_value = "")]
    pub pod_namespace: String,
    /// Address of culvert's own pod
    #[arg(long, env = "INSTANCE_IP", value_name = "IP", default_value = "1.1.1.1")]
    pub instance_ip: String,
    /// Ask the control plane for workloads and services only when a connection needs them, for meshes too large to hold
    #[arg(long, env = "XDS_ON_DEMAND")]
    pub xds_on_demand: bool,
    /// Set by Kubernetes in every pod.
    #[arg(long, env = "KUBERNETES_SERVICE_HOST", hide = true)]
    pub kubernetes: Option<String>,
}

/// Where the mesh and the certificates come from, checked. At least one of `mesh` and `xds` is there.
#[derive(Clone, Debug)]
pub struct Control {
    /// The mesh file.
    pub mesh: Option<PathBuf>,
    /// The control plane.
    pub xds: Option<Xds>,
    /// Who signs certificates.
    pub ca: Ca,
}

/// The control plane.
#[derive(Clone, Debug)]
pub struct Xds {
    /// Where it is.
    pub server: Server,
    /// Who this node is to it.
    pub node: NodeIdentity,
    /// What it is asked for.
    pub mode: Mode,
}

/// Who signs certificates.
#[derive(Clone, Debug)]
pub enum Ca {
    /// The embedded authority, from the certificate and key in this folder.
    Dir(PathBuf),
    /// The mesh's.
    Server(Box<Server>),
}

/// Why there is no mesh, or no certificates.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Neither a file nor a control plane.
    #[error(
        "nothing tells of the mesh: give --mesh (LOCAL_XDS_PATH), --xds-address (XDS_ADDRESS), or both"
    )]
    NoMesh,
    /// Neither the embedded authority nor another.
    #[error(
        "nothing signs certificates: give --ca-dir (CULVERT_CA_DIR) or --ca-address (CA_ADDRESS)"
    )]
    NoCa,
    /// Both authorities.
    #[error(
        "--ca-dir and --ca-address contradict each other: pods have one certificate authority; leave one out"
    )]
    TwoCas,
    /// There is nobody to ask.
    #[error("--xds-on-demand needs --xds-address: a mesh file holds everything already")]
    NobodyToAsk,
    /// An address is none.
    #[error("{flag}")]
    Address {
        /// The flag.
        flag: &'static str,
        /// What is wrong with it.
        source: AddressError,
    },
    /// A header cannot be sent.
    #[error("{0}: neither name nor value may hold what a header cannot; correct it")]
    Header(String),
    /// A structured value is not one.
    #[error("{name}: must be JSON")]
    Json {
        /// The variable.
        name: String,
        /// Where it is wrong.
        source: serde_json::Error,
    },
}

impl Control {
    pub(super) fn new(
        args: ControlArgs,
        node: &str,
        cluster_id: &str,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ControlError> {
        let environment = Environment::read(environment)?;
        // A chart sets variables that it has no value for to nothing.
        let mesh = args.mesh.filter(|path| !path.as_os_str().is_empty());
        let ca_dir = args.ca_dir.filter(|path| !path.as_os_str().is_empty());
        let token = args.auth_token.as_deref().map_or_else(default_token, |text| Some(token(text)));
        let server = |flag, address: &str, root: &str, alternative: Option<String>, headers| {
            let address: Address =
                address.parse().map_err(|source| ControlError::Address { flag, source })?;
            Ok(Server {
                address,
                roots: roots(root),
                alternative_name: alternative.filter(|name| !name.is_empty()),
                token: token.clone(),
                cluster_id: cluster_id.to_owned(),
                headers,
            })
        };
        let istiod = || args.kubernetes.as_ref().map(|_host| ISTIOD.to_owned());
        let xds = args.xds_address.or_else(|| istiod().filter(|_| mesh.is_none()));
        let ca = args.ca_address.or_else(|| istiod().filter(|_| ca_dir.is_none()));
        let xds = match xds.filter(|address| !address.is_empty()) {
            None if mesh.is_none() => return Err(ControlError::NoMesh),
            None if args.xds_on_demand => return Err(ControlError::NobodyToAsk),
            None => None,
            Some(address) => {
                let headers = environment.xds_headers;
                let server = server(
                    "--xds-address",
                    &address,
                    &args.xds_root,
                    args.alt_xds_hostname,
                    headers,
                )?;
                let node = NodeIdentity {
                    ip: args.instance_ip,
                    pod: args.pod_name,
                    namespace: args.pod_namespace,
                    node: node.to_owned(),
                    metadata: environment.metadata,
                    structured: environment.structured,
                };
                let mode = if args.xds_on_demand { Mode::OnDemand } else { Mode::Whole };
                Some(Xds { server, node, mode })
            }
        };
        let ca = match (ca_dir, ca.filter(|address| !address.is_empty())) {
            (None, None) => return Err(ControlError::NoCa),
            (Some(_), Some(_)) => return Err(ControlError::TwoCas),
            (Some(dir), None) => Ca::Dir(dir),
            (None, Some(address)) => {
                let headers = environment.ca_headers;
                let server =
                    server("--ca-address", &address, &args.ca_root, args.alt_ca_hostname, headers)?;
                Ca::Server(Box::new(server))
            }
        };
        Ok(Self { mesh, xds, ca })
    }
}

/// Unlike the library's own parser, takes an empty one.
#[expect(clippy::unnecessary_wraps, reason = "what a parser of arguments returns")]
fn path(text: &str) -> Result<PathBuf, Infallible> {
    Ok(text.into())
}

fn roots(text: &str) -> Roots {
    if text == SYSTEM {
        Roots::System
    } else if text.contains("-----BEGIN") {
        Roots::Pem(text.to_owned())
    } else {
        Roots::File(text.into())
    }
}

/// What looks like a path is one, also before there is a file; anything else if there is a file of that name.
fn token(text: &str) -> Token {
    if text.starts_with(['/', '.']) || PathBuf::from(text).is_file() {
        Token::File(text.into())
    } else {
        Token::Text(text.to_owned())
    }
}

fn default_token() -> Option<Token> {
    let path = PathBuf::from(TOKEN);
    path.is_file().then_some(Token::File(path))
}

type Headers = Vec<(HeaderName, HeaderValue)>;

/// What variables say whose names only begin in a known way.
#[derive(Debug, Default)]
struct Environment {
    metadata: BTreeMap<String, String>,
    structured: BTreeMap<String, serde_json::Value>,
    xds_headers: Headers,
    ca_headers: Headers,
}

impl Environment {
    fn read(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ControlError> {
        let mut all = Self::default();
        for (name, value) in variables {
            // Others are nobody's business here.
            let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else { continue };
            if let Some(key) = name.strip_prefix("ISTIO_META_") {
                all.metadata.insert(key.to_owned(), value);
            } else if let Some(key) = name.strip_prefix("ISTIO_METAJSON_") {
                let value = serde_json::from_str(&value)
                    .map_err(|source| ControlError::Json { name: name.clone(), source })?;
                all.structured.insert(key.to_owned(), value);
            } else if let Some(key) = name.strip_prefix("XDS_HEADER_") {
                all.xds_headers.push(header(&name, key, &value)?);
            } else if let Some(key) = name.strip_prefix("CA_HEADER_") {
                all.ca_headers.push(header(&name, key, &value)?);
            }
        }
        Ok(all)
    }
}

fn header(name: &str, key: &str, value: &str) -> Result<(HeaderName, HeaderValue), ControlError> {
    let wrong = || ControlError::Header(name.to_owned());
    let key = HeaderName::try_from(key).ok().ok_or_else(wrong)?;
    let mut value = HeaderValue::try_from(value).ok().ok_or_else(wrong)?;
    // It may be a credential.
    value.set_sensitive(true);
    Ok((key, value))
}

#[cfg(test)]
mod tests;
