//! How long to wait before the next stream, from how the last one ended.

use std::time::Duration;

use tonic::Code;

/// The shortest wait.
const FIRST: Duration = Duration::from_millis(10);
/// The longest, but for the jitter.
const CAP: Duration = Duration::from_secs(15);

/// How a stream ended, or why there was none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// No connection.
    Unconnected,
    /// The server, or something on the way, ended it as is usual: a rollout, a limit of a connection's age.
    Routine,
    /// The server refused or failed.
    Failed,
    /// The server ended it without an error.
    Complete,
}

impl End {
    /// The label of `istio_xds_connection_terminations_total`.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Unconnected => "ConnectionError",
            Self::Routine => "Reconnect",
            Self::Failed => "Error",
            Self::Complete => "Complete",
        }
    }
}

/// What a gRPC status says about the stream that it ended.
pub(super) fn end_by(code: Code, message: &str) -> End {
    let closing = || {
        let message = message.to_ascii_lowercase();
        ["transport is closing", "received prior goaway", "connection reset", "broken pipe"]
            .iter()
            .any(|routine| message.contains(routine))
    };
    match code {
        Code::Ok => End::Complete,
        Code::Unknown | Code::Cancelled | Code::DeadlineExceeded => End::Routine,
        Code::Unavailable if closing() => End::Routine,
        _ => End::Failed,
    }
}

/// Grows from 10 ms to 15 s with each stream that comes to nothing.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: FIRST }
    }

    /// The wait after `end`, half of it at random: the nodes of a mesh lose their server at one moment.
    ///
    /// `answered`: whether the stream brought anything. Only one that did starts anew from the shortest wait, so that a
    /// server which ends every stream at once is not asked without pause.
    pub(super) fn after(&mut self, end: End, answered: bool) -> Duration {
        if answered && matches!(end, End::Routine | End::Complete) {
            self.next = FIRST;
        }
        let wait = self.next;
        self.next = (wait * 2).min(CAP);
        wait.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap_and_half_of_each_is_random() {
        let mut backoff = Backoff::new();
        let mut want = FIRST;
        for _ in 0..20 {
            let wait = backoff.after(End::Unconnected, false);
            assert!(want / 2 <= wait && wait <= want, "{wait:?} is not about {want:?}");
            want = (want * 2).min(CAP);
        }
        assert_eq!(want, CAP);
    }

    #[test]
    fn only_a_usual_end_of_a_stream_that_brought_something_starts_anew() {
        for (end, answered, anew) in [
            (End::Routine, true, true),
            (End::Complete, true, true),
            (End::Routine, false, false),
            (End::Complete, false, false),
            (End::Failed, true, false),
            (End::Unconnected, false, false),
        ] {
            let mut backoff = Backoff { next: CAP };
            let wait = backoff.after(end, answered);
            assert_eq!(wait <= FIRST, anew, "{end:?} {answered}");
        }
    }

    #[test]
    fn a_status_tells_a_rollout_from_a_refusal() {
        for (code, message, want) in [
            (Code::Ok, "", End::Complete),
            (Code::Unknown, "h2 protocol error", End::Routine),
            (Code::Cancelled, "", End::Routine),
            (Code::DeadlineExceeded, "", End::Routine),
            (Code::Unavailable, "the transport is closing", End::Routine),
            (Code::Unavailable, "received prior GOAWAY", End::Routine),
            (Code::Unavailable, "no capacity", End::Failed),
            (Code::PermissionDenied, "", End::Failed),
            (Code::Unauthenticated, "", End::Failed),
            (Code::OutOfRange, "message too large", End::Failed),
        ] {
            assert_eq!(end_by(code, message), want, "{code:?} {message}");
        }
    }
}
