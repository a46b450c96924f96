//! Fixtures and contract suites for tests of this and other crates.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use tokio::time::timeout;

use crate::io::{DatagramIo, MAX_DATAGRAM};
use crate::quantity::{BlockSize, Tokens};
use crate::summary::{LoadSummary, ModelApi, ModelFacts, NodeFacts, Role};
use crate::time::{Clock, Timestamp};
use crate::types::{Incarnation, NodeId};
use crate::wire::{self, FactsError};

/// Facts of a node whose identity is made up from `identity`, all addresses on loopback.
pub fn facts(identity: u16, incarnation: u64) -> NodeFacts {
    let peer = [b"test peer ".as_slice(), &identity.to_be_bytes()].concat();
    let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    NodeFacts {
        node: NodeId::of_peer(&peer),
        incarnation: Incarnation(incarnation),
        peer_id: bs58::encode(peer).into_string(),
        protocol: 1,
        control: local(identity),
        stream: local(identity),
        http: local(identity).to_string(),
        role: Role::Mixed,
        block_size: BlockSize::DEFAULT,
        models: vec![ModelFacts {
            id: "test-model".to_owned(),
            context: Tokens(4_096),
            fingerprint: 42,
            created: 1_700_000_000,
            api: ModelApi::Tokens,
        }],
        version: "test".to_owned(),
    }
}

/// The seeds in `tests/seeds.txt`, which every seeded schedule is run with: the first word of each line that is no comment.
///
/// # Errors
/// When the file cannot be read, or a line does not begin with a seed.
pub fn kept_seeds() -> io::Result<Vec<u64>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/seeds.txt");
    let text = fs::read_to_string(path)?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_whitespace().next())
        .map(|seed| seed.parse().map_err(io::Error::other))
        .collect()
}

/// A number in the environment, if it is set and is one.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// What a node with these facts and this load writes into its record; for fuzzers.
///
/// # Errors
/// When they do not fit.
pub fn record(facts: &NodeFacts, load: &LoadSummary) -> Result<[String; 2], FactsError> {
    Ok([wire::pack_facts(facts)?, wire::pack_load(load)?])
}

/// Reads text as the values of a node's record, as a stranger's could be; for fuzzers.
pub fn read_record(text: &str, owner: NodeId) {
    if let Ok(facts) = wire::unpack_facts(text, owner) {
        assert_eq!(facts.node, owner, "facts of somebody else");
    }
    if let Ok(load) = wire::unpack_load(text) {
        let again = wire::pack_load(&load).and_then(|packed| wire::unpack_load(&packed));
        assert!(again.is_ok_and(|again| again == load), "{load:?}");
    }
}

/// A clock that follows tokio's, so that it stands still and jumps with paused time.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    started: tokio::time::Instant,
}

impl TokioClock {
    /// Starts counting now.
    #[expect(clippy::disallowed_methods, reason = "a clock for tests is a clock")]
    pub fn start() -> Self {
        Self {
            started: tokio::time::Instant::now(),
        }
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        Timestamp::since_start(self.started.elapsed())
    }
}

/// Checks what every [`DatagramIo`] promises. Panics, naming the promise, when one is broken.
///
/// Both ends must be fresh and on loopback. It proves nothing about loss or order under load: a datagram
/// network promises neither.
#[expect(clippy::panic, reason = "a contract suite fails by panicking")]
pub async fn datagram_contract(one: Arc<dyn DatagramIo>, two: Arc<dyn DatagramIo>) {
    let addresses = one.local_addr().and_then(|a| Ok((a, two.local_addr()?)));
    let Ok((at_one, at_two)) = addresses else {
        panic!("a bound socket knows its address");
    };
    assert_ne!(at_one, at_two, "two sockets have two addresses");

    let largest = vec![7; MAX_DATAGRAM];
    for message in [&b""[..], b"x", &largest] {
        let sent = one.send_to(message, at_two).await;
        assert!(sent.is_ok(), "{} bytes go out: {sent:?}", message.len());
        let (arrived, from) = received(&*two).await;
        assert_eq!(arrived.as_ref(), message, "a datagram arrives whole");
        assert_eq!(from, at_one, "it names its sender");
    }
    let too_long = vec![0; MAX_DATAGRAM + 1];
    let refused = one.send_to(&too_long, at_two).await.is_err();
    assert!(refused, "a datagram that is too long is refused");

    let waited = timeout(Duration::from_millis(10), two.recv_from()).await;
    assert!(waited.is_err(), "nothing more arrives");
    let _sent_after_a_dropped_receive = two.send_to(b"back", at_one).await;
    assert_eq!(
        received(&*one).await.0,
        "back",
        "a dropped receive loses nothing"
    );

    drop(two);
    for _ in 0..3 {
        // A closed port may be noticed by the sender, but only as an error of that one send.
        let _noticed = one.send_to(b"nobody", at_two).await;
    }
    let sent = one.send_to(b"self", at_one).await;
    assert!(sent.is_ok(), "a closed peer does not close us: {sent:?}");
    assert_eq!(received(&*one).await.0, "self", "nor stop us from hearing");
}

#[expect(clippy::panic, reason = "a contract suite fails by panicking")]
async fn received(io: &dyn DatagramIo) -> (bytes::Bytes, SocketAddr) {
    match timeout(Duration::from_secs(10), io.recv_from()).await {
        Ok(Ok(arrived)) => arrived,
        Ok(Err(error)) => panic!("receiving failed: {error}"),
        Err(_) => panic!("no datagram within 10 s"),
    }
}
