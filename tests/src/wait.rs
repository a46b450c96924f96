//! Waiting for something to become true, with a deadline and a last word on failure.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

/// How long a condition may take. Generous: it is only ever reached by a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks `probe` again and again until it says `Ok`; its last `Err` is the failure's text.
///
/// # Panics
/// When [`PATIENCE`] ends.
pub async fn until<T, E: Debug, F: Future<Output = Result<T, E>>>(
    what: &str,
    mut probe: impl FnMut() -> F,
) -> T {
    let mut last = None;
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            match probe().await {
                Ok(found) => return found,
                Err(state) => last = Some(state),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    match found {
        Ok(found) => found,
        Err(_) => panic!("{what} did not come about in {PATIENCE:?}; last state: {last:#?}"),
    }
}
