//! Copying both directions of a connection, with what TCP applications rely on: half-close, reset, backpressure.
//!
//! | one side | the other side |
//! |---|---|
//! | FIN | `END_STREAM`, and back; each direction for itself |
//! | RST | `RST_STREAM` `CONNECT_ERROR` (RFC 9113 §8.5), and back; any code but the next line's is a reset |
//! | `RST_STREAM` `NO_ERROR` or `CANCEL` | FIN |
//! | the HTTP/2 connection fails | RST |
//! | receives slowly | is read slowly: one buffer and the stream's window are the most that wait |
//!
//! Who may be connected, and what is recorded about it, is decided elsewhere; bytes are told to a [`Meter`].

use std::{
    future::{Future as _, poll_fn},
    io,
    pin::pin,
    task::Poll,
};

use tokio::{net::TcpStream, time::timeout};

use self::{
    plain::Pump,
    socket::Socket,
    stream::{Down, Up},
};
use crate::{Timeouts, hbone::Tunnel};

mod plain;
mod socket;
mod stream;
#[cfg(test)]
mod tests;

/// Learns of bytes as they are copied.
pub trait Meter {
    /// `bytes` of the application have been passed on to the peer.
    fn sent(&self, bytes: u64);
    /// `bytes` of the peer have been passed on to the application.
    fn received(&self, bytes: u64);
}

/// The end of a connection.
#[derive(Debug)]
pub struct End {
    /// How it came.
    pub outcome: Outcome,
    /// Bytes from the application to the peer.
    pub sent: u64,
    /// Bytes from the peer to the application.
    pub received: u64,
}

/// How a connection ended.
#[derive(Debug)]
pub enum Outcome {
    /// Both sides ended their streams.
    Closed,
    /// The connection with the application was reset or failed; the peer has been told.
    ResetByApp(io::Error),
    /// The connection with the peer was reset or failed; the application has been told.
    ResetByPeer(io::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    From,
    To,
}

enum Broken {
    App(io::Error),
    Peer(io::Error),
}

/// Copies between an application and a peer without HBONE, until both directions have ended or one side is reset.
///
/// Dropped before, it resets both.
pub async fn plain(
    app: TcpStream,
    peer: TcpStream,
    meter: &(impl Meter + Sync),
    timeouts: &Timeouts,
) -> End {
    let (app, peer) = (Socket::new(app), Socket::new(peer));
    let (mut up, mut down) = (Pump::new(), Pump::new());
    let sent = |n: usize| meter.sent(n as u64);
    let received = |n: usize| meter.received(n as u64);
    let broken = {
        let (mut app_failed, mut peer_failed) = (pin!(app.failed()), pin!(peer.failed()));
        poll_fn(|cx| {
            let sending =
                up.poll(cx, (&app, &peer), false, sent).map_err(|(side, error)| match side {
                    Side::From => Broken::App(error),
                    Side::To => Broken::Peer(error),
                });
            let receiving =
                down.poll(cx, (&peer, &app), false, received).map_err(|(side, error)| match side {
                    Side::From => Broken::Peer(error),
                    Side::To => Broken::App(error),
                });
            match (sending, receiving) {
                (Poll::Ready(Err(broken)), _) | (_, Poll::Ready(Err(broken))) => {
                    return Poll::Ready(Some(broken));
                }
                (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => return Poll::Ready(None),
                _ => {}
            }
            if let Poll::Ready(error) = app_failed.as_mut().poll(cx) {
                return Poll::Ready(Some(Broken::App(error)));
            }
            peer_failed.as_mut().poll(cx).map(|error| Some(Broken::Peer(error)))
        })
        .await
    };
    // What was sent before the reset goes before it.
    let late = timeouts.reset_drain;
    let outcome = match broken {
        None => {
            app.close();
            peer.close();
            Outcome::Closed
        }
        Some(Broken::App(error)) => {
            let rest = poll_fn(|cx| up.poll(cx, (&app, &peer), true, sent));
            let rest = timeout(late, rest).await;
            tracing::trace!(?rest, "reset by the application");
            Outcome::ResetByApp(error)
        }
        Some(Broken::Peer(error)) => {
            let rest = poll_fn(|cx| down.poll(cx, (&peer, &app), true, received));
            let rest = timeout(late, rest).await;
            tracing::trace!(?rest, "reset by the peer");
            Outcome::ResetByPeer(error)
        }
    };
    End { outcome, sent: up.total, received: down.total }
}

/// Copies between an application and an HBONE tunnel, until both directions have ended or one side is reset.
///
/// Dropped before, it resets both.
pub async fn tunnel(
    app: TcpStream,
    mut peer: Tunnel,
    meter: &(impl Meter + Sync),
    timeouts: &Timeouts,
) -> End {
    let app = Socket::new(app);
    let (mut up, mut down) = (Up::new(), Down::new());
    let sent = |n: usize| meter.sent(n as u64);
    let received = |n: usize| meter.received(n as u64);
    let broken = {
        let mut app_failed = pin!(app.failed());
        poll_fn(|cx| {
            // First down: it tells why the stream is gone, after all data before.
            let receiving = down.poll(cx, (&mut peer.recv, &mut peer.send), &app, received);
            let receiving = receiving.map_err(|(side, error)| match side {
                Side::From => Broken::Peer(error),
                Side::To => Broken::App(error),
            });
            if let Poll::Ready(Err(broken)) = receiving {
                return Poll::Ready(Some(broken));
            }
            let sending = up.poll(cx, &app, &mut peer.send, false, sent);
            if let Poll::Ready(Err((_, error))) = sending {
                return Poll::Ready(Some(Broken::App(error)));
            }
            if receiving.is_ready() {
                // Nothing is read from the stream any more, so its reset has to be asked for.
                match stream::poll_reset(cx, &mut peer.send) {
                    Poll::Ready(Ok(())) => return Poll::Ready(None),
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(Broken::Peer(error))),
                    Poll::Pending if sending.is_ready() => return Poll::Ready(None),
                    Poll::Pending => {}
                }
            }
            app_failed.as_mut().poll(cx).map(|error| Some(Broken::App(error)))
        })
        .await
    };
    let outcome = match broken {
        None => {
            peer.end();
            app.close();
            Outcome::Closed
        }
        Some(Broken::App(error)) => {
            // What the application sent before its reset goes before it.
            let rest = timeout(timeouts.reset_drain, up.drain(&app, &mut peer.send, sent)).await;
            tracing::trace!(?rest, "reset by the application");
            peer.reset();
            Outcome::ResetByApp(error)
        }
        Some(Broken::Peer(error)) => {
            peer.end();
            Outcome::ResetByPeer(error)
        }
    };
    End { outcome, sent: up.total, received: down.total }
}
