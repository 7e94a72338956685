//! PINGs that tell a dead connection from a quiet one, for both ends.
//!
//! What to do with a dead connection is left to [`super::client`] and [`super::server`].

use std::{future, time::Duration};

use h2::{Ping, PingPong};
use tokio::time::{sleep, timeout};

/// Ends when a PING stayed without answer for `patience`, never otherwise.
///
/// The first PING goes out after `interval`, each next one `interval` after the answer to the one before. The caller
/// polls the connection meanwhile; without that no answer arrives.
pub(super) async fn dead(pings: Option<PingPong>, interval: Duration, patience: Duration) {
    let Some(mut pings) = pings else { return future::pending().await };
    loop {
        sleep(interval).await;
        match timeout(patience, pings.ping(Ping::opaque())).await {
            Ok(Ok(_pong)) => {}
            // The connection ends, and whoever polls it learns the reason there.
            Ok(Err(_)) => return future::pending().await,
            Err(_elapsed) => return,
        }
    }
}
