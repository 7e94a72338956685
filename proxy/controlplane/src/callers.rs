//! Who calls: proved by a token or a client certificate, never by what a request says of itself.

mod accounts;
mod nodes;

#[cfg(test)]
mod tests;

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
};

use http::Extensions;
use rustls_pki_types::CertificateDer;
use tonic::metadata::MetadataMap;

use self::accounts::{Accounts, Claims};
pub use self::accounts::{AccountsError, TokenRules};
use self::nodes::Nodes;
pub use self::nodes::NodesError;
use crate::placements::Placements;

/// The user name of a node in its certificate, as Kubernetes has it.
const NODE_PREFIX: &str = "system:node:";
/// Longer ones are no token.
const MAX_TOKEN: usize = 16 * 1024;

/// How callers prove who they are.
#[derive(Clone, Debug, Default)]
pub struct CallerOptions {
    /// A file `{node: token}` for machines without Kubernetes.
    pub node_tokens: Option<PathBuf>,
    /// How tokens of Kubernetes are verified.
    pub tokens: Option<TokenRules>,
    /// Accounts (`namespace/name`) whose pods act for their node.
    pub node_accounts: Vec<String>,
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// The proxy of a node, with the pod that it is, if it is one.
    Node { node: String, pod: Option<String> },
    /// A pod that acts for nobody but itself.
    Account { namespace: String, account: String },
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { node, pod: None } => write!(f, "node {node}"),
            Self::Node { node, pod: Some(pod) } => write!(f, "node {node} (pod {pod})"),
            Self::Account { namespace, account } => write!(f, "account {namespace}/{account}"),
        }
    }
}

/// Why a caller is not known. Says nothing that is secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Neither a token nor a certificate.
    #[error("no bearer token and no client certificate")]
    Nothing,
    /// The header is not one.
    #[error("the authorization header is no bearer token")]
    Header,
    /// Nobody vouches for the token.
    #[error("the token is not known: {0}")]
    Token(String),
    /// The certificate names no node.
    #[error("the client certificate names no node; its common name must be system:node:NAME")]
    Certificate,
    /// The pod that the token was made for is not there any more, or another one.
    #[error(
        "pod {0} of the token is not known, or is not what the token says; try again in a moment"
    )]
    Pod(String),
}

/// The certificates that a client proved to have, leaf first; put into the extensions of its requests.
#[derive(Clone, Debug)]
pub(crate) struct Proven(pub(crate) Arc<[CertificateDer<'static>]>);

/// All ways to know a caller.
#[derive(Debug)]
pub(crate) struct Callers {
    nodes: Option<RwLock<Nodes>>,
    accounts: Option<Accounts>,
    node_accounts: Vec<String>,
    placements: Arc<Placements>,
}

/// Why callers cannot be told apart.
#[derive(Debug, thiserror::Error)]
pub enum CallersError {
    /// The nodes' tokens cannot be used.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// The rules for tokens cannot be used.
    #[error(transparent)]
    Accounts(#[from] AccountsError),
}

impl Callers {
    pub(crate) fn new(
        options: &CallerOptions,
        placements: Arc<Placements>,
    ) -> Result<Self, CallersError> {
        let nodes = options.node_tokens.clone().map(Nodes::open).transpose()?;
        let accounts = options.tokens.as_ref().map(Accounts::open).transpose()?;
        let node_accounts = options.node_accounts.clone();
        Ok(Self { nodes: nodes.map(RwLock::new), accounts, node_accounts, placements })
    }

    /// Reads the nodes' tokens again, if they changed. A bad file changes nothing.
    pub(crate) fn refresh(&self) {
        if let Some(nodes) = &self.nodes {
            let mut nodes = nodes.write().unwrap_or_else(PoisonError::into_inner);
            if let Err(error) = nodes.refresh() {
                let error = culvert_mesh::error::chain(&error);
                tracing::warn!(error, "nodes' tokens stay as they are");
            }
        }
    }

    /// Who sent a request with this metadata over a connection with these extensions.
    pub(crate) fn identify(
        &self,
        metadata: &MetadataMap,
        extensions: &Extensions,
    ) -> Result<Caller, Refusal> {
        if let Some(header) = metadata.get("authorization") {
            let text = header.to_str().ok().ok_or(Refusal::Header)?;
            let (scheme, token) = text.split_once(' ').ok_or(Refusal::Header)?;
            let token = token.trim();
            if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() || token.len() > MAX_TOKEN
            {
                return Err(Refusal::Header);
            }
            return self.by_token(token);
        }
        let Some(Proven(chain)) = extensions.get() else { return Err(Refusal::Nothing) };
        let name = chain.first().and_then(common_name).ok_or(Refusal::Certificate)?;
        let node = name.strip_prefix(NODE_PREFIX).filter(|node| !node.is_empty());
        let node = node.ok_or(Refusal::Certificate)?.to_owned();
        Ok(Caller::Node { node, pod: None })
    }

    fn by_token(&self, token: &str) -> Result<Caller, Refusal> {
        if let Some(nodes) = &self.nodes {
            let nodes = nodes.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(node) = nodes.find(token) {
                return Ok(Caller::Node { node: node.to_owned(), pod: None });
            }
        }
        let Some(accounts) = &self.accounts else {
            return Err(Refusal::Token("no node has it".to_owned()));
        };
        let claims = accounts.verify(token).map_err(Refusal::Token)?;
        self.by_claims(claims)
    }

    /// A token is its pod's as long as that pod lives; a name that another pod has taken over is not the same.
    fn by_claims(&self, claims: Claims) -> Result<Caller, Refusal> {
        let Claims { namespace, account, pod, node: claimed } = claims;
        if !self.node_accounts.contains(&format!("{namespace}/{account}")) {
            return Ok(Caller::Account { namespace, account });
        }
        let Some((name, uid)) = pod else {
            return Err(Refusal::Token("it is not bound to a pod".to_owned()));
        };
        let shown = format!("{namespace}/{name}");
        let known = self.placements.pod(&namespace, &name);
        let node = match (known, claimed) {
            (Some(known), claimed) => {
                let same = (known.uid.is_empty() || known.uid == uid)
                    && known.account == account
                    && claimed.is_none_or(|claimed| claimed == known.node);
                same.then_some(known.node).filter(|node| !node.is_empty())
            }
            // The API server vouches for the node, though the pod itself is not among the objects.
            (None, claimed) => claimed,
        };
        let node = node.ok_or_else(|| Refusal::Pod(shown.clone()))?;
        Ok(Caller::Node { node, pod: Some(shown) })
    }
}

fn common_name(der: &CertificateDer<'static>) -> Option<String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next()?.as_str().ok()?.to_owned();
    names.next().is_none().then_some(name)
}
