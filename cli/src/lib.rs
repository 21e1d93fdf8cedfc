//! What the `holdfast` command is made of, as a library for its own tests and for the scenario tests.

pub mod scripted_model;
