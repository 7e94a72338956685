//! What carries an enrolled pod's connections: started when it is enrolled, and ended by its drain.

use std::sync::Arc;

use culvert_capture::{Dns, Pod};
use culvert_carry::{
    dial::Dialer,
    hbone::{Pool, PoolOptions, server::Phase},
};
use culvert_sys::netns::Netns;
use culvert_tls::Retained;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::{Enrolled, Enrolment, accept::accept, departure::Proxy};
use crate::{context::PodContext, dns, error::chain, outlook::PodOutlook, pods::PodSpec};

/// Peers of a pod that may be in their handshake at a time: a burst of clients fits, a flood does not.
const HANDSHAKES: usize = 1024;

impl Enrolment {
    /// Starts the pod's proxy.
    pub(super) fn serve(&mut self, spec: &PodSpec, netns: Netns, mut pod: Pod) {
        let timeouts = self.context.timeouts;
        let addresses = pod.addresses();
        let owns = {
            let addresses = addresses.clone();
            move |ip| addresses.owns(ip)
        };
        let context = Arc::new(PodContext {
            node: Arc::clone(&self.context),
            pod: spec.pod.clone(),
            addresses,
            dialer: Dialer {
                netns,
                home: self.context.home.clone(),
                proxy_mark: self.marks.proxy,
                delivery_mark: self.marks.delivery,
                timeout: timeouts.dial,
            },
            pool: Pool::new(PoolOptions { timeouts, ..PoolOptions::default() }, owns),
            outlook: PodOutlook::new(),
            handshakes: Arc::new(Semaphore::new(HANDSHAKES)),
            phase: watch::Sender::new(Phase::Serving),
        });
        let tasks = self.tasks.child();
        let Dns { queries, listeners } = pod.take_dns();
        let names = dns::serve(queries, &context, &tasks);
        for listener in pod.take_listeners().into_iter().chain(listeners) {
            let (context, names) = (Arc::clone(&context), Arc::clone(&names));
            let last_call = self.succession.last_call.clone();
            tasks.spawn(accept(listener, context, names, tasks.clone(), last_call));
        }
        tasks.spawn(keep_certificate(Arc::clone(&context), tasks.draining()));
        if let Some(watch) = pod.take_watch() {
            let draining = tasks.draining();
            tasks.spawn(async move {
                tokio::select! {
                    () = watch.run() => {}
                    () = draining.cancelled() => {}
                }
            });
        }
        let holder = Some(Arc::clone(&spec.uid));
        let enrolled =
            Enrolled { holder, spec: spec.clone(), proxy: Proxy { context, tasks }, pod };
        self.enrolled.insert(enrolled.pod.id(), enrolled);
    }
}

/// Gets the pod's certificate before its first connection waits for it, and lets the store keep it until the pod drains.
/// One that cannot be had is told then.
async fn keep_certificate(context: Arc<PodContext>, draining: CancellationToken) {
    let certificates = &context.node.certificates;
    let mut changed = context.node.state.subscribe();
    let mut retained: Option<Retained> = None;
    loop {
        let identity =
            context.node.state.load().find_local(&context.pod).map(|pod| pod.identity.clone());
        let work = async {
            if let Some(identity) = identity
                && retained.as_ref().is_none_or(|retained| *retained.identity() != identity)
            {
                retained = Some(certificates.retain(&identity));
                if let Err(error) = certificates.prefetch(&identity).await {
                    tracing::warn!(error = chain(&error), "no certificate yet");
                }
            }
            changed.changed().await
        };
        tokio::select! {
            changed = work => if changed.is_err() { return },
            () = draining.cancelled() => return,
        }
    }
}
