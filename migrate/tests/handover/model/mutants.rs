//! Errors put in around the cores. Each must be found, or the checks of the cores mean nothing.

use std::collections::BTreeSet;

use stateright::{Checker, HasDiscoveries, Model};

use super::{Bounds, ENDS_WELL, INVARIANTS, NOTHING_BAD, SmallMesh, what_is_wrong};
use crate::mesh::Mutant;

/// A mesh with these errors must break one of these properties.
#[track_caller]
fn check_found(mutants: &[Mutant], properties: &[&'static str]) {
    let checker = SmallMesh::new(Bounds::one(), mutants)
        .checker()
        .finish_when(HasDiscoveries::AnyOf(properties.iter().copied().collect()))
        .spawn_bfs()
        .join();
    let found = properties
        .iter()
        .find_map(|property| Some((property, checker.discovery(property)?)));
    let states = checker.unique_state_count();
    assert!(
        found.is_some(),
        "{mutants:?} was not found in {states} states"
    );
    if let Some((property, path)) = found {
        let wrong = what_is_wrong(&path.last_state().world);
        let events = path.into_actions().len();
        println!(
            "{mutants:?} breaks {property:?} after {events} events, {states} states: {wrong:?}"
        );
    }
}

const ANY: [&str; 3] = [NOTHING_BAD, INVARIANTS, ENDS_WELL];

#[test]
fn a_source_that_resumes_on_a_lost_commit_reply_is_found() {
    check_found(&[Mutant::SourceResumesOnDoubt], &ANY);
}

#[test]
fn a_source_that_runs_on_after_the_last_stage_is_found() {
    check_found(&[Mutant::SourceRunsWhileInDoubt], &ANY);
}

#[test]
fn a_source_that_frees_its_blocks_when_the_last_stage_arrives_is_found() {
    check_found(&[Mutant::SourceFreesOnArrival], &ANY);
}

#[test]
fn a_source_that_keeps_what_it_lost_is_found() {
    check_found(&[Mutant::SourceKeepsWhatItLost], &ANY);
}

#[test]
fn a_source_that_waits_for_ever_is_found() {
    check_found(&[Mutant::SourceWaitsForEver], &ANY);
}

#[test]
fn a_target_that_runs_before_the_grant_is_found() {
    check_found(&[Mutant::TargetRunsBeforeTheGrant], &ANY);
}

#[test]
fn a_target_that_asks_the_home_once_and_waits_for_ever_is_found() {
    check_found(&[Mutant::TargetAsksOnce], &ANY);
}

#[test]
fn a_target_that_keeps_what_was_cancelled_is_found() {
    check_found(&[Mutant::TargetKeepsWhatWasCancelled], &ANY);
}

#[test]
fn a_target_that_skips_a_token_is_found() {
    check_found(&[Mutant::TargetSkipsAToken], &ANY);
}

#[test]
fn a_home_that_grants_one_ownership_twice_is_found() {
    check_found(&[Mutant::HomeGrantsTwice], &ANY);
}

#[test]
fn a_home_that_lets_a_node_claim_what_was_placed_there_is_found() {
    check_found(&[Mutant::HomeLetsThePlacedBeClaimed], &ANY);
}

/// The home's look at the claimant's output is a second line: it matters when a source has gone on beyond what it
/// handed over. With such a source the home keeps the client's stream whole, and without the look it does not.
#[test]
fn a_home_that_ignores_output_is_found_where_a_source_runs_on() {
    let source = Mutant::SourceRunsWhileInDoubt;
    let checker = SmallMesh::new(Bounds::one(), &[source])
        .checker()
        .finish_when(HasDiscoveries::AnyOf(BTreeSet::from([NOTHING_BAD])))
        .spawn_bfs()
        .join();
    assert!(checker.discovery(NOTHING_BAD).is_none());
    check_found(&[source, Mutant::HomeIgnoresOutput], &[NOTHING_BAD]);
}
