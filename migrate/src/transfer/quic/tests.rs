use std::net::{Ipv4Addr, SocketAddr};

use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, Endpoint, ServerConfig, TransportConfig};
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs;
use rustls_pki_types::PrivatePkcs8KeyDer;
use shoal_gossip::testing::TokioClock;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::*;
use crate::transfer::contract::{Rig, Shelf, parcel};
use crate::transfer::wire::{
    CHUNK_BYTES, Opening, PartOpening, Reply, Section, SectionWriter, encode,
};
use crate::transfer::{KvTransfer, Parcel, Receiver, Rejection, Transfer, TransferError};

const FROM: NodeId = NodeId(1);
const TO: NodeId = NodeId(2);
const PATIENCE: Duration = Duration::from_secs(20);

/// Leads to one node.
#[derive(Debug)]
struct OneLink(Connection);

#[async_trait]
impl BulkLinks for OneLink {
    async fn connect(&self, to: NodeId) -> Result<BulkLink, LinkError> {
        if to != TO {
            return Err(LinkError::Unknown);
        }
        Ok(BulkLink {
            connection: self.0.clone(),
            user: Box::new(()),
        })
    }
}

/// Two endpoints on loopback, and the connection between them.
struct Wire {
    near: Connection,
    far: Connection,
    _endpoints: [Endpoint; 2],
}

async fn wire() -> Wire {
    let made = rcgen::generate_simple_self_signed(["bulk".to_owned()]).expect("a certificate");
    let certificate = made.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(made.key_pair.serialize_der());
    let provider = Arc::new(aws_lc_rs::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.into())
        .expect("a server");
    let tls = QuicServerConfig::try_from(tls).expect("a cipher");
    let mut roots = RootCertStore::empty();
    roots.add(certificate).expect("a root");
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = QuicClientConfig::try_from(client).expect("a cipher");
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut server = ServerConfig::with_crypto(Arc::new(tls));
    server.transport_config(Arc::new(TransportConfig::default()));
    let server = Endpoint::server(server, here).expect("a port");
    let dialling = Endpoint::client(here).expect("a port");
    let address = server.local_addr().expect("an address");
    let connecting = dialling
        .connect_with(ClientConfig::new(Arc::new(client)), address, "bulk")
        .expect("an address");
    let accepting = async {
        server
            .accept()
            .await
            .expect("open")
            .await
            .expect("accepted")
    };
    let (near, far) = tokio::join!(connecting, accepting);
    Wire {
        near: near.expect("connected"),
        far,
        _endpoints: [server, dialling],
    }
}

/// A carrier and a receiver over a wire.
struct Ends {
    carrier: Arc<QuicTransfer>,
    receiver: Arc<QuicReceiver>,
    wire: Wire,
    tasks: TaskTracker,
}

impl Ends {
    async fn new(receiver: Receiver, limits: QuicLimits) -> Self {
        let wire = wire().await;
        let tasks = TaskTracker::new();
        let receiver = QuicReceiver::new(receiver, limits, tasks.clone());
        let (serving, far) = (Arc::clone(&receiver), wire.far.clone());
        tasks.spawn(async move { serving.serve(far, FROM).await });
        let links = Arc::new(OneLink(wire.near.clone()));
        let clock = Arc::new(TokioClock::start());
        Self {
            carrier: Arc::new(QuicTransfer::new(links, limits, clock, tasks.clone())),
            receiver,
            wire,
            tasks,
        }
    }

    async fn rig(receiver: Receiver, limits: QuicLimits) -> Rig {
        let ends = Self::new(receiver, limits).await;
        let (near, room) = (ends.wire.near.clone(), Arc::clone(&ends.receiver.room));
        let all = limits.receive_bytes / 1024;
        let all = u32::try_from(all).expect("small");
        Rig {
            carrier: Arc::clone(&ends.carrier) as _,
            from: FROM,
            to: TO,
            break_link: Box::new(move || near.close(0u32.into(), b"broken")),
            // Without room nothing is read.
            hold: Box::new(move || {
                let room = Arc::clone(&room).try_acquire_many_owned(all);
                Box::new(room.expect("nothing is under way"))
            }),
            keep: Box::new(ends),
        }
    }

    /// Writes to a new stream as no sender would, and reads what the receiver says.
    async fn say(&self, bytes: Vec<Bytes>) -> Result<Reply, String> {
        let (mut stream, mut replies) = self.wire.near.open_bi().await.expect("open");
        for bytes in bytes {
            // The receiver may have stopped reading.
            drop(stream.write_chunk(bytes).await);
        }
        drop(stream.finish());
        let reply = timeout(PATIENCE, read_message(&mut replies)).await;
        reply.expect("an answer").map_err(|error| match error {
            MessageError::Gone(reason) => reason,
            MessageError::Wire(error) => error.to_string(),
        })
    }

