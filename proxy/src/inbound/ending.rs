//! When an HBONE server connection ends of our accord: with its pod, or by its peer's certificate.
//!
//! How it ends is `culvert-carry`'s, which follows the [`Phase`].

use std::{convert::Infallible, pin::pin, time::Duration};

use culvert_carry::hbone::server::Phase;
use culvert_tls::Lifetime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What ends one connection.
pub(super) struct Ending {
    /// How far the pod's servers are.
    pub(super) pod: watch::Receiver<Phase>,
    /// Of the peer's certificate.
    pub(super) lifetime: Lifetime,
    /// To be told to the connection's tunnels, which record why they end.
    pub(super) revoked: CancellationToken,
    /// How long tunnels may take for that before they are cut.
    pub(super) grace: Duration,
}

impl Ending {
    /// Moves the connection's `phase` on, for ever.
    ///
    /// When the peer's certificate ends, the peer is asked to come again with the next one; its tunnels go on, as they
    /// do when it renews of its own accord. When it is revoked, they end.
    pub(super) async fn tell(mut self, phase: &watch::Sender<Phase>) -> Infallible {
        let advance =
            |to: Phase| phase.send_if_modified(|now| (to > *now).then(|| *now = to).is_some());
        let mut ended = pin!(self.lifetime.ended());
        let mut revoked = pin!(self.lifetime.revoked());
        let (mut told, mut is_ended) = (Phase::Serving, false);
        loop {
            tokio::select! {
                now = moved_on(&mut self.pod, told), if told != Phase::Cut => {
                    told = now;
                    advance(now);
                }
                () = &mut ended, if !is_ended => {
                    is_ended = true;
                    advance(Phase::Draining);
                }
                () = &mut revoked => break,
            }
        }
        self.revoked.cancel();
        advance(Phase::Draining);
        tokio::time::sleep(self.grace).await;
        advance(Phase::Cut);
        std::future::pending().await
    }
}

/// Waits until the pod is further than what was last `told`; a pod that is gone is cut.
async fn moved_on(pod: &mut watch::Receiver<Phase>, told: Phase) -> Phase {
    pod.wait_for(|now| *now > told).await.map_or(Phase::Cut, |now| *now)
}

#[cfg(test)]
mod tests {
    use culvert_tls::{Authority, Credential, Profile};
    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// The ending of a connection whose peer's certificate ends after `ttl`.
    fn ending(ttl: Duration) -> (watch::Sender<Phase>, Ending) {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "unit").unwrap().with_ttl(ttl);
        let peer = "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap();
        let issued = authority.issue(&peer).unwrap();
        let credential = Credential::new(&Profile::default(), &peer, 1, issued).unwrap();
        let (pod, phases) = watch::channel(Phase::Serving);
        let ending = Ending {
            pod: phases,
            lifetime: credential.inbound_lifetime(credential.chain()),
            revoked: CancellationToken::new(),
            grace: Duration::from_secs(2),
        };
        (pod, ending)
    }

    /// Follows `ending` until the connection is in the phase `want`.
    async fn reaches(ending: Ending, want: Phase) {
        let (phase, mut phases) = watch::channel(Phase::Serving);
        tokio::select! {
            never = ending.tell(&phase) => match never {},
            reached = timeout(LONG, phases.wait_for(|now| *now >= want)) => {
                assert_eq!(*reached.unwrap().unwrap(), want);
            }
        }
    }

    #[tokio::test]
    async fn a_connection_drains_with_its_pod_and_is_cut_without_it() {
        let (pod, ending) = ending(Duration::from_hours(1));
        pod.send_replace(Phase::Draining);
        reaches(ending, Phase::Draining).await;

        let (pod, ending) = self::ending(Duration::from_hours(1));
        drop(pod);
        reaches(ending, Phase::Cut).await;
    }

    #[tokio::test]
    async fn a_connection_drains_when_its_peers_certificate_ends() {
        let (_pod, ending) = ending(Duration::from_secs(1));
        reaches(ending, Phase::Draining).await;
    }
}
