//! Whether the paper's experiment came out as it should.

use std::fmt;

use crate::dispatch::PolicyName;
use crate::report::{FIGURES, Spread, Summary};
use crate::simulate::Scheduling;

/// The geometric means over all cases of ours through another's: the central scheduler that sees everything as it is, and
/// the greatest factors by which the simple policies are worse.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Mean TTFT, its P99, and P99 of TBT, ours through `llumnix`.
    pub ttft_mean: f64,
    /// See [`Self::ttft_mean`].
    pub ttft_p99: f64,
    /// See [`Self::ttft_mean`].
    pub tbt_p99: f64,
    /// Cases in which we lose time to preemptions and `llumnix` loses none.
    pub losses: usize,
    /// Policy, and how many times our mean TTFT and its P99 it has in the case where it is worst.
    pub worst: Vec<(&'static str, f64, f64)>,
    /// Requests of ours that failed.
    pub failed: f64,
}

/// Summaries of a case's seeds, by scheduling.
pub type Group<'a> = (&'a str, Scheduling, Vec<Summary>);

impl Verdict {
    /// From all summaries. `None` unless both `shoal` and `llumnix` ran each case.
    pub fn of(groups: &[Group<'_>]) -> Option<Self> {
        let ours: Vec<_> = groups
            .iter()
            .filter(|it| it.1 == Scheduling::Shoal)
            .collect();
        let against = |other: Scheduling, key: &str| -> Option<Vec<(f64, f64)>> {
            let pair = |our: &&Group<'_>| {
                let their = groups.iter().find(|it| it.0 == our.0 && it.1 == other)?;
                Some((mean(&our.2, key)?, mean(&their.2, key)?))
            };
            let pairs: Option<Vec<_>> = ours.iter().map(pair).collect();
            pairs.filter(|pairs| !pairs.is_empty())
        };
        let ratio = |key| Some(geometric(&against(Scheduling::Llumnix, key)?));
        let lost = against(Scheduling::Llumnix, "preemption_loss")?;
        let simple = [PolicyName::RoundRobin, PolicyName::LeastQueue];
        let worst = simple.into_iter().filter_map(|policy| {
            let most = |key| {
                let pairs = against(Scheduling::Policy(policy), key)?;
                let factors = pairs.into_iter().map(|(our, their)| their / our);
                factors.reduce(f64::max)
            };
            Some((policy.as_str(), most("ttft_mean")?, most("ttft_p99")?))
        });
        Some(Self {
            ttft_mean: ratio("ttft_mean")?,
            ttft_p99: ratio("ttft_p99")?,
            tbt_p99: ratio("tbt_p99")?,
            losses: lost
                .iter()
                .filter(|(our, their)| *our > 0.0 && *their <= 0.0)
                .count(),
            worst: worst.collect(),
            failed: ours.iter().filter_map(|our| mean(&our.2, "failed")).sum(),
        })
    }

    /// Whether nodes without a leader are as good as one that sees all, and nothing is lost.
    pub fn holds(&self) -> bool {
        self.ttft_mean <= 1.0 && self.ttft_p99 <= 1.0 && self.losses == 0 && self.failed <= 0.0
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.holds() { "PASS" } else { "FAIL" };
        write!(
            f,
            "{word} paper: shoal through llumnix: TTFT mean {:.3}, P99 {:.3}, TBT P99 {:.3}; {} cases with preemption loss of shoal alone, \
             {} requests failed",
            self.ttft_mean, self.ttft_p99, self.tbt_p99, self.losses, self.failed
        )?;
        for (policy, mean, p99) in &self.worst {
            write!(f, "; {policy} up to {mean:.0} x TTFT mean, {p99:.0} x P99")?;
        }
        Ok(())
    }
}

fn mean(summaries: &[Summary], key: &str) -> Option<f64> {
    let figure = FIGURES.iter().find(|figure| figure.key == key)?;
    let values: Vec<f64> = summaries.iter().filter_map(|one| figure.of(one)).collect();
    Spread::of(&values).map(|spread| spread.mean)
}

fn geometric(pairs: &[(f64, f64)]) -> f64 {
    let logs: f64 = pairs.iter().map(|(our, their)| (our / their).ln()).sum();
    (logs / pairs.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Outcome, Record};
    use shoal_gossip::Tokens;
    use std::time::Duration;

    /// One request with this TTFT, and so much time lost to preemptions, in milliseconds.
    fn summary(ttft: u64, loss: u64) -> Vec<Summary> {
        let ms = Duration::from_millis;
        let record = Record {
            at: Duration::ZERO,
            prompt: Tokens(10),
            output: Tokens(11),
            outcome: Outcome::Finished,
            first: Some(ms(ttft)),
            end: Some(ms(ttft + 500)),
            longest_gap: ms(50),
            entry: 0,
            host: Some(0),
            moves: 0,
            preemptions: u32::from(loss > 0),
            preemption_loss: ms(loss),
        };
        vec![Summary::of(&[record], Duration::from_secs(1))]
    }

    #[test]
    fn it_passes_only_when_ours_is_no_worse_and_loses_nothing_more() {
        let with = |ours: [(u64, u64); 2]| {
            let mut groups = Vec::new();
            for (name, (ttft, loss)) in ["a", "b"].into_iter().zip(ours) {
                groups.push((name, Scheduling::Shoal, summary(ttft, loss)));
                groups.push((name, Scheduling::Llumnix, summary(100, 0)));
                let round_robin = Scheduling::Policy(PolicyName::RoundRobin);
                groups.push((name, round_robin, summary(4_000, 7)));
            }
            Verdict::of(&groups).expect("both ran")
        };
        let better = with([(80, 0), (120, 0)]);
        assert!(
            better.holds() && (better.ttft_mean - 0.9798).abs() < 1e-4,
            "{better}"
        );
        assert_eq!(better.worst, [("round-robin", 50.0, 50.0)]);
        assert!(better.to_string().starts_with("PASS paper: "), "{better}");
        let worse = with([(90, 0), (120, 0)]);
        assert!(
            !worse.holds() && worse.to_string().starts_with("FAIL paper: "),
            "{worse}"
        );
        let lossy = with([(80, 5), (100, 0)]);
        assert!(!lossy.holds() && lossy.losses == 1);
        assert_eq!(
            Verdict::of(&[("a", Scheduling::Shoal, summary(9, 0))]),
            None
        );
        assert_eq!(Verdict::of(&[]), None);
    }
}
