//! The simulated engine: the block manager and scheduler of a real one, step time from a profile.
