//! What one session may read of others: within its scope, within bounds, in the shapes that models are told of.

use holdfast_engine::{
    builtin::Section,
    content::{Payload, Query},
    decide::Mode,
    ids::SessionId,
    scope::IntrospectionScope,
    session::Status,
};
use holdfast_store::{
    accept, create,
    delete::delete,
    introspect::{self, IntrospectError, RESULTS_MAX, Reader},
};
use holdfast_tests::{
    step::{calls, says},
    store::{OWNER, World, caller, message, new_session},
};
use serde_json::{Value, json};
use uuid::Uuid;

const SCOPES: [IntrospectionScope; 4] = [
    IntrospectionScope::ParentsOnly,
    IntrospectionScope::ChildrenOnly,
    IntrospectionScope::Subtree,
    IntrospectionScope::All,
];

async fn below(world: &World, parent: Option<SessionId>) -> SessionId {
    let new = create::NewSession { parent, ..new_session(None, Mode::None) };
    create::create(&world.store, &caller(), new.clone()).await.expect("a session");
    new.id
}

/// A parent, a session with a child, a sister, and one of another tree, in the order of their creation.
struct Family {
    parent: SessionId,
    own: SessionId,
    child: SessionId,
    sister: SessionId,
    peer: SessionId,
}

impl Family {
    async fn of(world: &World) -> Self {
        let parent = below(world, None).await;
        let own = below(world, Some(parent)).await;
        let child = below(world, Some(own)).await;
        let sister = below(world, Some(parent)).await;
        let peer = below(world, None).await;
        let foreign = create::NewSession { owner: "bob".to_owned(), ..new_session(None, Mode::None) };
        let bob = accept::Caller { owner: Some("bob".to_owned()), ..caller() };
        create::create(&world.store, &bob, foreign.clone()).await.expect("a session");
        Self { parent, own, child, sister, peer }
    }

    /// What the session in the middle may read, newest first.
    fn in_reach(&self, scope: IntrospectionScope) -> Vec<SessionId> {
        match scope {
            IntrospectionScope::ParentsOnly => vec![self.parent],
            IntrospectionScope::ChildrenOnly => vec![self.child],
            IntrospectionScope::Subtree => vec![self.child, self.own, self.parent],
            IntrospectionScope::All => vec![self.peer, self.sister, self.child, self.own, self.parent],
        }
    }
}

fn reader(session: SessionId, scope: IntrospectionScope) -> Reader<'static> {
    Reader { owner: OWNER, session, scope }
}

