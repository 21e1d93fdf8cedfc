//! `sqlx::migrate!` embeds files that cargo doesn't know of by itself.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
