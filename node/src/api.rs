//! The client plane: HTTP routes, server-sent events, keys, limits, metrics.
