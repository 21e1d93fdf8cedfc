//! worker

pub mod model;
