//! The check of this suite.

use anyhow::Result;
use holdfast_tests::planted::{Suite, check};

#[tokio::test(flavor = "multi_thread")]
async fn these_interleavings_catch_planted_mistakes() -> Result<()> {
    check(Suite::Interleavings).await
}
