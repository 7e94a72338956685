//! The table of open connections, for the admin interface.
//!
//! It is only ever read by people: no decision depends on it, so it may be incomplete when it is full.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::flow::Direction;
use crate::sharded::Sharded;

/// One open connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Which way it goes.
    pub direction: Direction,
    /// Who opened it.
    pub src: SocketAddr,
    /// What it was for: an address outbound; inbound the host that the peer's `Forwarded` header names, if any.
    pub original_dst: Option<Arc<str>>,
    /// What it was connected to.
    pub actual_dst: SocketAddr,
    /// What carries it.
    pub protocol: Protocol,
}

/// What carries a connection through the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Plain TCP.
    Tcp,
    /// HTTP/2 CONNECT over mutual TLS.
    Hbone,
}

impl Protocol {
    /// As the admin interface spells it. Contract: `istioctl` shows it as it is.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Hbone => "HBONE",
        }
    }
}

/// Open connections, in no order. Clones share the table.
#[derive(Clone, Debug)]
pub struct Connections {
    table: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    entries: Sharded<Connection>,
    /// `held <= capacity`, counting entries that are about to be added.
    held: AtomicUsize,
    capacity: usize,
}

impl Connections {
    /// An empty table of at most `capacity` connections; further ones are carried, but not shown.
    pub fn new(capacity: usize) -> Self {
        Self {
            table: Arc::new(Table {
                entries: Sharded::default(),
                held: AtomicUsize::new(0),
                capacity,
            }),
        }
    }

    /// Shows `connection` until the guard is dropped.
    pub fn track(&self, connection: Connection) -> Tracked {
        let table = &self.table;
        let reserved = table.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            (held < table.capacity).then_some(held + 1)
        });
        let entry = reserved.is_ok().then(|| (Arc::clone(table), table.entries.insert(connection)));
        Tracked { entry }
    }

    /// A copy of what is open now.
    pub fn dump(&self) -> Vec<Connection> {
        let mut dump = Vec::with_capacity(self.table.held.load(Ordering::Relaxed));
        self.table.entries.for_each(|connection| dump.push(connection.clone()));
        dump
    }
}

/// A connection's place in the table, given up on drop.
#[derive(Debug)]
#[must_use = "dropping it takes the connection out of the table"]
pub struct Tracked {
    /// `None` when the table was full.
    entry: Option<(Arc<Table>, u64)>,
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some((table, key)) = self.entry.take() {
            table.entries.remove(key);
            table.held.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(port: u16) -> Connection {
        Connection {
            direction: Direction::Outbound,
            src: ([10, 0, 0, 1], port).into(),
            original_dst: Some("10.96.0.1:80".into()),
            actual_dst: ([10, 0, 0, 2], 15008).into(),
            protocol: Protocol::Hbone,
        }
    }

    fn ports(table: &Connections) -> Vec<u16> {
        let mut ports: Vec<_> =
            table.dump().iter().map(|connection| connection.src.port()).collect();
        ports.sort_unstable();
        ports
    }

    #[test]
    fn a_connection_is_shown_while_its_guard_lives() {
        let table = Connections::new(100);
        let one = table.track(connection(1));
        let two = table.track(connection(2));
        assert_eq!(ports(&table), [1, 2]);
        drop(one);
        assert_eq!(table.dump(), [connection(2)]);
        drop(two);
        assert_eq!(table.dump(), []);
    }

    #[test]
    fn equal_connections_are_kept_apart() {
        let table = Connections::new(100);
        let _one = table.track(connection(1));
        drop(table.track(connection(1)));
        assert_eq!(ports(&table), [1]);
    }

    #[test]
    fn a_full_table_shows_no_more_until_there_is_room() {
        let table = Connections::new(2);
        let one = table.track(connection(1));
        let _two = table.track(connection(2));
        let three = table.track(connection(3));
        assert_eq!(ports(&table), [1, 2]);
        drop(three);
        drop(one);
        let _four = table.track(connection(4));
        assert_eq!(ports(&table), [2, 4]);
    }
}
