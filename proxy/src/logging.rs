//! The process's log: lines on standard output. What is logged is decided where it happens.

use culvert_observe::LogLine;
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::config::LogFormat;

/// It warns of every attribute that a newer kernel has grown, each time interfaces are read.
const QUIET: &str = "netlink_packet_route=error";

/// A filter that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("--log-filter {filter:?} is not LEVEL or TARGET=LEVEL,...")]
pub struct FilterError {
    filter: String,
    source: tracing_subscriber::filter::ParseError,
}

/// Installs the subscriber; once a process.
pub(crate) fn init(format: LogFormat, filter: &str) -> Result<(), FilterError> {
    let filter = EnvFilter::try_new(format!("{QUIET},{filter}"))
        .map_err(|source| FilterError { filter: filter.to_owned(), source })?;
    let registry = tracing_subscriber::registry().with(filter);
    let line = match format {
        LogFormat::Plain => LogLine::Plain,
        LogFormat::Json => LogLine::Json,
    };
    let layer = fmt::layer().event_format(line).with_ansi(false);
    if let Err(error) = registry.with(layer).try_init() {
        tracing::debug!(%error, "a subscriber is installed already");
    }
    Ok(())
}