    fn all_room_is_free(&self) -> bool {
        let all = self.receiver.limits.receive_bytes / 1024;
        self.receiver.room.available_permits() as u64 == all
    }
}

/// Parts of two chunks, so that even short bodies come in several.
fn parted() -> QuicLimits {
    QuicLimits {
        part_bytes: 2 * CHUNK_BYTES as u64,
        ..QuicLimits::default()
    }
}

mod one_stream {
    use super::*;

    async fn make(receiver: Receiver) -> Rig {
        let limits = QuicLimits {
            parts: 1,
            ..QuicLimits::default()
        };
        Ends::rig(receiver, limits).await
    }

    crate::transfer_contract_tests!(make);
}

mod several_streams {
    use super::*;

    async fn make(receiver: Receiver) -> Rig {
        Ends::rig(receiver, parted()).await
    }

    crate::transfer_contract_tests!(make);
}

async fn outcome(transfer: Transfer) -> Result<(), TransferError> {
    let delivered = timeout(PATIENCE, transfer.delivered()).await;
    delivered.expect("an outcome").map(drop)
}

async fn until(what: &str, mut probe: impl FnMut() -> bool) {
    let waited = timeout(PATIENCE, async {
        while !probe() {
            tokio::task::yield_now().await;
        }
    });
    assert!(waited.await.is_ok(), "{what} did not come about");
}

fn opening(parcel: &Parcel, parts: u32) -> Bytes {
    let opening = Opening {
        serial: 1 << 40,
        header: parcel.header,
        parts,
    };
    encode(&opening).expect("it is short")
}

fn section(section: Section, bytes: &Bytes) -> Vec<Bytes> {
    SectionWriter::new(section, bytes.clone())
        .flatten()
        .collect()
}

#[tokio::test]
async fn what_is_damaged_or_cut_on_the_way_is_rejected_and_leaves_nothing() {
    let shelf = Arc::new(Shelf::default());
    let ends = Ends::new(Arc::clone(&shelf) as _, QuicLimits::default()).await;
    let sent = parcel(1, 100, 3 * CHUNK_BYTES);
    let whole = || {
        let mut all = vec![opening(&sent, 1)];
        all.extend(section(Section::Head, &sent.head));
        all.extend(section(Section::Part(0), &sent.body));
        all
    };
    let damage = |bytes: &mut Bytes, at: usize| {
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 0x10;
        *bytes = damaged.into();
    };
    // A byte of the head, of the second chunk of the body, and of its sum.
    for (piece, at) in [(1, 50), (5, 70_000), (6, 2)] {
        let mut all = whole();
        damage(&mut all[piece], at);
        let reply = ends.say(all).await;
        assert_eq!(reply, Ok(Reply::Rejected(Rejection::Damaged)));
    }
    let mut short = whole();
    short.pop();
    let mut long = whole();
    long.push(Bytes::from_static(b"x"));
    for all in [short, long] {
        let reply = ends.say(all).await;
        assert_eq!(reply, Ok(Reply::Rejected(Rejection::Damaged)));
    }
    assert_eq!(ends.say(whole()).await, Ok(Reply::Taken));
    assert_eq!(shelf.taken(), [(FROM, sent)]);
    until("all room free", || ends.all_room_is_free()).await;
}

#[tokio::test]
async fn junk_and_lies_are_refused_and_harm_nothing() {
    let shelf = Arc::new(Shelf::default());
    let limits = QuicLimits {
        receive_bytes: 64 << 20,
        ..QuicLimits::default()
    };
    let ends = Ends::new(Arc::clone(&shelf) as _, limits).await;
    let refused = |reply: &Result<Reply, String>| {
        matches!(
            reply,
            Ok(Reply::Rejected(Rejection::Wrong(_) | Rejection::Damaged))
        )
    };
    for junk in [
        vec![0u8; 100],
        vec![0xff; 100],
        vec![1, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9],
    ] {
        let reply = ends.say(vec![junk.into()]).await;
        assert!(refused(&reply), "{reply:?}");
    }
    // Parts that the body does not have.
    let sent = parcel(1, 0, 1_000);
    for parts in [0, 2, u32::MAX] {
        let reply = ends.say(vec![opening(&sent, parts)]).await;
        assert!(refused(&reply), "{reply:?}");
    }
    // More than there is room for, ever.
    let mut lie = sent.clone();
    for bytes in [(64 << 20) + 1, u64::MAX] {
        lie.header.body_bytes = bytes;
        let reply = ends.say(vec![opening(&lie, 1)]).await;
        assert_eq!(reply, Ok(Reply::Rejected(Rejection::TooLarge)));
    }
    // Streams that belong to nothing.
    for junk in [
        Bytes::from_static(b"junk"),
        encode(&PartOpening { serial: 5, part: 1 }).expect("it is short"),
    ] {
        let mut stream = ends.wire.near.open_uni().await.expect("open");
        drop(stream.write_chunk(junk).await);
        drop(stream.finish());
    }
    outcome(ends.carrier.submit(TO, sent.clone()))
        .await
        .expect("it arrives");
    assert_eq!(shelf.taken(), [(FROM, sent)]);
    // Two tasks stand: that of the connection, and none for what was refused.
    until("only standing tasks", || ends.tasks.len() == 1).await;
    assert!(ends.all_room_is_free());
}

