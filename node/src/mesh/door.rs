//! Who may begin a handshake, before it costs anything.
//!
//! A first packet of QUIC names no identity, so all there is to go by is where it comes from. Three kinds of callers have
//! places of their own, and none can take those of another:
//!
//! | caller | places | proves its address |
//! |---|---|---|
//! | the very address and port that a record names, from which nodes dial | [`NAMED`] | once half are taken |
//! | another port of a node's host | [`NEIGHBOURS`] | once half are taken |
//! | anybody else | [`STRANGERS`] | always |
//!
//! Proving costs the caller a round trip and us nothing that lasts: the token it has to bring back holds all there is to know.
//! Whoever can only forge an address of the first two kinds takes half of its places at most.
//!
//! A handshake that fails keeps its place for as long as QUIC keeps what it was, so the places bound memory and work as well:
//! strangers get eight handshakes a second in the long run.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quinn::{Incoming, ServerConfig};
use shoal_gossip::{Clock, ClusterView, MonotonicClock, NodeFacts, Timestamp};
use tracing::trace;

use crate::mesh::members::Members;

/// Handshakes at once of callers at an address that a record names. Each costs about a millisecond and up to 100 KB.
const NAMED: usize = 128;

/// The same of callers from a node's host that use another port: behind NAT, or other programs there.
pub(crate) const NEIGHBOURS: usize = 64;

/// The same of everybody else. Few have any business here: nodes that send from another address than they advertise.
const STRANGERS: usize = 32;

/// How long QUIC keeps a connection that failed before a round trip was measured: three probe timeouts of a second (RFC 9002,
/// 6.2; RFC 9000, 10.2), and some.
const LINGERS: Duration = Duration::from_secs(4);

/// How long a handshake may take.
pub(crate) const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);

/// First packets that may wait to be looked at; each is looked at within microseconds, and takes about 3 KB meanwhile.
const INCOMING: usize = 1_024;

/// Bytes that may follow the first packet of one caller, and of all, while it waits.
const FOLLOWING: (u64, u64) = (16 * 1024, 4 << 20);

/// Bounds what first packets cost before [`Doorkeeper::meet`] has seen them.
pub(crate) fn bound_incoming(config: &mut ServerConfig) {
    config
        .max_incoming(INCOMING)
        .incoming_buffer_size(FOLLOWING.0)
        .incoming_buffer_size_total(FOLLOWING.1);
}

/// What is known of a caller by its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Named,
    Neighbour,
    Stranger,
}

/// What a caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Begin your handshake.
    Enter,
    /// Come again with a token that is sent to your address.
    Prove,
    /// All places of your kind are taken.
    Refuse,
}

/// The places of one kind of callers.
#[derive(Debug)]
struct Places {
    most: usize,
    /// So many may be taken by callers who have not proven their address.
    unproven: usize,
    held: usize,
    /// When places of handshakes that failed are free again, in order.
    lingering: VecDeque<Timestamp>,
}

impl Places {
    fn new(most: usize, unproven: usize) -> Self {
        Self {
            most,
            unproven,
            held: 0,
            lingering: VecDeque::new(),
        }
    }

    fn knock(&mut self, now: Timestamp, proven: bool) -> Answer {
        while self.lingering.front().is_some_and(|free| *free <= now) {
            self.lingering.pop_front();
        }
        let taken = self.held + self.lingering.len();
        if !proven && taken >= self.unproven {
            Answer::Prove
        } else if taken >= self.most {
            Answer::Refuse
        } else {
            self.held += 1;
            Answer::Enter
        }
    }

    fn leave(&mut self, now: Timestamp, welcomed: bool) {
        self.held = self.held.saturating_sub(1);
        if !welcomed {
            self.lingering.push_back(now + LINGERS);
        }
    }
}

/// The places of all kinds.
#[derive(Debug)]
struct Door {
    named: Places,
    neighbours: Places,
    strangers: Places,
}

impl Door {
    fn new() -> Self {
        Self {
            named: Places::new(NAMED, NAMED / 2),
            neighbours: Places::new(NEIGHBOURS, NEIGHBOURS / 2),
            strangers: Places::new(STRANGERS, 0),
        }
    }

