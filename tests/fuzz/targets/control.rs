//! Messages of the control plane, both ways.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("control", bytes));