/// Asks a session and answers with tools, thoughts and words.
async fn talk(world: &World, session: SessionId, question: &str, answer: &str) {
    world.post(session, question, Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.session.id, session);
    let mut thinking = calls(&[("fetch", r#"{"url": "x"}"#)]);
    thinking.thinking = Some("let me look".to_owned());
    assert_eq!(holder.drive_with(vec![thinking, says(answer)]).await, Status::Idle);
}

#[tokio::test]
async fn listings_show_what_the_scope_allows_newest_first() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    talk(&world, family.child, "what is new", "nothing").await;
    for scope in SCOPES {
        let seen = reader(family.own, scope);
        let listing = introspect::list(&world.store, &seen, None).await.expect("a listing");
        let ids: Vec<Uuid> = listing.sessions.iter().map(|session| session.session_id).collect();
        let expected: Vec<Uuid> = family.in_reach(scope).iter().map(|session| session.0).collect();
        assert_eq!(ids, expected, "{scope:?}");
        assert_eq!(usize::try_from(listing.total_accessible), Ok(expected.len()));
        for session in &listing.sessions {
            assert_eq!(session.is_parent, session.session_id == family.parent.0, "{scope:?}");
            assert_eq!(session.is_child, session.session_id == family.child.0, "{scope:?}");
        }
        let stats = introspect::stats(&world.store, &seen).await.expect("numbers");
        let turns = if expected.contains(&family.child.0) { 4 } else { 0 };
        let numbers = (stats.total_sessions, stats.total_turns_across_all_sessions);
        assert_eq!(numbers, (i64::try_from(expected.len()).expect("few"), turns), "{scope:?}");
    }
    // Held by a worker, and in the shape that models are told of.
    world.post(family.peer, "work", Mode::UntilBlocked).await;
    let _held = world.hold().await;
    let all = reader(family.own, IntrospectionScope::All);
    let listing = introspect::list(&world.store, &all, Some(1)).await.expect("a listing");
    assert_eq!(listing.total_accessible, 5, "what isn't shown is counted");
    let shown = serde_json::to_value(&listing).expect("JSON");
    let time = shown["sessions"][0]["modificationTime"].clone();
    assert!(time.as_str().is_some_and(|time| time.contains('T')), "{time}");
    assert_eq!(
        shown,
        json!({"sessions": [{
            "sessionId": family.peer, "conversationId": family.peer, "agent": "helper", "modificationTime": time,
            "turnCount": 0, "isParent": false, "isChild": false, "isLocked": true, "status": "running",
        }], "totalAccessible": 5})
    );
    let stats = introspect::stats(&world.store, &all).await.expect("numbers");
    let shown = serde_json::to_value(&stats).expect("JSON");
    let note = shown["note"].clone();
    assert_eq!(
        shown,
        json!({"totalSessions": 5, "totalTurnsAcrossAllSessions": 4, "scope": "all", "note": note})
    );
}

#[tokio::test]
async fn deleted_sessions_and_strangers_see_and_show_nothing() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    for scope in SCOPES {
        let bob = Reader { owner: "bob", ..reader(family.own, scope) };
        let listing = introspect::list(&world.store, &bob, None).await.expect("a listing");
        assert_eq!((listing.sessions.len(), listing.total_accessible), (0, 0), "{scope:?}");
        let read = introspect::read(&world.store, &bob, family.child, &Section::default()).await;
        assert!(matches!(read, Err(IntrospectError::UnknownSession)), "{read:?}");
    }
    delete(&world.store, &caller(), family.own, false).await.expect("deleted");
    let above = reader(family.parent, IntrospectionScope::All);
    let listing = introspect::list(&world.store, &above, None).await.expect("a listing");
    assert_eq!(listing.total_accessible, 3);
    let gone = introspect::read(&world.store, &above, family.child, &Section::default()).await;
    assert!(matches!(gone, Err(IntrospectError::UnknownSession)), "{gone:?}");
    let itself = reader(family.own, IntrospectionScope::All);
    let listing = introspect::list(&world.store, &itself, None).await.expect("a listing");
    assert_eq!(listing.total_accessible, 0);
}

#[tokio::test]
async fn reading_is_within_the_scope() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let everybody = [family.parent, family.own, family.child, family.sister, family.peer];
    for scope in SCOPES {
        for session in everybody {
            let seen = reader(family.own, scope);
            let read = introspect::read(&world.store, &seen, session, &Section::default()).await;
            match family.in_reach(scope).contains(&session) {
                true => assert_eq!(read.expect("allowed").session_id, session.0),
                false => assert_eq!(read.expect_err("not allowed").code(), "not_permitted", "{scope:?}"),
            }
        }
    }
}

#[tokio::test]
async fn a_session_is_read_as_condensed_text() {
    let world = World::new().await;
    let session = world.session().await;
    talk(&world, session, "what is new", "nothing is").await;
    talk(&world, session, "and now", "still nothing").await;
    let seen = reader(session, IntrospectionScope::Subtree);
    let read = async |section: Section| {
        introspect::read(&world.store, &seen, session, &section).await.expect("a reading")
    };
    let plain = read(Section::default()).await;
    assert_eq!(
        plain.content,
        "Turn 1: [User] what is new\nTurn 2: [LLM] [calls fetch] {\"url\": \"x\"}\nTurn 3: [User] [1 tool results]\n\
         Turn 4: [LLM] nothing is\nTurn 5: [User] and now\nTurn 6: [LLM] [calls fetch] {\"url\": \"x\"}\n\
         Turn 7: [User] [1 tool results]\nTurn 8: [LLM] still nothing"
    );
    let all = Section { include_thinking: true, include_tool_responses: true, ..Section::default() };
    let open = read(all).await.content;
    assert!(open.contains("Turn 2: [LLM] [thinking] let me look\n[calls fetch]"), "{open}");
    assert!(open.contains("Turn 3: [User] [result of fetch] done\n"), "{open}");
    let section = |text: Value| serde_json::from_value::<Section>(text).expect("a section");
    let last = read(section(json!({"take_n": 2}))).await;
    assert_eq!((last.returned_turns, last.next_offset), (2, None));
    assert!(last.content.starts_with("Turn 7:") && last.content.contains("Turn 8:"), "{}", last.content);
    let some = read(section(json!({"drop_n": 1, "offset": 2, "limit": 2}))).await;
    assert!(some.content.starts_with("Turn 4:") && some.content.contains("Turn 5:"), "{}", some.content);
    let shown = serde_json::to_value(&some).expect("JSON");
    assert_eq!(
        shown,
        json!({"sessionId": session, "conversationId": session, "totalTurns": 8, "returnedTurns": 2,
               "content": some.content, "format": "condensed-text", "scope": "subtree", "access": "granted"})
    );
    assert_eq!(read(section(json!({"offset": 100}))).await.content, "");
}

