//! Each line is one fact: what a home that stands so answers to a claim.

use super::*;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);

/// A request placed at A (ownership 1).
fn placed() -> Arbiter {
    let mut arbiter = Arbiter::new();
    assert_eq!(arbiter.pass_on(A), Epoch(1));
    arbiter
}

/// A request placed at A and claimed by B (ownership 2).
fn claimed() -> Arbiter {
    let mut arbiter = placed();
    check(&mut arbiter, (B, 2, 5), 5, Some(5));
    arbiter
}

/// Claims ownership `epoch` for `by`, which has `output` tokens, at a home that has `received`.
#[track_caller]
fn check(
    arbiter: &mut Arbiter,
    (by, epoch, output): (NodeId, u32, u32),
    received: u32,
    granted: Option<u32>,
) {
    let epoch = Epoch(epoch);
    let answer = arbiter.claim(by, Claim { epoch, output }, received);
    let expected = granted.map_or(ClaimAnswer::Lost, |from| ClaimAnswer::Granted { from });
    assert_eq!(answer, expected);
}

#[test]
fn the_next_ownership_is_granted_to_the_first_who_asks_and_to_nobody_else() {
    let mut arbiter = placed();
    check(&mut arbiter, (B, 2, 5), 3, Some(3));
    check(&mut arbiter, (A, 2, 5), 3, None);
    assert_eq!((arbiter.epoch(), arbiter.owner()), (Epoch(2), Some(B)));
}

#[test]
fn the_owner_is_told_so_again_from_where_the_client_is() {
    let mut arbiter = claimed();
    check(&mut arbiter, (B, 2, 5), 5, Some(5));
    check(&mut arbiter, (B, 2, 6), 6, Some(6));
    assert_eq!(arbiter.epoch(), Epoch(2));
}

#[test]
fn only_the_very_next_ownership_can_be_claimed() {
    check(&mut placed(), (B, 0, 9), 0, None);
    check(&mut placed(), (B, 1, 9), 0, None);
    check(&mut placed(), (B, 3, 9), 0, None);
    check(&mut claimed(), (A, 2, 9), 0, None);
    check(&mut claimed(), (B, 1, 9), 0, None);
    check(&mut claimed(), (A, 3, 9), 9, Some(9));
}

#[test]
fn what_the_home_placed_cannot_be_claimed_not_even_where_it_was_placed() {
    check(&mut placed(), (A, 1, 9), 0, None);
    let mut arbiter = claimed();
    assert_eq!(arbiter.pass_on(B), Epoch(3));
    check(&mut arbiter, (B, 3, 9), 0, None);
    check(&mut arbiter, (B, 2, 9), 0, None);
}

#[test]
fn a_claim_with_less_output_than_the_client_has_is_lost_also_for_the_owner() {
    check(&mut placed(), (B, 2, 2), 3, None);
    check(&mut placed(), (B, 2, 3), 3, Some(3));
    check(&mut claimed(), (B, 2, 5), 6, None);
}

#[test]
fn nothing_is_granted_before_the_first_placement_or_after_the_end() {
    check(&mut Arbiter::new(), (A, 1, 9), 0, None);
    let mut arbiter = claimed();
    arbiter.end();
    check(&mut arbiter, (B, 2, 9), 0, None);
    check(&mut arbiter, (A, 3, 9), 0, None);
}

#[test]
fn the_last_number_of_all_is_not_granted_twice() {
    let mut arbiter = Arbiter {
        epoch: Epoch(u32::MAX),
        ..claimed()
    };
    check(&mut arbiter, (A, u32::MAX, 9), 0, None);
    check(&mut arbiter, (B, u32::MAX, 9), 0, Some(0));
}
