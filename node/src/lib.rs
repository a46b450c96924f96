//! One node of a Shoal mesh.

pub mod api;
pub mod bench;
pub mod cli;
pub mod config;
pub mod dispatch;
pub mod engine;
pub mod frontend;
pub mod fuzz;
pub mod home;
pub mod host;
pub mod identity;
pub mod knowledge;
pub mod ledger;
pub mod links;
pub mod load;
pub mod mesh;
pub mod metrics;
pub mod moves;
pub mod node;

pub mod openai;
pub mod report;
pub mod reschedule;
pub mod simulate;
pub mod workload;