#[tokio::test]
async fn long_sessions_and_texts_are_cut_and_say_so() {
    let world = World::new().await;
    let session = world.session().await;
    // Longer than what stands inline: a blob, of which the beginning is read.
    let long = format!("{}needle", "é".repeat(20_000));
    let (query, blob) = Payload::pack(Query { text: long, media: Vec::new() });
    let stored = accept::Message { query, blobs: blob.into_iter().collect(), ..message("") };
    let posted = accept::post(&world.store, &caller(), session, &stored, Mode::UntilBlocked).await;
    posted.expect("taken");
    world.hold().await.drive_with(vec![says("noted")]).await;
    let sql = world.sql().await;
    sql.execute(
        "INSERT INTO turns (session_id, position, id, tag, format, body, version, at)
         SELECT $1, n, gen_random_uuid(), 'LlmTurn', format, body, version, at
         FROM turns, generate_series(3, 500) n WHERE session_id = $1 AND position = 2",
        &[&session.0],
    )
    .await
    .expect("turns");
    sql.execute("UPDATE sessions SET turns = 500 WHERE id = $1", &[&session.0]).await.expect("counted");
    let seen = reader(session, IntrospectionScope::Subtree);
    let read = async |section: Section| {
        introspect::read(&world.store, &seen, session, &section).await.expect("a reading")
    };
    let first = read(Section::default()).await;
    assert_eq!((first.total_turns, first.returned_turns, first.next_offset), (500, 200, Some(200)));
    let turn = first.content.lines().next().expect("a turn");
    assert!(turn.starts_with("Turn 1: [User] éé") && turn.ends_with("bytes more]"), "{turn}");
    assert!(turn.len() < introspect::TURN_TEXT + 100 && first.content.len() <= introspect::READ_TEXT);
    let next = read(Section { offset: Some(200), ..Section::default() }).await;
    assert!(next.content.starts_with("Turn 201:"), "{}", &next.content[..20]);
    let last = read(Section { take_n: Some(300), ..Section::default() }).await;
    assert_eq!((last.returned_turns, last.next_offset), (200, None));
    assert!(last.content.starts_with("Turn 301:") && last.content.contains("Turn 500:"));
    // The search sees the newest turns only, and says so.
    let found = introspect::search(&world.store, &seen, "needle", None, false).await.expect("a search");
    assert_eq!((found.results.len(), found.complete), (0, false));
    sql.execute("UPDATE sessions SET turns = 2 WHERE id = $1", &[&session.0]).await.expect("counted");
    sql.execute("DELETE FROM turns WHERE session_id = $1 AND position > 2", &[&session.0])
        .await
        .expect("gone");
    let found = introspect::search(&world.store, &seen, "NEEDLE", None, false).await.expect("a search");
    assert_eq!((found.results.len(), found.complete), (1, true));
    assert!(found.results[0].preview.ends_with("needle"), "{:?}", found.results);
}

#[tokio::test]
async fn a_search_finds_what_was_said_within_the_scope() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    talk(&world, family.child, "how do we handle an error here", "by the \"handling\" pattern\nof Érik")
        .await;
    talk(&world, family.sister, "an error", "handle it").await;
    talk(&world, family.peer, "nothing special", "fine").await;
    let search = async |scope, query: &str, results: bool| {
        let seen = reader(family.own, scope);
        introspect::search(&world.store, &seen, query, None, results).await.expect("a search")
    };
    let ids =
        |found: &introspect::Found| -> Vec<Uuid> { found.results.iter().map(|one| one.session_id).collect() };
    let found = search(IntrospectionScope::Subtree, "Handle ERROR", false).await;
    assert_eq!(ids(&found), [family.child.0]);
    assert_eq!(found.results[0].turn_count, 4);
    // Quotes, line breaks and letters with accents are found as they were said.
    for query in ["the \"handling\" pattern", "pattern\nof", "éRIK"] {
        assert_eq!(ids(&search(IntrospectionScope::ChildrenOnly, query, false).await), [family.child.0]);
    }
    let all = search(IntrospectionScope::All, "error", false).await;
    assert_eq!(ids(&all), [family.sister.0, family.child.0]);
    assert_eq!((all.sessions_searched, all.complete, all.total_matches), (5, true, 2));
    assert_eq!(ids(&search(IntrospectionScope::ParentsOnly, "error", false).await), Vec::<Uuid>::new());
    // What tools answered is looked at where it is asked for.
    assert_eq!(ids(&search(IntrospectionScope::All, "result of fetch", false).await), Vec::<Uuid>::new());
    assert_eq!(search(IntrospectionScope::All, "result of fetch", true).await.results.len(), 3);
    let shown = serde_json::to_value(&found).expect("JSON");
    assert_eq!(
        shown,
        json!({"query": "Handle ERROR", "totalMatches": 1, "scope": "subtree", "sessionsSearched": 3, "complete": true,
            "results": [{"sessionId": family.child, "conversationId": family.child, "turnCount": 4,
                "preview": "[User] how do we handle an error here", "matchType": "content"}]})
    );
}

