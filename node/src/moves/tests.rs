//! Whole hand-overs between homes, hosts and simulated engines over in-process planes: what the client sees, who
//! owns the request, and what is left behind, with faults at every step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use shoal_gossip::{NodeId, RequestId};
use shoal_migrate::CopyManner;
use shoal_migrate::transfer::faulty::{Fault, Faulty};
use shoal_migrate::transfer::{ParcelHeader, ParcelKind};
use tokio::time::timeout;

use crate::engine::moving::JobPhase;
use crate::frontend::{HomeError, HomeEvent, Running};
use crate::home::testing::{Mesh, PATIENCE, read};
use crate::mesh::memory::Loss;
use crate::mesh::messages::{Ask, MoveAnswer};

/// Long enough for several moves at the speed of the simulated engines.
const TOKENS: u32 = 600;

/// A request under way: the first of its output has arrived.
struct Stream {
    running: Running,
    id: RequestId,
    text: String,
    seen: u32,
}

impl Stream {
    async fn begin(mesh: &Mesh, home: usize) -> Self {
        let running = mesh.ask(home, "m", TOKENS).await.expect("a host");
        let mut stream = Self {
            id: running.id,
            running,
            text: String::new(),
            seen: 0,
        };
        stream.until(3).await;
        stream
    }

    /// Reads until the output has so many tokens.
    async fn until(&mut self, tokens: u32) {
        while self.seen < tokens {
            let event = timeout(PATIENCE, self.running.events.recv()).await;
            let event = event.expect("an event in time").expect("no end yet");
            let HomeEvent::Tokens(batch) = event else {
                panic!("expected tokens, got {event:?}");
            };
            assert_eq!(batch.index, self.seen, "each index once, in order");
            self.seen += u32::try_from(batch.ids.len()).expect("few");
            self.text.push_str(&batch.text);
        }
    }

    /// Reads the rest; everything must be what an unmoved request gave.
    async fn ends_as(self, whole: &(String, Vec<u32>, Option<HomeError>)) {
        let (rest, indexes, failed) = read(self.running).await;
        assert_eq!(failed, None);
        assert_eq!(self.text + &rest, whole.0);
        assert_eq!(indexes, (self.seen..TOKENS).collect::<Vec<u32>>());
    }
}

/// Three nodes of one model, and a fourth of another from which requests can be asked.
fn mesh() -> Mesh {
    Mesh::of(&["other", "m", "m", "m"])
}

impl Mesh {
    fn at(&self, node: NodeId) -> usize {
        let found = self.members.iter().position(|member| member.id == node);
        found.expect("a member")
    }

    /// Where the home thinks the request is.
    fn host(&self, request: RequestId) -> usize {
        let home = &self.members[self.at(request.home)].home;
        self.at(home.whereabouts(request).expect("it runs").host)
    }

    /// Another node that serves the model.
    fn other(&self, than: usize) -> usize {
        if than == 3 { 1 } else { than + 1 }
    }

    async fn hand_over(&self, request: RequestId, to: usize) -> MoveAnswer {
        self.hand_over_by(request, to, CopyManner::Staged).await
    }

    async fn hand_over_by(&self, request: RequestId, to: usize, manner: CopyManner) -> MoveAnswer {
        let from = self.host(request);
        let moved = self.members[from]
            .moves
            .hand_over(request, self.id(to), manner);
        timeout(PATIENCE, moved).await.expect("an answer in time")
    }

    async fn whole(&self) -> (String, Vec<u32>, Option<HomeError>) {
        read(self.ask(0, "m", TOKENS).await.expect("a host")).await
    }

    /// Nothing is held anywhere, and no request was saved by its home's ledger alone.
    async fn all_empty(&self) {
        assert_eq!(self.replays(), 0);
        for index in 0..self.members.len() {
            self.empty(index).await;
        }
    }
}

