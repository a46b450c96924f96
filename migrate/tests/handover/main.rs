//! Sources, targets and homes of hand-overs in one mesh: all interleavings of a small one, and a great many
//! accidents in a larger one.

mod faults;
mod mesh;
mod model;
