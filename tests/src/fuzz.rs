//! What the fuzzers run, each fed with bytes of any kind: decoders of all planes, and the cores of ledger and hand-over,
//! for which the bytes are what happens to them.
//!
//! The tests run each over the corpus (`tests/fuzz/corpus`) and fifty thousand mutations of it; `SHOAL_FUZZ=n` makes as many.

mod cores;

use std::time::Duration;

use shoal_gossip::{ClusterKey, Framing, KeyRing, NodeId, Sealer, SenderId, testing};
use shoal_migrate::transfer::wire::{self, Opening, PartOpening, Reply};
use shoal_node::fuzz;

/// A target: its name, which is that of its corpus, and what it does with bytes. It panics where something is wrong.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 10] = [
    ("datagram", datagram),
    ("record", record),
    ("control", fuzz::control),
    ("streams", fuzz::streams),
    ("parcel", parcel),
    ("client_body", fuzz::client_body),
    ("engine_stream", fuzz::engine_stream),
    ("engine_load", fuzz::engine_load),
    ("ledger", cores::ledger),
    ("sessions", cores::sessions),
];

/// Runs the target of this name.
///
/// # Panics
/// When there is none, or when it finds a fault.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    let (_, target) = target.unwrap_or_else(|| panic!("no target {name}"));
    target(bytes);
}

/// A gossip datagram, at nodes with and without a key. Nobody here has the key, so a sealed one never opens.
fn datagram(bytes: &[u8]) {
    let ring = KeyRing::new(ClusterKey::from_bytes([7; 32]));
    let Ok(sealer) = Sealer::new(&ring, SenderId([1; 8])) else {
        return;
    };
    let now = Duration::from_secs(1_800_000_000);
    assert!(
        Framing::Sealed(Box::new(sealer)).open(now, bytes).is_err(),
        "a forged datagram was opened"
    );
    if let Ok(message) = Framing::Open.open(now, bytes) {
        assert!(bytes.ends_with(&message));
    }
}

/// The values of a record that gossip brought.
fn record(bytes: &[u8]) {
    testing::read_record(&String::from_utf8_lossy(bytes), NodeId(7));
}

/// Messages of the bulk plane: what a parcel begins with, and what is said back.
fn parcel(bytes: &[u8]) {
    let Some((prefix, rest)) = bytes.split_first_chunk() else {
        return;
    };
    let Ok(length) = wire::rest_of(*prefix) else {
        return;
    };
    let rest = &rest[..length.min(rest.len())];
    if let Ok(opening) = wire::decode::<Opening>(*prefix, rest) {
        // What passes the check has a size that may be taken.
        if opening.check(1 << 20).is_ok() {
            assert!(opening.header.body_bytes <= 1 << 20);
        }
    }
    drop(wire::decode::<PartOpening>(*prefix, rest));
    drop(wire::decode::<Reply>(*prefix, rest));
}
