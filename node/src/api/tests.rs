//! The client plane over real TCP, in front of a frontend whose every move the test makes.

mod admin;
mod bounds;
mod demo;
mod errors;
mod leaving;
mod requests;
mod secure;
mod shutdown;
mod streams;
mod support;
