//! What wrappers remember for all workers: turns of a rate, and results.

use std::time::{Duration, Instant};

use futures::future::join_all;
use holdfast_engine::content::{Digest, MAX_DEPTH, ToolResult};
use holdfast_store::{
    passes,
    tool_rates::{self, MAX_WAIT, Rate},
    tool_results::{self, MAX_RESULT},
};
use holdfast_tests::store::{World, open};

const HOUR: Duration = Duration::from_secs(3600);

async fn take(world: &World, owner: &str, tool: &str, rate: Rate, longest: Duration) -> Option<f64> {
    let wait = tool_rates::take(&world.store, owner, tool, rate, longest).await.expect("an answer");
    wait.map(|wait| wait.as_secs_f64())
}

#[tokio::test]
async fn sixty_four_rivals_on_two_nodes_take_turns_that_keep_the_rate() {
    let world = World::new().await;
    let stores = join_all((0..2).map(|_| open(world.database.url(), 16, None))).await;
    let rate = Rate { per_minute: 60, burst: 4 };
    let began = Instant::now();
    let taking = (0..64).map(|n| tool_rates::take(&stores[n % 2], "o", "t", rate, HOUR));
    let mut waits: Vec<f64> = join_all(taking)
        .await
        .into_iter()
        .map(|wait| wait.expect("an answer").expect("a turn").as_secs_f64())
        .collect();
    let took = began.elapsed().as_secs_f64();
    waits.sort_by(f64::total_cmp);
    // The n-th call begins no sooner than its second, reckoned from the first; a wait is of its own moment.
    for (n, wait) in waits.iter().enumerate() {
        let due = n.saturating_sub(3) as f64;
        assert!(*wait <= due + 0.001 && *wait >= due - took - 0.001, "{n}: {wait}, {took} s since the first");
    }
    assert!(took < 50.0, "{took} s: too slow to say anything");
}

#[tokio::test]
async fn a_turn_that_would_come_too_late_is_not_taken() {
    let world = World::new().await;
    let rate = Rate { per_minute: 1, burst: 2 };
    let none = Duration::ZERO;
    assert_eq!(take(&world, "o", "t", rate, none).await, Some(0.0));
    assert_eq!(take(&world, "o", "t", rate, none).await, Some(0.0));
    for _ in 0..20 {
        assert_eq!(take(&world, "o", "t", rate, Duration::from_secs(5)).await, None);
    }
    // Others have buckets of their own: other owners, tools and limits.
    assert_eq!(take(&world, "p", "t", rate, none).await, Some(0.0));
    assert_eq!(take(&world, "o", "u", rate, none).await, Some(0.0));
    assert_eq!(take(&world, "o", "t", Rate { burst: 3, ..rate }, none).await, Some(0.0));
    let third = take(&world, "o", "t", rate, Duration::from_secs(61)).await.expect("a turn");
    assert!(third > 10.0 && third <= 60.0, "{third}");
    // Nothing is waited for longer than ten minutes, whoever would.
    let mut turns = 0;
    while let Some(wait) = take(&world, "o", "t", rate, HOUR).await {
        assert!(wait <= MAX_WAIT.as_secs_f64());
        turns += 1;
        assert!(turns < 20, "the tenth minute never comes");
    }
    assert!(turns >= 8, "{turns}");
}

#[tokio::test]
async fn a_bucket_fills_with_time_and_survives_a_clock_that_goes_back() {
    let world = World::new().await;
    let sql = world.sql().await;
    let rate = Rate { per_minute: 2, burst: 2 };
    let all = async || {
        let mut turns = 0;
        while take(&world, "o", "t", rate, Duration::ZERO).await.is_some() {
            turns += 1;
            assert!(turns < 100, "there is no end of turns");
        }
        turns
    };
    let later = async |seconds: i32| {
        let text = format!("UPDATE tool_rates SET next_at = next_at - interval '{seconds} seconds'");
        sql.batch_execute(&text).await.expect("moved");
    };
    assert_eq!(all().await, 2);
    later(31).await;
    assert_eq!(all().await, 1);
    later(36_000).await;
    assert_eq!(all().await, 2, "no more is saved up");
    later(-36_000).await;
    assert_eq!(all().await, 2, "what lies ten hours ahead was never promised");
    assert_eq!(all().await, 0);
    // What has been full for an hour says as much as nothing.
    assert_eq!(passes::forget_rates(&world.store, 10).await.expect("a pass"), 0);
    later(36_000).await;
    assert_eq!(passes::forget_rates(&world.store, 10).await.expect("a pass"), 1);
    assert_eq!(all().await, 2);
}

#[tokio::test]
async fn results_are_given_again_to_their_owner_while_they_are_fresh() {
    let world = World::new().await;
    let sql = world.sql().await;
    let key = Digest::of(b"k");
    let recall = async |owner: &str, key: &Digest, ttl: Duration| {
        tool_results::recall(&world.store, owner, key, ttl).await.expect("an answer")
    };
    let remember = async |owner: &str, key: &Digest, result: &ToolResult| {
        tool_results::remember(&world.store, owner, key, result, HOUR).await.expect("kept")
    };
    let first = ToolResult::text("a\u{0}b");
    assert_eq!(recall("o", &key, HOUR).await, None);
    assert!(remember("o", &key, &first).await);
    assert_eq!(recall("o", &key, HOUR).await.as_ref(), Some(&first));
    assert_eq!(recall("p", &key, HOUR).await, None);
    assert_eq!(recall("o", &Digest::of(b"l"), HOUR).await, None);
    let second = ToolResult::Json { content: serde_json::json!({"n": [1]}) };
    assert!(remember("o", &key, &second).await);
    assert_eq!(recall("o", &key, HOUR).await.as_ref(), Some(&second));
    let large = ToolResult::text("x".repeat(MAX_RESULT));
    assert!(!remember("o", &key, &large).await);
    assert_eq!(
        recall("o", &key, HOUR).await.as_ref(),
        Some(&second),
        "what is too long takes nothing's place"
    );
    let fits = ToolResult::text("x".repeat(MAX_RESULT - r#"{"type":"text","content":""}"#.len()));
    assert!(remember("p", &key, &fits).await);

    let age = async |by: &str| {
        let text = format!(
            "UPDATE tool_results SET stored_at = stored_at - interval '{by}', expires_at = expires_at - interval '{by}'"
        );
        sql.batch_execute(&text).await.expect("aged");
    };
    age("10 minutes").await;
    assert_eq!(recall("o", &key, Duration::from_secs(300)).await, None, "who asks says how old it may be");
    assert!(recall("o", &key, HOUR).await.is_some());
    assert_eq!(passes::forget_results(&world.store, 10).await.expect("a pass"), 0);
    age("-20 minutes").await;
    assert_eq!(recall("o", &key, HOUR).await, None, "it can't be from tomorrow");
    age("70 minutes").await;
    let mut forgotten = Vec::new();
    for _ in 0..3 {
        forgotten.push(passes::forget_results(&world.store, 1).await.expect("a pass"));
    }
    assert_eq!(forgotten, [1, 1, 0]);

    // What was kept before there was a bound of its depth.
    let deep = (0..=MAX_DEPTH).fold(serde_json::json!("x"), |inner, _| serde_json::json!([inner]));
    let unbounded = ToolResult::Json { content: deep.clone() };
    assert!(remember("q", &key, &unbounded).await);
    assert_eq!(recall("q", &key, HOUR).await, Some(ToolResult::text(deep.to_string())));
}
