//! The engine thread: owns the executor, and does nothing but plan, compute and hand out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::watch;

use crate::engine::EngineError;
use crate::engine::batched::acts::{self, QueuedAct, panic_text};
use crate::engine::batched::engine::Shared;
use crate::engine::batched::job::Outgoing;
use crate::engine::batched::{Executor, KvForm, Step, StepPlan};

/// A thread that runs.
pub(super) struct Started {
    pub(super) thread: JoinHandle<()>,
    /// Turns true when it has ended.
    pub(super) stopped: watch::Receiver<bool>,
    pub(super) form: Option<Arc<dyn KvForm>>,
}

/// Starts the thread and waits until its executor is made.
pub(super) fn spawn<X: Executor>(
    shared: Arc<Shared>,
    make_executor: impl FnOnce() -> Result<X, EngineError> + Send + 'static,
) -> Result<Started, EngineError> {
    let (ready, is_ready) = mpsc::sync_channel(1);
    let (stopped, is_stopped) = watch::channel(false);
    let body = move || {
        let made = catch_unwind(AssertUnwindSafe(make_executor))
            .unwrap_or_else(|panic| Err(EngineError::Broken(panic_text(&*panic))));
        let (outcome, executor) = match made {
            Ok(executor) => (Ok(executor.kv_form()), Some(executor)),
            Err(error) => (Err(error), None),
        };
        let awaited = ready.send(outcome).is_ok();
        if let (Some(executor), true) = (executor, awaited) {
            run(&shared, executor);
        }
        stopped.send_replace(true);
    };
    let thread = std::thread::Builder::new()
        .name("shoal-engine".to_owned())
        .spawn(body)
        .map_err(|error| EngineError::Broken(format!("cannot start its thread: {error}")))?;
    let form = is_ready
        .recv()
        .unwrap_or_else(|_| Err(EngineError::Broken("its thread ended at once".to_owned())))?;
    Ok(Started {
        thread,
        stopped: is_stopped,
        form,
    })
}

fn run<X: Executor>(shared: &Shared, mut executor: X) {
    // What acts have taken since the last step; `None` when there was none.
    let mut spent = None;
    while let Some(work) = wait_for_work(shared, spent) {
        let (plan, step) = match work {
            Work::Act(act) => {
                let started = shared.clock.now();
                if !acts::perform(shared, &mut executor, act) {
                    break;
                }
                let took = shared.clock.now().since(started);
                spent = Some(spent.unwrap_or_default() + took);
                continue;
            }
            Work::Step(plan, step) => (plan, step),
        };
        spent = None;
        let started = shared.clock.now();
        let result = catch_unwind(AssertUnwindSafe(|| executor.step(&step)));
        let took = shared.clock.now().since(started);
        let result = match result {
            Ok(Ok(sampled)) => Ok(sampled),
            Ok(Err(EngineError::Broken(why))) => Err(why),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panic_text(&*panic)),
        };
        let mut jobs = shared.lock();
        let outgoing = result
            .and_then(|sampled| jobs.absorb(&plan, took, sampled, &*shared.text))
            .unwrap_or_else(|why| {
                tracing::error!(target: "shoal::engine", %why, "the engine failed");
                jobs.break_down(&why)
            });
        shared.publish(&mut jobs);
        drop(jobs);
        outgoing.into_iter().for_each(Outgoing::send);
    }
    shared.lock().drop_acts();
    // What is broken may break again when it is taken down.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(executor))) {
        let why = panic_text(&*panic);
        tracing::error!(target: "shoal::engine", %why, "the engine failed while it was freed");
    }
}

/// What the thread does next.
enum Work {
    Act(QueuedAct),
    Step(StepPlan, Step),
}

/// Acts come before a step until they have taken this part of a step's usual time; the first one always does. So
/// several moves at once do not wait a step for each of their acts, and whoever decodes is held up by one act and an
/// eighth of a step at most.
const ACTS_SHARE: u32 = 8;

/// Whether an act may come before the next step. `spent` is what others have taken since the last one.
fn may_act(spent: Option<Duration>, step: Duration) -> bool {
    spent.is_none_or(|spent| spent < step / ACTS_SHARE)
}

/// Sleeps until there is something to do. `None` when there never will be anything.
fn wait_for_work(shared: &Shared, spent: Option<Duration>) -> Option<Work> {
    let mut jobs = shared.lock();
    loop {
        if jobs.is_over() {
            return None;
        }
        if may_act(spent, jobs.step_time())
            && let Some(act) = jobs.next_act()
        {
            return Some(Work::Act(act));
        }
        let now = shared.clock.now();
        let work = jobs.next_step(now);
        shared.publish(&mut jobs);
        if let Some((plan, step)) = work {
            return Some(Work::Step(plan, step));
        }
        if let Some(act) = jobs.next_act() {
            return Some(Work::Act(act));
        }
        if jobs.is_over() {
            return None;
        }
        jobs = match jobs.patience(now) {
            None => shared
                .wake
                .wait(jobs)
                .unwrap_or_else(PoisonError::into_inner),
            Some(patience) => {
                let woken = shared.wake.wait_timeout(jobs, patience);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_act_never_waits_and_others_only_once_they_have_had_their_share() {
        let step = Duration::from_millis(80);
        assert!(may_act(None, step));
        assert!(may_act(None, Duration::ZERO));
        assert!(may_act(Some(Duration::from_micros(9_999)), step));
        assert!(!may_act(Some(Duration::from_millis(10)), step));
        assert!(!may_act(Some(Duration::ZERO), Duration::ZERO));
    }
}
