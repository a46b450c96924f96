//! A thread of its own for the state plane, so that a stalled main runtime is not taken for a death.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long tasks that do not end (a name look-up inside the system's resolver) are waited for.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// The thread did not end in time. It ends with the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the gossip thread did not end within {0:?}")]
pub struct ThreadStuck(pub Duration);

/// An OS thread with a current-thread tokio runtime. Dropping it ends the thread without waiting.
///
/// The stream plane's QUIC endpoint lives on it too, since the two planes share a socket: create it
/// inside [`runtime_handle`](Self::runtime_handle).
#[derive(Debug)]
pub struct GossipThread {
    runtime: Handle,
    stop: DropGuard,
    ended: oneshot::Receiver<()>,
    thread: JoinHandle<()>,
}

impl GossipThread {
    /// Starts the thread. Fails when the system gives no thread or no event queue.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (ending, ended) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("shoal-gossip".to_owned())
            .spawn(move || {
                runtime.block_on(stopped.cancelled());
                runtime.shutdown_timeout(LAST_WAIT);
                if ending.send(()).is_err() {
                    tracing::trace!("nobody waits for the end of the gossip thread");
                }
            })?;
        Ok(Self {
            runtime: handle,
            stop: stop.drop_guard(),
            ended,
            thread,
        })
    }

    /// The runtime of the thread.
    pub fn runtime_handle(&self) -> Handle {
        self.runtime.clone()
    }

    /// Ends the thread; every task still on it is dropped. Waits at most `deadline`. Not safe to drop
    /// half-way, but harmless: the thread ends all the same.
    pub async fn shutdown(self, deadline: Duration) -> Result<(), ThreadStuck> {
        let Self {
            stop,
            ended,
            thread,
            ..
        } = self;
        drop(stop);
        let ended = timeout(deadline, ended).await;
        match ended {
            // The sender is gone either way: the thread is at its end and joining does not wait.
            Ok(Ok(()) | Err(_)) => {
                if thread.join().is_err() {
                    tracing::debug!("the gossip thread panicked");
                }
                Ok(())
            }
            Err(_) => Err(ThreadStuck(deadline)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tasks_run_on_the_thread_and_end_with_it() {
        let thread = GossipThread::start().unwrap();
        let (holds, dropped) = oneshot::channel::<()>();
        let name = thread
            .runtime_handle()
            .spawn(async { thread::current().name().map(str::to_owned) })
            .await
            .unwrap();
        assert_eq!(name.as_deref(), Some("shoal-gossip"));
        let forever = thread.runtime_handle().spawn(async move {
            let _holds = holds;
            std::future::pending::<()>().await;
        });
        thread.shutdown(Duration::from_secs(10)).await.unwrap();
        assert!(dropped.await.is_err());
        assert!(forever.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn dropping_it_ends_the_thread() {
        let thread = GossipThread::start().unwrap();
        let (holds, dropped) = oneshot::channel::<()>();
        drop(thread.runtime_handle().spawn(async move {
            let _holds = holds;
            std::future::pending::<()>().await;
        }));
        drop(thread);
        assert!(dropped.await.is_err());
    }
}
