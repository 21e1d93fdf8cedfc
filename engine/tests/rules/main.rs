//! The rules of a session, one case at a time. Whole histories are played in `histories`.

mod answers;
mod background;
mod deferring;
mod desk;
mod events;
mod kept;
mod orders;
mod recovery;
mod requests;
mod running;
