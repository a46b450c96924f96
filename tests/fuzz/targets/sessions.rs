//! What happens to both sessions of a hand-over: each byte says what comes next.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("sessions", bytes));
