use shoal_gossip::ClusterView;
use shoal_gossip::NodeRow;
use shoal_gossip::Tokens;

use super::*;
use crate::dispatch::policy::PolicyName;
use crate::dispatch::testing::{MAX_AGE, at, load, need, rng, row, view};

/// A mesh and one placement in it, spoken to in the protocol's words.
struct Course {
    view: ClusterView,
    corrections: Corrections,
    policy: Policy,
    rng: StdRng,
    placement: Placement,
}

impl Course {
    fn among(rows: Vec<NodeRow>) -> Self {
        Self {
            view: view(rows),
            corrections: Corrections::default(),
            policy: Policy::new(PolicyName::Freest),
            rng: rng(),
            placement: Placement::new(
                need(10),
                PlacementLimits {
                    max_view_age: MAX_AGE,
                    max_offers: 5,
                },
            ),
        }
    }

    fn step(&mut self, act: impl FnOnce(&mut Placement, &mut World<'_>) -> Step) -> Step {
        let mut world = World {
            this: NodeId(3),
            now: at(0),
            view: &self.view,
            corrections: &mut self.corrections,
            policy: &mut self.policy,
            rng: &mut self.rng,
        };
        act(&mut self.placement, &mut world)
    }

    fn start(&mut self) -> Step {
        self.step(Placement::start)
    }

    fn answer(&mut self, answer: Answer) -> Step {
        self.step(|placement, world| {
            placement.answered(
                Outcome::Answered {
                    answer: &answer,
                    load: LoadSummary {
                        seq: 2,
                        ..load(50, 1, 0)
                    },
                },
                world,
            )
        })
    }

    fn silence(&mut self) -> Step {
        self.step(|placement, world| placement.answered(Outcome::Silent, world))
    }
}

fn offered(step: Step) -> u64 {
    match step {
        Step::Offer { choice, .. } => choice.taken.node.0,
        other => panic!("expected an offer, got {other:?}"),
    }
}

fn three() -> Vec<NodeRow> {
    vec![
        row(1, load(10, 1, 0), at(0)),
        row(2, load(20, 1, 0), at(0)),
        row(3, load(30, 1, 0), at(0)),
    ]
}

fn accept() -> Answer {
    Answer::Accept {
        reservation: 9,
        lease_ms: 1_000,
    }
}

#[test]
fn an_accepted_offer_is_submitted_and_its_charge_taken_back() {
    let mut course = Course::among(three());
    assert_eq!(offered(course.start()), 1);
    assert_eq!(course.corrections.charged(NodeId(1)), Blocks(10));
    assert_eq!(
        course.answer(accept()),
        Step::Submit {
            to: NodeId(1),
            reservation: 9
        }
    );
    assert_eq!(course.corrections.charged(NodeId(1)), Blocks::ZERO);
}

#[test]
fn after_silence_the_last_offer_is_to_the_home_itself() {
    // Its home is the fullest of all.
    let used = [10, 20, 90, 30, 40, 50];
    let rows = (1..).zip(used);
    let rows: Vec<_> = rows
        .map(|(node, used)| row(node, load(used, 1, 0), at(0)))
        .collect();
    let mut course = Course::among(rows.clone());
    course.placement.limits.max_offers = 3;
    assert_eq!(offered(course.start()), 1);
    assert_eq!(offered(course.silence()), 2);
    let last = course.silence();
    assert_eq!(offered(last), 3);
    assert!(matches!(last, Step::Offer { choice, .. } if choice.reason == Reason::Home));
    assert!(
        matches!(last, Step::Offer { hops: MAX_HOPS, .. }),
        "it is not redirected"
    );
    assert_eq!(course.silence(), Step::GiveUp(GiveUp::Unavailable));
    // Refusals are answers: the policy goes on choosing.
    let mut course = Course::among(rows);
    course.placement.limits.max_offers = 3;
    let full = || Answer::Refuse(RefuseReason::QueueFull);
    assert_eq!(offered(course.start()), 1);
    assert_eq!(offered(course.answer(full())), 2);
    assert_eq!(offered(course.answer(full())), 4);
}

#[test]
fn a_node_that_did_not_answer_is_left_alone_until_it_is_heard_of_again() {
    let mut course = Course::among(three());
    assert_eq!(offered(course.start()), 1);
    assert_eq!(offered(course.silence()), 2);
    // For every other request, too.
    course.placement = Placement::new(need(10), course.placement.limits);
    assert_eq!(offered(course.start()), 2);
    course.view = view(vec![
        row(1, load(10, 1, 0), at(1)),
        row(2, load(20, 1, 0), at(0)),
    ]);
    course.placement = Placement::new(need(10), course.placement.limits);
    assert_eq!(offered(course.start()), 1);
}

#[test]
fn a_silent_or_refusing_node_is_excluded_and_the_next_is_asked() {
    let mut course = Course::among(three());
    assert_eq!(offered(course.start()), 1);
    assert_eq!(offered(course.silence()), 2);
    assert_eq!(
        offered(course.answer(Answer::Refuse(RefuseReason::Draining))),
        3
    );
    assert_eq!(course.silence(), Step::GiveUp(GiveUp::Unavailable));
    for node in 1..=3 {
        assert_eq!(course.corrections.charged(NodeId(node)), Blocks::ZERO);
    }
}

#[test]
fn full_everywhere_is_overload_and_not_absence() {
    let mut course = Course::among(three());
    course.start();
    course.answer(Answer::Refuse(RefuseReason::QueueFull));
    course.answer(Answer::Refuse(RefuseReason::NeverFits));
    assert_eq!(course.silence(), Step::GiveUp(GiveUp::Overloaded));
}

#[test]
fn a_request_too_big_for_every_node_is_told_so() {
    let mut course = Course::among(vec![row(1, load(0, 0, 0), at(0))]);
    course.start();
    assert_eq!(
        course.answer(Answer::Refuse(RefuseReason::NeverFits)),
        Step::GiveUp(GiveUp::NeverFits)
    );
}

#[test]
fn a_redirect_is_followed_and_does_not_exclude_who_pointed() {
    let mut course = Course::among(three());
    assert_eq!(offered(course.start()), 1);
    let redirect = |to| Answer::Redirect {
        to: NodeId(to),
        load: LoadSummary {
            seq: 2,
            ..load(0, 0, 0)
        },
    };
    let step = course.answer(redirect(3));
    assert_eq!(offered(step), 3);
    assert!(matches!(step, Step::Offer { hops: 1, .. }));
    assert!(course.placement.need().excluded.is_empty());
    assert_eq!(offered(course.silence()), 2);
}

#[test]
fn hops_are_bounded_whatever_the_hosts_say() {
    let mut course = Course::among(three());
    course.start();
    let mut offers = 1;
    let mut to = 1;
    loop {
        to = to % 3 + 1;
        let redirect = Answer::Redirect {
            to: NodeId(to),
            load: load(0, 0, 0),
        };
        match course.answer(redirect) {
            Step::Offer { hops, .. } => {
                assert!(hops <= MAX_HOPS);
                offers += 1;
            }
            Step::GiveUp(_) => break,
            Step::Submit { .. } => panic!("nobody accepted"),
        }
        assert!(offers <= 5);
    }
}

#[test]
fn a_redirect_to_a_stranger_or_an_excluded_node_is_not_followed() {
    let mut course = Course::among(three());
    course.start();
    assert_eq!(offered(course.silence()), 2);
    let back = Answer::Redirect {
        to: NodeId(1),
        load: load(0, 0, 0),
    };
    let next = offered(course.answer(back));
    assert_ne!(next, 1);
    let stranger = Answer::Redirect {
        to: NodeId(77),
        load: load(0, 0, 0),
    };
    assert_ne!(offered(course.answer(stranger)), 77);
}

#[test]
fn a_failed_submission_goes_on_elsewhere() {
    let mut course = Course::among(three());
    course.start();
    course.answer(accept());
    let step = course.step(|placement, world| placement.submit_failed(NodeId(1), false, world));
    assert_ne!(offered(step), 1);
}

#[test]
fn a_model_nobody_serves_is_unknown() {
    let mut course = Course::among(Vec::new());
    assert_eq!(course.start(), Step::GiveUp(GiveUp::UnknownModel));
}

#[test]
fn an_abandoned_offer_leaves_no_charge() {
    let mut course = Course::among(three());
    course.start();
    let Course {
        placement,
        corrections,
        ..
    } = &mut course;
    placement.abandon(corrections);
    assert_eq!(corrections.charged(NodeId(1)), Blocks::ZERO);
}

fn probed(node: u64, load: LoadSummary) -> Candidate {
    Candidate {
        node: NodeId(node),
        load,
        age: Duration::ZERO,
        charged: Blocks::ZERO,
        demand: Blocks(10),
        block_size: BlockSize::DEFAULT,
    }
}

#[test]
fn a_host_probes_only_when_taking_the_request_would_leave_it_low_or_queueing() {
    let low = Freeness::of_blocks(10);
    assert!(!should_probe(&load(40, 4, 0), Blocks(10), 0, low));
    assert!(should_probe(&load(60, 4, 0), Blocks(10), 0, low));
    assert!(should_probe(&load(0, 0, 1), Blocks(10), 0, low));
    assert!(should_probe(&load(95, 0, 0), Blocks(10), 0, low));
    assert!(!should_probe(&load(95, 0, 0), Blocks(10), MAX_HOPS, low));
    let always = Freeness::of_blocks(1_000_000);
    assert!(should_probe(&load(0, 0, 0), Blocks(10), 0, always));
}

#[test]
fn a_host_points_only_to_a_node_where_the_request_starts_at_once_and_is_better_off() {
    let here = probed(1, load(60, 4, 0));
    let better = probed(2, load(20, 2, 0));
    let best = probed(3, load(10, 1, 0));
    let full = probed(4, load(95, 1, 0));
    let worse = probed(5, load(80, 4, 0));
    assert_eq!(better_elsewhere(&here, &[better, best]), Some(best));
    assert_eq!(better_elsewhere(&here, &[full, worse]), None);
    // A host that would queue it points to any node that would not.
    let queueing = probed(1, load(60, 4, 3));
    assert_eq!(better_elsewhere(&queueing, &[worse]), Some(worse));
    assert_eq!(better_elsewhere(&queueing, &[full]), None);
    assert_eq!(better_elsewhere(&queueing, &[]), None);
}

#[test]
fn with_room_enough_a_host_points_to_where_less_is_to_be_done_first() {
    let prefills = |node, used, running, backlog| {
        let load = load(used, running, 0);
        probed(
            node,
            LoadSummary {
                prefill_backlog: Tokens(backlog),
                ..load
            },
        )
    };
    // Both have more than ten blocks a request left; the freer has a long prompt before it.
    let busy = prefills(1, 20, 2, 640);
    let calm = prefills(2, 40, 3, 0);
    assert_eq!(better_elsewhere(&busy, &[calm]), Some(calm));
    assert_eq!(better_elsewhere(&calm, &[busy]), None);
    // The same with little room: headroom counts.
    let busy = prefills(1, 50, 4, 640);
    let calm = prefills(2, 70, 4, 0);
    assert_eq!(better_elsewhere(&busy, &[calm]), None);
    assert_eq!(better_elsewhere(&calm, &[busy]), Some(busy));
    // One with room is better than one without, whatever it has to do.
    let roomy = prefills(3, 20, 2, 6_400);
    assert_eq!(better_elsewhere(&calm, &[roomy]), Some(roomy));
}
