//! What both directions do with a connection's record: refuse it, meter it, end it.

use std::{error::Error, sync::Arc};

use culvert_carry::copy::{Meter, Outcome};
use culvert_mesh::reason::ResponseFlag;
use culvert_observe::{Denial, FlowRecord, Pending, Transferred};
use tokio::net::TcpStream;

/// Refuses a connection before it is decided: the application sees a reset, never a clean end.
pub(crate) fn refuse(
    record: Pending,
    stream: &TcpStream,
    reason: Denial,
    error: &(dyn Error + 'static),
) {
    reset(stream);
    record.refuse(reason, error);
}

/// Makes the close to come a reset.
pub(crate) fn reset(stream: &TcpStream) {
    if let Err(error) = culvert_sys::socket::reset_on_close(stream) {
        tracing::debug!(%error, "a connection to be reset will be closed instead");
    }
}

/// Ends the record as the copying ended.
pub(crate) fn end(record: FlowRecord, outcome: Outcome) {
    match outcome {
        Outcome::Closed => record.finish(),
        Outcome::ResetByApp(error) | Outcome::ResetByPeer(error) => {
            // A reset is how many applications end; it is told, but it is no failure of the mesh.
            record.fail(ResponseFlag::None, &error);
        }
    }
}

/// Tells copied bytes to the record. The application opened an outbound connection and answers an inbound one.
pub(crate) struct Metered {
    transferred: Arc<Transferred>,
    app: App,
}

enum App {
    Opened,
    Answers,
}

impl Metered {
    pub(crate) fn outbound(record: &FlowRecord) -> Self {
        Self { transferred: record.transferred(), app: App::Opened }
    }

    pub(crate) fn inbound(record: &FlowRecord) -> Self {
        Self { transferred: record.transferred(), app: App::Answers }
    }
}

impl Meter for Metered {
    fn sent(&self, bytes: u64) {
        match self.app {
            App::Opened => self.transferred.add_request(bytes),
            App::Answers => self.transferred.add_response(bytes),
        }
    }

    fn received(&self, bytes: u64) {
        match self.app {
            App::Opened => self.transferred.add_response(bytes),
            App::Answers => self.transferred.add_request(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{inbound, outbound};

    /// The size of a connection's task, without what it boxes while it opens and the buffers in which bytes wait.
    fn size<A, B, F>(_task: impl FnOnce(A, B) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_costs_little_memory() {
        for (name, size, most) in [
            ("outbound", size(outbound::carry), 3500),
            ("plaintext", size(inbound::plaintext), 2200),
            ("hbone", size(inbound::hbone), 2000),
        ] {
            assert!(size <= most, "{name}: {size} bytes");
        }
    }
}
