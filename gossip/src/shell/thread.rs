//! The gossip thread.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;

/// A thread with a runtime of its own. Dropping it ends the runtime; [`GossipThread::join`] waits for that.
#[derive(Debug)]
pub struct GossipThread {
    handle: Handle,
    stop: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl GossipThread {
    /// Starts it.
    ///
    /// # Errors
    /// When the system gives no thread or no event queue.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("shoal-gossip".into())
            .spawn(move || {
                runtime.block_on(stopped.notified());
                // Tasks are dropped here; blocking look-ups of names are not waited for.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            handle,
            stop,
            thread: Some(thread),
        })
    }

    /// The runtime, for tasks and drivers that must not be held up by others.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Ends it and waits until it has ended.
    pub async fn join(mut self) {
        self.stop.notify_one();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended, which is all that is asked.
            drop(spawn_blocking(move || thread.join()).await);
        }
    }
}

impl Drop for GossipThread {
    fn drop(&mut self) {
        self.stop.notify_one();
    }
}
