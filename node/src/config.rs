//! The whole configuration: flags, environment and file, read into one checked value.
