//! The values of a record that gossip brought, before anything has looked at them.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("record", bytes));