#[tokio::test]
async fn listings_and_searches_are_bounded() {
    let world = World::new().await;
    let own = world.session().await;
    let sql = world.sql().await;
    sql.batch_execute(
        "INSERT INTO sessions (id, owner, agent, agent_revision, root_id, status, turns, created_at)
         SELECT id, 'alice', 'helper', 'r1', id, 'idle', 1, now() - make_interval(secs => n)
         FROM (SELECT gen_random_uuid() AS id, n FROM generate_series(1, 12000) n) fresh;
         INSERT INTO turns (session_id, position, id, tag, format, body, version, at)
         SELECT id, 1, gen_random_uuid(), 'LlmTurn', 1, '{\"text\":\"a needle\",\"flavor\":\"OpenAI\",\"model\":\"m\"}', 1, now()
         FROM sessions WHERE turns = 1;
         ANALYZE sessions; ANALYZE turns",
    )
    .await
    .expect("many sessions");
    let seen = reader(own, IntrospectionScope::All);
    let listing = introspect::list(&world.store, &seen, None).await.expect("a listing");
    assert_eq!((listing.sessions.len(), listing.total_accessible), (50, introspect::COUNTED));
    assert_eq!(listing.sessions[0].session_id, own.0, "the newest comes first");
    let most = introspect::list(&world.store, &seen, Some(RESULTS_MAX)).await.expect("a listing");
    assert_eq!(most.sessions.len(), 500);
    for wrong in [0, -1, RESULTS_MAX + 1] {
        let refused = introspect::list(&world.store, &seen, Some(wrong)).await;
        assert!(matches!(refused, Err(IntrospectError::BadRequest(_))), "{wrong}: {refused:?}");
    }
    let stats = introspect::stats(&world.store, &seen).await.expect("numbers");
    assert_eq!(stats.total_sessions, introspect::COUNTED);
    assert!(stats.note.contains("10000"), "{}", stats.note);
    let found = introspect::search(&world.store, &seen, "needle", None, false).await.expect("a search");
    assert_eq!((found.results.len(), found.complete), (50, false));
    let found = introspect::search(&world.store, &seen, "needle", Some(500), false).await.expect("a search");
    assert_eq!(
        (found.sessions_searched, found.results.len()),
        (200, 199),
        "the newest 200, one of them empty"
    );
    let none = introspect::search(&world.store, &seen, "haystack", None, false).await.expect("a search");
    assert_eq!((none.sessions_searched, none.results.len(), none.complete), (200, 0, false));
}

#[tokio::test]
async fn a_search_reads_no_more_bytes_than_it_may() {
    let world = World::new().await;
    let own = world.session().await;
    let sql = world.sql().await;
    // The newest has the needle in its last turn and twenty mebibytes above it; the older one has it too.
    sql.batch_execute(
        "INSERT INTO sessions (id, owner, agent, agent_revision, root_id, status, turns, created_at)
         SELECT id, 'alice', 'helper', 'r1', id, 'idle', 20, now() + make_interval(secs => 10 - n)
         FROM (SELECT gen_random_uuid() AS id, n FROM generate_series(1, 2) n) fresh;
         INSERT INTO turns (session_id, position, id, tag, format, body, version, at)
         SELECT s.id, p, gen_random_uuid(), 'LlmTurn', 1,
                json_build_object('text', CASE p WHEN 1 THEN 'needle' ELSE repeat('hay ', 262144) END, 'flavor', 'OpenAI', 'model', 'm'),
                1, now()
         FROM sessions s, generate_series(1, 20) p WHERE s.turns = 20",
    )
    .await
    .expect("large turns");
    let seen = reader(own, IntrospectionScope::All);
    let found = introspect::search(&world.store, &seen, "needle", None, false).await.expect("a search");
    assert_eq!((found.results.len(), found.complete), (0, false));
    let found = introspect::search(&world.store, &seen, "hay", None, false).await.expect("a search");
    assert_eq!(found.results.len(), 1, "the newest is looked at first");
}

#[tokio::test]
async fn what_takes_too_long_is_given_up() {
    let world = World::new().await;
    let own = world.session().await;
    let locker = world.sql().await;
    locker.batch_execute("BEGIN; LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let seen = reader(own, IntrospectionScope::All);
    let late = introspect::list(&world.store, &seen, None).await;
    assert!(matches!(late, Err(IntrospectError::TooLong)), "{late:?}");
    locker.batch_execute("COMMIT").await.expect("let go");
    introspect::list(&world.store, &seen, None).await.expect("a listing");
}
