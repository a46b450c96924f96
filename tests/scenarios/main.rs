//! Scenarios: the parts of a node together, and whole meshes.

mod llama_executor;
