//! Bounds of the state plane, each with its derivation.

use std::time::Duration;

/// Largest mesh over IPv4, live and recently dead nodes together.
///
/// Every gossip message begins with a digest that names them all, and the digest must fit one
/// datagram with room for news: beyond that all sending fails at once and everyone looks dead to everyone.
/// Measured with names, start times, addresses and counters as random as they get in a month: 26.8
/// bytes a node, so 53.6 KB at 2,000, which leaves 11.9 KB of a datagram for news. The hard end is
/// near 2,440. A test measures it anew.
pub const MAX_NODES: usize = 2_000;

/// Largest mesh over IPv6, where a random interface id costs 6 bytes more: 33 bytes a node, 52.7 KB.
pub const MAX_NODES_IPV6: usize = 1_600;

/// Longest packed `facts` value in bytes before its text form: room for 32 models with names of 100 bytes. A full
/// table of such records is 16 MB.
pub(crate) const MAX_FACTS_BYTES: usize = 4_096;

/// Longest packed `load` value in bytes: thirteen numbers of at most 10 bytes each and a kind, twice over for
/// fields that a later version appends.
pub(crate) const MAX_LOAD_BYTES: usize = 256;

/// Longest name, address or version inside facts, in bytes. DNS names end at 253; model names of
/// registries stay below 200.
pub(crate) const MAX_FACT_TEXT: usize = 256;

/// Models one node may name. [`MAX_FACTS_BYTES`] binds first for long names.
pub(crate) const MAX_MODELS: usize = 64;

/// Longest cluster label in bytes; it travels in every message.
pub(crate) const MAX_CLUSTER_LABEL: usize = 64;

/// Changes are gathered for this long before a new view is made: far below one gossip interval, so
/// it costs no freshness that matters, and it bounds the work to 50 views a second.
pub(crate) const VIEW_PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