    fn of(&mut self, standing: Standing) -> &mut Places {
        match standing {
            Standing::Named => &mut self.named,
            Standing::Neighbour => &mut self.neighbours,
            Standing::Stranger => &mut self.strangers,
        }
    }
}

/// Where the nodes of one view are.
#[derive(Debug, Default)]
struct Whereabouts {
    named: HashSet<SocketAddr>,
    hosts: HashSet<IpAddr>,
}

impl Whereabouts {
    /// `dials_from` says which address of a node is its own end of the connections it makes here.
    fn of(view: &ClusterView, dials_from: fn(&NodeFacts) -> SocketAddr) -> Self {
        let named = view.rows().iter().map(|row| plain(dials_from(&row.facts)));
        let named: HashSet<SocketAddr> = named.collect();
        Self {
            hosts: named.iter().map(SocketAddr::ip).collect(),
            named,
        }
    }

    fn standing(&self, from: SocketAddr) -> Standing {
        let from = plain(from);
        if self.named.contains(&from) {
            Standing::Named
        } else if self.hosts.contains(&from.ip()) {
            Standing::Neighbour
        } else {
            Standing::Stranger
        }
    }
}

/// The address without what a socket for both versions of IP puts around it.
pub(crate) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Stands at the door of one plane.
#[derive(Debug)]
pub(crate) struct Doorkeeper {
    door: Arc<Mutex<Door>>,
    clock: MonotonicClock,
    members: Members,
    dials_from: fn(&NodeFacts) -> SocketAddr,
    /// The view that `whereabouts` were read from.
    view: Option<Arc<ClusterView>>,
    whereabouts: Whereabouts,
}

impl Doorkeeper {
    /// For the plane on which a node dials from the address `dials_from`.
    pub(crate) fn new(members: Members, dials_from: fn(&NodeFacts) -> SocketAddr) -> Self {
        Self {
            door: Arc::new(Mutex::new(Door::new())),
            clock: MonotonicClock::start(),
            members,
            dials_from,
            view: None,
            whereabouts: Whereabouts::default(),
        }
    }

    /// Lets a caller begin its handshake, or deals with it. Keep the place until the handshake has ended.
    ///
    /// # Errors
    /// The reason, if the caller was refused or asked to prove its address.
    pub(crate) fn meet(&mut self, incoming: Incoming) -> Result<(Incoming, Place), Turned> {
        let standing = self.standing(incoming.remote_address());
        let proven = incoming.remote_address_validated();
        let answer = lock(&self.door)
            .of(standing)
            .knock(self.clock.now(), proven);
        match answer {
            Answer::Enter => Ok((incoming, self.place(standing))),
            Answer::Prove => {
                if let Err(error) = incoming.retry() {
                    trace!(%error, "a retry could not be asked for");
                }
                Err(Turned::Asked)
            }
            Answer::Refuse => {
                trace!(?standing, "too many handshakes; one is refused");
                incoming.refuse();
                Err(Turned::Refused)
            }
        }
    }

    fn place(&self, standing: Standing) -> Place {
        Place {
            door: Arc::clone(&self.door),
            clock: self.clock,
            standing,
            welcomed: false,
        }
    }

    fn standing(&mut self, from: SocketAddr) -> Standing {
        let view = self.members.view();
        if !self.view.as_ref().is_some_and(|of| Arc::ptr_eq(of, &view)) {
            self.whereabouts = Whereabouts::of(&view, self.dials_from);
            self.view = Some(view);
        }
        self.whereabouts.standing(from)
    }
}

/// Why a caller may not begin its handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turned {
    /// It has to prove its address first.
    Asked,
    /// All places of its kind are taken.
    Refused,
}

/// The place of a handshake that goes on. Dropped without [`Place::welcome`] it stays taken for a while.
#[derive(Debug)]
pub(crate) struct Place {
    door: Arc<Mutex<Door>>,
    clock: MonotonicClock,
    standing: Standing,
    welcomed: bool,
}

impl Place {
    /// The handshake has ended well: the place is free.
    pub(crate) fn welcome(mut self) {
        self.welcomed = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = self.clock.now();
        lock(&self.door).of(self.standing).leave(now, self.welcomed);
    }
}

fn lock(door: &Mutex<Door>) -> MutexGuard<'_, Door> {
    door.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