#[tokio::test]
async fn a_part_that_comes_twice_spoils_its_parcel_only() {
    let shelf = Arc::new(Shelf::default());
    let ends = Ends::new(Arc::clone(&shelf) as _, QuicLimits::default()).await;
    let sent = parcel(1, 0, 3 * CHUNK_BYTES);
    let (mut stream, mut replies) = ends.wire.near.open_bi().await.expect("open");
    stream.write_chunk(opening(&sent, 3)).await.expect("open");
    let Ok(Reply::Admitted) = read_message(&mut replies).await else {
        panic!("it is in order so far");
    };
    let mut parts = Vec::new();
    for part in [1, 1] {
        let mut stream = ends.wire.near.open_uni().await.expect("open");
        let serial = 1 << 40;
        let opening = encode(&PartOpening { serial, part }).expect("it is short");
        stream.write_chunk(opening).await.expect("open");
        parts.push(stream);
    }
    let reply = timeout(PATIENCE, read_message(&mut replies)).await;
    let Ok(Ok(Reply::Rejected(Rejection::Wrong(reason)))) = reply else {
        panic!("it must be rejected");
    };
    assert!(reason.contains("part 1"), "{reason}");
    outcome(ends.carrier.submit(TO, sent))
        .await
        .expect("it arrives");
}

#[tokio::test]
async fn a_sender_that_falls_silent_gives_its_room_back() {
    let shelf = Arc::new(Shelf::default());
    let limits = QuicLimits {
        patience: Duration::from_millis(100),
        ..parted()
    };
    let ends = Ends::new(Arc::clone(&shelf) as _, limits).await;
    let sent = parcel(1, 0, 3 * CHUNK_BYTES);
    let (mut stream, mut replies) = ends.wire.near.open_bi().await.expect("open");
    stream.write_chunk(opening(&sent, 3)).await.expect("open");
    let Ok(Reply::Admitted) = read_message(&mut replies).await else {
        panic!("it is in order so far");
    };
    assert!(!ends.all_room_is_free());
    until("all room free", || ends.all_room_is_free()).await;
    // The sender hears of it too: its stream is stopped.
    let stopped = timeout(PATIENCE, stream.stopped()).await;
    assert!(stopped.is_ok());
}

#[tokio::test]
async fn a_receiver_that_falls_silent_is_given_up() {
    let (_never, gate) = watch::channel(());
    #[derive(Debug)]
    struct Stuck(watch::Receiver<()>);
    #[async_trait]
    impl crate::transfer::KvReceiver for Stuck {
        fn admit(&self, _: NodeId, _: &crate::transfer::ParcelHeader) -> Result<(), Rejection> {
            Ok(())
        }
        async fn deliver(&self, _: NodeId, _: Parcel) -> Result<(), Rejection> {
            drop(self.0.clone().changed().await);
            Ok(())
        }
    }
    let limits = QuicLimits {
        patience: Duration::from_millis(100),
        ..QuicLimits::default()
    };
    let ends = Ends::new(Arc::new(Stuck(gate)), limits).await;
    let silent = outcome(ends.carrier.submit(TO, parcel(1, 0, 10))).await;
    assert_eq!(silent, Err(TransferError::Broken("no headway".to_owned())));
}

#[tokio::test]
async fn the_budget_is_shared_and_never_exceeded() {
    let shelf = Arc::new(Shelf::default());
    let limits = QuicLimits {
        receive_bytes: 5 << 20,
        ..parted()
    };
    let ends = Ends::new(Arc::clone(&shelf) as _, limits).await;
    let under_way: Vec<_> = (0..12)
        .map(|stage| ends.carrier.submit(TO, parcel(stage, 0, 2 << 20)))
        .collect();
    for transfer in under_way {
        outcome(transfer).await.expect("it arrives in its turn");
    }
    assert_eq!(shelf.taken().len(), 12);
    let too_long = outcome(ends.carrier.submit(TO, parcel(1, 0, (5 << 20) + 1))).await;
    let rejected = TransferError::Rejected(Rejection::TooLarge);
    assert_eq!(too_long, Err(rejected));
    until("all room free", || ends.all_room_is_free()).await;
}
