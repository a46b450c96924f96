//! Open files: every client connection is one, and a process may have so many.

use rustix::process::{Resource, getrlimit, setrlimit};
use tracing::{debug, warn};

/// Files that are no client connections: the sockets between nodes, a look at the port of each host with requests from here,
/// connections to an engine, the model. Of a small limit it is half.
const OTHERS: usize = 256;

/// Raises what the system asks for each process to what it allows without asking, and returns how many files may be open;
/// none if that is not limited.
pub(super) fn raise() -> Option<usize> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let before = limit.current;
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            debug!(%error, "the limit of open files stays as it is");
            limit.current = before;
        }
    }
    limit
        .current
        .map(|files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// Client connections that fit beside everything else, at most `wanted`. Beyond them clients are told 503; without a file for
/// it they could not even be told.
pub(super) fn room_for(wanted: usize, limit: Option<usize>) -> usize {
    limit.map_or(wanted, |limit| wanted.min(limit - OTHERS.min(limit / 2)))
}

/// The same, and says so when it is less than wanted.
pub(super) fn connections(wanted: usize) -> usize {
    let limit = raise();
    let room = room_for(wanted, limit);
    if let Some(limit) = limit.filter(|_| room < wanted) {
        warn!(
            limit,
            room,
            wanted,
            "this process may open too few files for its client connections, and will turn those away that do not fit: raise its \
             limit (LimitNOFILE=, ulimit -Hn) or lower --max-requests"
        );
    }
    room
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_other_files() {
        for (wanted, limit, room) in [
            (2_048, None, 2_048),
            (2_048, Some(1 << 20), 2_048),
            (2_048, Some(2_048 + OTHERS), 2_048),
            (2_048, Some(2_047 + OTHERS), 2_047),
            (2_048, Some(512), 256),
            (2_048, Some(64), 32),
            (2_048, Some(0), 0),
            (8, Some(64), 8),
        ] {
            assert_eq!(room_for(wanted, limit), room, "{limit:?}");
        }
    }

    #[test]
    fn the_limit_is_raised_to_what_is_allowed() {
        let allowed = getrlimit(Resource::Nofile).maximum;
        let raised = raise();
        assert_eq!(getrlimit(Resource::Nofile).current, allowed);
        assert_eq!(raised.map(|files| files as u64), allowed);
    }
}
