//! Messages of the bulk plane: what a parcel begins with, and what is said back.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shoal_tests::fuzz::run("parcel", bytes));
