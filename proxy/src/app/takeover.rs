//! Before a process touches the node: its seat, its control socket, its endpoints, and the process before it, if there is one.

use std::time::Duration;

use culvert_capture::Seat;
use culvert_sys::netns::Netns;
use tokio::time::{Instant, sleep};

use super::RunError;
use crate::{
    admin::Endpoints,
    config::{Config, Steering},
    handover::{self, Control, Predecessor},
};

/// How long the kernel may take to close what a process had that was killed, and how often to try.
const DYING: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(20);

/// What a process has of its own, and of its predecessor.
pub(super) struct Place {
    /// `None` where somebody else steers.
    pub(super) seat: Option<Seat>,
    pub(super) control: Option<Control>,
    pub(super) predecessor: Predecessor,
    pub(super) endpoints: Endpoints,
}

impl Place {
    /// Takes a seat and the endpoints. The process before answers on them no more; its pods it keeps until they are taken.
    pub(super) async fn take(config: &Config, home: &Netns) -> Result<Self, RunError> {
        let seat = match config.steering {
            Steering::Ebpf => Some(Seat::take(&config.bpffs, &config.node)?),
            Steering::Redirect => None,
        };
        match open(config, home, seat.as_ref()).await {
            Ok((control, predecessor, endpoints)) => {
                Ok(Self { seat, control, predecessor, endpoints })
            }
            Err(error) => {
                if let Some(seat) = seat {
                    seat.leave();
                }
                Err(error)
            }
        }
    }

    /// Gives it up before the node was touched.
    pub(super) fn leave(self) {
        if let Some(seat) = self.seat {
            seat.leave();
        }
    }

    /// The number of the seat.
    pub(super) fn number(&self) -> u8 {
        self.seat.as_ref().map_or(0, Seat::number)
    }
}

async fn open(
    config: &Config,
    home: &Netns,
    seat: Option<&Seat>,
) -> Result<(Option<Control>, Predecessor, Endpoints), RunError> {
    let Some(seat) = seat else {
        return Ok((None, Predecessor::none(), Endpoints::open(config, Vec::new()).await?));
    };
    let control = Control::bind(handover::socket(&config.node, seat.number()))?;
    let mut predecessor = match seat.elder() {
        None => Predecessor::none(),
        Some(elder) => {
            let socket = handover::socket(&config.node, elder.seat);
            Predecessor::reach(&socket, seat, elder).await?
        }
    };
    let inherited = predecessor.hello(home.inode(), Endpoints::wanted(config)).await?;
    let mut opened = Endpoints::open(config, inherited).await;
    // One that has died before it could answer has its ports for a moment more.
    let end = Instant::now() + DYING;
    while opened.is_err()
        && seat.elder().is_some()
        && predecessor.gone().is_cancelled()
        && Instant::now() < end
    {
        sleep(AGAIN).await;
        opened = Endpoints::open(config, Vec::new()).await;
    }
    Ok((Some(control), predecessor, opened?))
}
