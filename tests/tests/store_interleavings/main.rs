//! Two calls that meet at the point where their race is decided, held there and let go in each order.
//! Everything goes through the functions that servers and workers use, on a real server.

mod commits;
mod deleting;
mod fencing;
mod holds;
mod mail;
mod parents;
mod planted;
mod tokens;