fn reason(answer: &MoveAnswer) -> &str {
    match answer {
        MoveAnswer::Stayed { reason } => reason,
        MoveAnswer::Moved(_) | MoveAnswer::Gone { .. } | MoveAnswer::Unknown => {
            panic!("expected it to stay, got {answer:?}")
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_request_gives_what_an_unmoved_one_gives_whatever_the_manner() {
    let mesh = mesh();
    let whole = mesh.whole().await;
    for manner in [
        CopyManner::Staged,
        CopyManner::Blocking,
        CopyManner::Recompute,
        CopyManner::Restart,
    ] {
        let mut stream = Stream::begin(&mesh, 0).await;
        for tokens in [20, 60, 100] {
            let from = mesh.host(stream.id);
            let to = mesh.other(from);
            let answer = mesh.hand_over_by(stream.id, to, manner).await;
            let MoveAnswer::Moved(report) = answer else {
                panic!("{manner:?}: {answer:?}");
            };
            assert!(report.bytes > 0 && report.stages > 0 && report.total_us >= report.pause_us);
            assert_eq!(mesh.host(stream.id), to);
            mesh.empty(from).await;
            stream.until(tokens).await;
        }
        stream.ends_as(&whole).await;
        mesh.all_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_moves_to_its_home_and_away_again() {
    let mesh = mesh();
    let whole = mesh.whole().await;
    let mut stream = Stream::begin(&mesh, 1).await;
    for (to, tokens) in [(2, 20), (1, 40), (3, 60), (1, 80)] {
        if mesh.host(stream.id) != to {
            let answer = mesh.hand_over(stream.id, to).await;
            assert!(matches!(answer, MoveAnswer::Moved(_)), "{answer:?}");
        }
        stream.until(tokens).await;
    }
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_move_is_told_why_and_runs_on() {
    let mesh = mesh();
    let whole = mesh.whole().await;
    let stream = Stream::begin(&mesh, 0).await;
    let host = mesh.host(stream.id);
    let moves = &mesh.members[host].moves;
    let ask = |request, to| moves.hand_over(request, to, CopyManner::Staged);
    assert!(reason(&ask(stream.id, mesh.id(host)).await).contains("this node"));
    assert!(reason(&ask(stream.id, NodeId(99)).await).contains("not in the mesh"));
    let other_model = ask(stream.id, mesh.id(0)).await;
    assert!(reason(&other_model).contains("model"), "{other_model:?}");
    let unknown = RequestId {
        serial: stream.id.serial ^ 1,
        ..stream.id
    };
    assert_eq!(ask(unknown, mesh.id(0)).await, MoveAnswer::Unknown);
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_moves_of_one_request_one_happens() {
    let mesh = mesh();
    let whole = mesh.whole().await;
    let stream = Stream::begin(&mesh, 0).await;
    let host = mesh.host(stream.id);
    let (one, two) = (mesh.other(host), mesh.other(mesh.other(host)));
    let moves = &mesh.members[host].moves;
    let answers = tokio::join!(
        moves.hand_over(stream.id, mesh.id(one), CopyManner::Staged),
        moves.hand_over(stream.id, mesh.id(two), CopyManner::Staged),
    );
    let moved = [&answers.0, &answers.1]
        .into_iter()
        .filter(|answer| matches!(answer, MoveAnswer::Moved(_)))
        .count();
    assert_eq!(moved, 1, "{answers:?}");
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_requests_change_places() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    let whole = mesh.whole().await;
    let mut streams = Vec::new();
    while streams.len() < 2 {
        let stream = Stream::begin(&mesh, 0).await;
        if streams
            .iter()
            .all(|other: &Stream| mesh.host(other.id) != mesh.host(stream.id))
        {
            streams.push(stream);
        }
    }
    let (one, two) = (mesh.host(streams[0].id), mesh.host(streams[1].id));
    let answers = tokio::join!(
        mesh.hand_over(streams[0].id, two),
        mesh.hand_over(streams[1].id, one),
    );
    assert!(matches!(answers.0, MoveAnswer::Moved(_)), "{answers:?}");
    assert!(matches!(answers.1, MoveAnswer::Moved(_)), "{answers:?}");
    for stream in streams {
        stream.ends_as(&whole).await;
    }
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_request_moves_without_kv_and_starts_there() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    let whole = mesh.whole().await;
    // Two run on the second node; a third one waits there, since the third node cannot be reached.
    mesh.net.cut(mesh.id(0), mesh.id(2));
    let held = [Stream::begin(&mesh, 0).await, Stream::begin(&mesh, 0).await];
    let waiting = mesh
        .ask(0, "m", TOKENS)
        .await
        .expect("a place in the queue");
    let job = mesh.members[1].engine.moving().expect("it moves requests");
    assert_eq!(
        job.job(waiting.id).map(|job| job.phase),
        Some(JobPhase::Waiting)
    );
    mesh.net.mend(mesh.id(0), mesh.id(2));
    let answer = mesh.hand_over(waiting.id, 2).await;
    assert!(matches!(answer, MoveAnswer::Moved(_)), "{answer:?}");
    let stream = Stream {
        id: waiting.id,
        running: waiting,
        text: String::new(),
        seen: 0,
    };
    stream.ends_as(&whole).await;
    for stream in held {
        stream.ends_as(&whole).await;
    }
    mesh.all_empty().await;
}

/// Moves a request while this is lost, once, and holds that nothing else is.
async fn with_loss(name: &'static str, which: fn(&Ask) -> bool, loss: Loss, moves: bool) {
    let mesh = mesh();
    let whole = mesh.whole().await;
    let stream = Stream::begin(&mesh, 0).await;
    let left = Arc::new(AtomicU32::new(1));
    let lost = Arc::clone(&left);
    mesh.net.lose(move |_, _, ask| {
        let hit = which(ask)
            && lost
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| {
                    left.checked_sub(1)
                })
                .is_ok();
        hit.then_some(loss)
    });
    let from = mesh.host(stream.id);
    let to = mesh.other(from);
    let answer = mesh.hand_over(stream.id, to).await;
    assert_eq!(left.load(Ordering::Acquire), 0, "{name}: nothing was lost");
    let stayed = matches!(answer, MoveAnswer::Stayed { .. });
    assert_eq!(stayed, !moves, "{name}: {answer:?}");
    assert_eq!(
        mesh.host(stream.id),
        if moves { to } else { from },
        "{name}"
    );
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_proposal_or_its_lost_answer_leaves_the_request_where_it_is() {
    let propose: fn(&Ask) -> bool = |ask| matches!(ask, Ask::Propose(_));
    with_loss("proposal", propose, Loss::Question, false).await;
    with_loss("its answer", propose, Loss::Answer, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_claim_is_made_again() {
    let claim: fn(&Ask) -> bool = |ask| matches!(ask, Ask::Claim { .. });
    with_loss("claim", claim, Loss::Question, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_is_lost_is_made_again_or_known_by_the_home_s_stream() {
    let claim: fn(&Ask) -> bool = |ask| matches!(ask, Ask::Claim { .. });
    with_loss("answer to a claim", claim, Loss::Answer, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_misses_the_commit_asks_the_home_and_lets_go() {
    let committed: fn(&Ask) -> bool = |ask| matches!(ask, Ask::Committed { .. });
    with_loss("commit", committed, Loss::Question, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_in_the_middle_of_a_move_leaves_nothing_anywhere() {
    let mesh = mesh();
    let stream = Stream::begin(&mesh, 0).await;
    let (id, from) = (stream.id, mesh.host(stream.id));
    let to = mesh.other(from);
    // The proposal's answer takes long enough for the client to go.
    mesh.net
        .delay(mesh.id(to), mesh.id(from), Duration::from_millis(100));
    let moves = Arc::clone(&mesh.members[from].moves);
    let target = mesh.id(to);
    let moved = moves.hand_over(id, target, CopyManner::Staged);
    let gone = async { drop(stream) };
    let (answer, ()) = tokio::join!(moved, gone);
    assert!(!matches!(answer, MoveAnswer::Moved(_)), "{answer:?}");
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_cut_off_from_its_home_does_not_get_the_request() {
    let mesh = mesh();
    let whole = mesh.whole().await;
    let stream = Stream::begin(&mesh, 0).await;
    let from = mesh.host(stream.id);
    let to = mesh.other(from);
    mesh.net.cut(mesh.id(to), mesh.id(0));
    let answer = mesh.hand_over(stream.id, to).await;
    assert!(matches!(answer, MoveAnswer::Stayed { .. }), "{answer:?}");
    assert_eq!(mesh.host(stream.id), from);
    mesh.net.mend(mesh.id(to), mesh.id(0));
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_cut_off_from_its_home_after_the_last_stage_changes_nothing_for_the_client() {
    let mesh = mesh();
    let whole = mesh.whole().await;
    let stream = Stream::begin(&mesh, 0).await;
    let from = mesh.host(stream.id);
    let to = mesh.other(from);
    let (source, home) = (mesh.id(from), mesh.id(0));
    // The commit does not reach the source, nor its own question the home: it must neither run on nor keep KV.
    mesh.net.lose(move |asker, asked, ask| {
        let commit = matches!(ask, Ask::Committed { .. }) && asked == source;
        let doubt = matches!(ask, Ask::Claim { .. }) && (asker, asked) == (source, home);
        (commit || doubt).then_some(Loss::Question)
    });
    let answer = mesh.hand_over(stream.id, to).await;
    assert!(matches!(answer, MoveAnswer::Gone { .. }), "{answer:?}");
    assert_eq!(mesh.host(stream.id), to);
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

/// Moves a request while the carrier does this to one of its parcels. Whether it leaves may be a race, which is `None`;
/// what the client sees is not, nor that nothing is left.
async fn with_fault(
    name: &str,
    hit: fn(&ParcelHeader) -> bool,
    fault: Fault,
    leaves: Option<bool>,
) {
    let mesh = Mesh::with_carriers(&["other", "m", "m", "m"], |_, carrier| {
        let mut left = 1;
        Arc::new(Faulty::new(carrier, move |_, header| {
            if left > 0 && hit(header) {
                left -= 1;
                fault
            } else {
                Fault::None
            }
        }))
    });
    let whole = mesh.whole().await;
    let stream = Stream::begin(&mesh, 0).await;
    let from = mesh.host(stream.id);
    let to = mesh.other(from);
    let answer = mesh.hand_over(stream.id, to).await;
    if let Some(leaves) = leaves {
        let left = !matches!(answer, MoveAnswer::Stayed { .. });
        assert_eq!(left, leaves, "{name}: {answer:?}");
        let host = if leaves { to } else { from };
        assert_eq!(mesh.host(stream.id), host, "{name}");
    }
    stream.ends_as(&whole).await;
    mesh.all_empty().await;
}

fn is_opening(header: &ParcelHeader) -> bool {
    header.kind == ParcelKind::Opening
}

fn is_stage(header: &ParcelHeader) -> bool {
    matches!(header.kind, ParcelKind::Stage(_))
}

fn is_last(header: &ParcelHeader) -> bool {
    matches!(header.kind, ParcelKind::Last(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_fails_before_the_last_stage_leaves_the_request_where_it_is() {
    for (fault, name) in [
        (Fault::Lose, "lost"),
        (Fault::Fail, "unreachable"),
        (Fault::Damage, "damaged"),
        (Fault::Stall, "stalled"),
    ] {
        with_fault(name, is_opening, fault, Some(false)).await;
        with_fault(name, is_stage, fault, Some(false)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_that_is_wrong_in_a_way_only_the_engine_can_see_is_refused() {
    with_fault("altered", is_stage, Fault::Alter { at: 3 }, Some(false)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_stage_that_does_not_arrive_is_claimed_back() {
    for (fault, name) in [
        (Fault::Lose, "lost"),
        (Fault::Fail, "unreachable"),
        (Fault::Damage, "damaged"),
        (Fault::Stall, "stalled"),
    ] {
        with_fault(name, is_last, fault, Some(false)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parcel_that_is_late_in_time_is_taken_and_one_that_comes_twice_harms_nobody() {
    let late = Fault::Delay(Duration::from_millis(300));
    for hit in [is_opening, is_stage, is_last] {
        with_fault("late", hit, late, Some(true)).await;
        // The sender hears of either copy, and the second is rejected.
        with_fault("twice", hit, Fault::Duplicate, None).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_stage_whose_acknowledgement_is_lost_has_one_owner_all_the_same() {
    // Source and target race for the claim.
    with_fault("unacknowledged", is_last, Fault::LoseAnswer, None).await;
}

/// A stream whose request runs at this node.
async fn begin_at(mesh: &Mesh, host: usize) -> Stream {
    for _ in 0..100 {
        let stream = Stream::begin(mesh, 0).await;
        if mesh.host(stream.id) == host {
            return stream;
        }
    }
    panic!("no request came to node {host}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_target_refuses_and_the_request_runs_on() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    let whole = mesh.whole().await;
    // Both slots of the third node are taken.
    let held = [begin_at(&mesh, 2).await, begin_at(&mesh, 2).await];
    let stream = begin_at(&mesh, 1).await;
    let answer = mesh.hand_over(stream.id, 2).await;
    assert!(reason(&answer).contains("no room"), "{answer:?}");
    stream.ends_as(&whole).await;
    for stream in held {
        stream.ends_as(&whole).await;
    }
    mesh.all_empty().await;
}
