//! `sqlx::migrate!` embeds files that cargo doesn't know of by itself.

#[expect(clippy::print_stdout, reason = "this is how a build script speaks to cargo")]
fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
