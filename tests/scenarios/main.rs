//! The list of scenarios; one behaviour of a whole mesh a file.

mod source_rules;
