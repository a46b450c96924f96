//! The embedded engine: llama.cpp in this process.
