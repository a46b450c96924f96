//! The engine thread: owns the executor, and does nothing but plan, compute and hand out.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, mpsc};
use std::thread::JoinHandle;

use tokio::sync::watch;

use crate::engine::EngineError;
use crate::engine::batched::engine::Shared;
use crate::engine::batched::jobs::Outgoing;
use crate::engine::batched::{Executor, Step, StepPlan};

/// Starts the thread and waits until its executor is made. The watch turns true when it has ended.
pub(super) fn spawn<X: Executor>(
    shared: Arc<Shared>,
    make_executor: impl FnOnce() -> Result<X, EngineError> + Send + 'static,
) -> Result<(JoinHandle<()>, watch::Receiver<bool>), EngineError> {
    let (ready, is_ready) = mpsc::sync_channel(1);
    let (stopped, is_stopped) = watch::channel(false);
    let body = move || {
        let made = catch_unwind(AssertUnwindSafe(make_executor))
            .unwrap_or_else(|panic| Err(EngineError::Broken(panic_text(&*panic))));
        let (outcome, executor) = match made {
            Ok(executor) => (Ok(()), Some(executor)),
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
    is_ready
        .recv()
        .unwrap_or_else(|_| Err(EngineError::Broken("its thread ended at once".to_owned())))?;
    Ok((thread, is_stopped))
}

fn run<X: Executor>(shared: &Shared, mut executor: X) {
    while let Some((plan, step)) = wait_for_step(shared) {
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
    // What is broken may break again when it is taken down.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(executor))) {
        let why = panic_text(&*panic);
        tracing::error!(target: "shoal::engine", %why, "the engine failed while it was freed");
    }
}

/// Sleeps until there is something to compute. `None` when there never will be.
fn wait_for_step(shared: &Shared) -> Option<(StepPlan, Step)> {
    let mut jobs = shared.lock();
    loop {
        if jobs.is_over() {
            return None;
        }
        let now = shared.clock.now();
        let work = jobs.next_step(now);
        shared.publish(&mut jobs);
        if work.is_some() {
            return work;
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

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or("without a text"))
}
