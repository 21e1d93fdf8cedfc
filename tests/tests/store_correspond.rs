//! Letters between sessions: who may write to whom, what a letter wakes, and rivals for one mailbox.

use std::collections::BTreeMap;

use futures::future::join_all;
use holdfast_engine::{
    agent::Agent,
    content::ToolResult,
    decide::Mode,
    ids::{MailId, SessionId},
    mail::{MailBody, Priority, Sender},
    scope::{Relation, Scope},
    session::Status,
    turn::{Said, TurnBody},
    waking::WakeClass,
};
use holdfast_store::{
    StoreError, accept,
    commit::{Outcome, RunAfter},
    correspond::{self, Address, Correspondence, SendError, Sent},
    create,
    delete::delete,
    history,
    idempotency::Done,
    kin,
    letters::{Ask, Letter, MAILBOX_LIMIT},
    settle::{Report, complete},
};
use holdfast_tests::{
    gates::{Stopper, until_queued},
    step::{Holder, says, send},
    store::{AGENT, OWNER, World, agent, caller, message, new_session, record},
};
use uuid::Uuid;

/// A session below `parent`, or on its own, that nothing has happened in.
async fn below(world: &World, parent: Option<SessionId>) -> SessionId {
    let new = create::NewSession { parent, ..new_session(None, Mode::None) };
    create::create(&world.store, &caller(), new.clone()).await.expect("a session");
    new.id
}

/// A grandparent, a parent with two children, a grandchild of the first, and a stranger of the same owner.
struct Family {
    top: SessionId,
    middle: SessionId,
    child: SessionId,
    sibling: SessionId,
    grandchild: SessionId,
    peer: SessionId,
}

impl Family {
    async fn of(world: &World) -> Self {
        let top = below(world, None).await;
        let middle = below(world, Some(top)).await;
        let child = below(world, Some(middle)).await;
        let sibling = below(world, Some(middle)).await;
        let grandchild = below(world, Some(child)).await;
        let peer = below(world, None).await;
        Self { top, middle, child, sibling, grandchild, peer }
    }
}

fn letter(from: SessionId, to: Address, text: &str) -> Correspondence {
    Correspondence {
        from,
        from_agent: AGENT.to_owned(),
        to,
        id: MailId(Uuid::now_v7()),
        text: text.to_owned(),
        in_reply_to: None,
        expects_reply: false,
        interrupt: false,
        hops: 0,
        scope: Scope::All,
        interrupt_scope: Scope::Children,
        max_hops: 16,
        traceparent: None,
    }
}

async fn write(world: &World, letter: &Correspondence) -> Result<Sent, SendError> {
    correspond::send(&world.store, OWNER, letter).await
}

/// The end of an id, as models read it.
fn end(id: SessionId) -> String {
    let hex = id.0.simple().to_string();
    hex[hex.len() - 8..].to_owned()
}

/// The agent with other terms for its mail, made current.
async fn waking(world: &World, classes: &[WakeClass], resume: bool) -> Agent {
    let mut agent = agent("r2");
    agent.waking.wake_on = classes.to_vec();
    agent.waking.resume_on_any_mail = resume;
    record(&world.store, AGENT, &agent).await.expect("recorded");
    agent
}

#[tokio::test]
async fn relations_are_what_the_lineage_says() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let of = async |from, to| kin::relation(&world.store, OWNER, from, to).await;
    for (to, relation) in [
        (family.child, Relation::Own),
        (family.middle, Relation::Ancestor),
        (family.top, Relation::Ancestor),
        (family.grandchild, Relation::Descendant),
        (family.sibling, Relation::Peer),
        (family.peer, Relation::Peer),
    ] {
        assert_eq!(of(family.child, to).await.expect("known"), relation);
    }
    let stranger = kin::relation(&world.store, "bob", family.child, family.top).await;
    assert!(matches!(stranger, Err(StoreError::UnknownSession)), "{stranger:?}");
    delete(&world.store, &caller(), family.grandchild, false).await.expect("deleted");
    for (from, to) in [(family.child, family.grandchild), (family.grandchild, family.child)] {
        let gone = of(from, to).await;
        assert!(matches!(gone, Err(StoreError::UnknownSession)), "{gone:?}");
    }
    let nobody = of(family.child, SessionId(Uuid::now_v7())).await;
    assert!(matches!(nobody, Err(StoreError::UnknownSession)), "{nobody:?}");
}

#[tokio::test]
async fn lineages_are_followed_for_64_levels() {
    let world = World::new().await;
    let mut line = vec![below(&world, None).await];
    for _ in 0..65 {
        line.push(below(&world, line.last().copied()).await);
    }
    let of = async |from: usize, to: usize| {
        kin::relation(&world.store, OWNER, line[from], line[to]).await.expect("known")
    };
    assert_eq!(of(64, 0).await, Relation::Ancestor);
    assert_eq!(of(0, 64).await, Relation::Descendant);
    assert_eq!(of(65, 0).await, Relation::Peer);
}

#[tokio::test]
async fn scopes_bound_who_is_written_to_and_who_is_interrupted() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let whom = [family.child, family.grandchild, family.middle, family.top, family.sibling, family.peer];
    let reach = |scope: Scope| match scope {
        Scope::Own => 1,
        Scope::Children => 2,
        Scope::Subtree => 4,
        Scope::All => 6,
    };
    for scope in [Scope::Own, Scope::Children, Scope::Subtree, Scope::All] {
        for (place, to) in whom.into_iter().enumerate() {
            let plain = letter(family.child, Address::Session(to), "hello");
            let sent = write(&world, &Correspondence { scope, ..plain.clone() }).await;
            match place < reach(scope) {
                true => assert_eq!(sent.expect("in reach").recipient, to),
                false => {
                    let error = sent.expect_err("out of reach");
                    assert_eq!(error.code(), "not_permitted");
                    assert!(error.to_string().contains(scope.word()), "{error}");
                }
            }
            let urgent = Correspondence { interrupt: true, interrupt_scope: scope, ..plain };
            let sent = write(&world, &Correspondence { id: MailId(Uuid::now_v7()), ..urgent }).await;
            match (place < reach(scope), sent) {
                (true, sent) => assert_eq!(sent.expect("may be interrupted").recipient, to),
                (false, Err(SendError::NotPermitted { scope: named, interrupts: true })) => {
                    assert_eq!(named, scope);
                }
                (false, other) => panic!("{scope:?}: {other:?}"),
            }
        }
    }
    let mail = history::mail(&world.store, family.grandchild, 0, false, 500).await.expect("mail");
    let urgent = mail.iter().filter(|letter| letter.priority == Priority::High).count();
    assert_eq!((urgent, mail.len()), (3, 6), "what interrupts goes before other mail");
    let from = Sender::Session { session_id: family.child, agent: Some(AGENT.to_owned()) };
    assert!(mail.iter().all(|letter| letter.from == from));
}

#[tokio::test]
async fn sessions_are_named_by_what_models_see_of_them() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let to = async |to: Address, scope: Scope| {
        write(&world, &Correspondence { scope, ..letter(family.child, to, "hello") }).await
    };
    assert_eq!(to(Address::Parent, Scope::Subtree).await.expect("sent").recipient, family.middle);
    let orphan = write(&world, &letter(family.top, Address::Parent, "hello")).await;
    assert!(matches!(orphan, Err(SendError::UnknownRecipient)), "{orphan:?}");
    let short = |id: SessionId| Address::Short(end(id).to_uppercase());
    for (id, scope) in [
        (family.child, Scope::Own),
        (family.grandchild, Scope::Children),
        (family.top, Scope::Subtree),
        (family.sibling, Scope::All),
    ] {
        assert_eq!(to(short(id), scope).await.expect("found").recipient, id, "{scope:?}");
    }
    // Out of reach, or in another tree: as good as not there.
    for (id, scope) in [
        (family.grandchild, Scope::Own),
        (family.top, Scope::Children),
        (family.sibling, Scope::Subtree),
        (family.peer, Scope::All),
    ] {
        let missed = to(short(id), scope).await;
        assert!(matches!(missed, Err(SendError::UnknownRecipient)), "{scope:?}: {missed:?}");
    }
    for odd in ["", "1234567", "123456789", "%0000000", "zzzzzzzz"] {
        let missed = to(Address::Short(odd.to_owned()), Scope::All).await;
        assert!(matches!(missed, Err(SendError::UnknownRecipient)), "{odd}: {missed:?}");
    }
    // A sister whose id ends as the sibling's does.
    let mut bytes = *family.sibling.0.as_bytes();
    bytes[0] ^= 1;
    let twin = create::NewSession {
        id: SessionId(Uuid::from_bytes(bytes)),
        parent: Some(family.middle),
        ..new_session(None, Mode::None)
    };
    create::create(&world.store, &caller(), twin.clone()).await.expect("a session");
    let unclear = to(short(family.sibling), Scope::All).await.expect_err("two of them");
    assert_eq!((unclear.code(), unclear.to_string().contains(&end(twin.id))), ("ambiguous_recipient", true));
    let named = to(Address::Session(family.sibling), Scope::All).await.expect("named by its whole id");
    assert_eq!(named.recipient, family.sibling);
}

#[tokio::test]
async fn what_cannot_be_delivered_is_refused_with_its_reason_and_leaves_nothing() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let to = |id: SessionId| letter(family.child, Address::Session(id), "hello");
    let far = Correspondence { hops: 17, ..to(family.top) };
    assert_eq!(write(&world, &far).await.expect_err("too far").code(), "too_many_hops");
    assert_eq!(
        write(&world, &Correspondence { hops: 16, ..far }).await.expect("just near enough").receipt.seq,
        1
    );
    let long = Correspondence { text: "x".repeat(correspond::TEXT_LIMIT + 1), ..to(family.top) };
    assert_eq!(write(&world, &long).await.expect_err("too long").code(), "text_too_long");
    let foreign = create::NewSession { owner: "bob".to_owned(), ..new_session(None, Mode::None) };
    let bob = accept::Caller { owner: Some("bob".to_owned()), ..caller() };
    create::create(&world.store, &bob, foreign.clone()).await.expect("a session");
    delete(&world.store, &caller(), family.peer, false).await.expect("deleted");
    for unknown in [foreign.id, family.peer, SessionId(Uuid::now_v7())] {
        let refused = write(&world, &to(unknown)).await;
        assert!(matches!(refused, Err(SendError::UnknownRecipient)), "{refused:?}");
    }
    for _ in 1..MAILBOX_LIMIT {
        write(&world, &Correspondence { scope: Scope::Subtree, ..to(family.top) }).await.expect("room");
    }
    let last = to(family.top);
    let full = write(&world, &last).await.expect_err("no room");
    assert!(matches!(full, SendError::MailboxFull { limit: MAILBOX_LIMIT }), "{full}");
    assert_eq!(world.count("SELECT count(*) FROM mail").await, MAILBOX_LIMIT);
}

#[tokio::test]
async fn a_repeated_letter_is_the_same_letter_also_when_the_mailbox_is_full() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let once = letter(family.middle, Address::Session(family.child), "once");
    let first = write(&world, &once).await.expect("sent");
    assert_eq!((first.receipt.duplicate, first.status, first.wakes), (false, Status::Running, true));
    for _ in 1..MAILBOX_LIMIT {
        let more = letter(family.middle, Address::Session(family.child), "more");
        write(&world, &more).await.expect("room");
    }
    let again = join_all((0..8).map(|_| write(&world, &once))).await;
    for again in again {
        let again = again.expect("the same letter");
        assert_eq!((again.receipt.seq, again.receipt.duplicate), (first.receipt.seq, true));
        assert_eq!((again.status, again.wakes), (Status::Running, false));
    }
    assert_eq!(world.count("SELECT count(*) FROM mail").await, MAILBOX_LIMIT);
}

/// What each class of mail does to an idle session whose agent says so: whether a run begins, from whom it came.
async fn woken(world: &World, to: SessionId, from: SessionId) -> bool {
    let sent = write(world, &letter(from, Address::Session(to), "hello")).await.expect("sent");
    let runs = world.runs(to).await;
    assert_eq!((sent.wakes, sent.status == Status::Running), (runs == 1, runs == 1));
    runs == 1
}

#[tokio::test]
async fn mail_wakes_by_what_its_sender_is_to_the_recipient() {
    use WakeClass::{Child, Parent, Peer};
    for (classes, wakes) in [
        (None, [true, true, false, false]),
        (Some(vec![Parent]), [true, false, false, false]),
        (Some(vec![Child]), [false, true, false, false]),
        (Some(vec![Peer]), [false, false, true, true]),
        (Some(vec![]), [false; 4]),
    ] {
        let world = World::new().await;
        if let Some(classes) = &classes {
            waking(&world, classes, false).await;
        }
        for (place, wakes) in wakes.into_iter().enumerate() {
            let family = Family::of(&world).await;
            let from = [family.top, family.grandchild, family.sibling, family.peer][place];
            assert_eq!(woken(&world, family.child, from).await, wakes, "{classes:?}, sender {place}");
        }
    }
}

#[tokio::test]
async fn a_run_that_a_letter_starts_belongs_to_the_letters_trace() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let traced = Correspondence {
        traceparent: Some(trace.to_owned()),
        ..letter(family.top, Address::Session(family.child), "go")
    };
    assert!(write(&world, &traced).await.expect("room").wakes);
    let of_trace = format!("SELECT count(*) FROM runs WHERE traceparent = '{trace}'");
    assert_eq!(world.count(&of_trace).await, 1);
}

#[tokio::test]
async fn mail_that_does_not_wake_is_told_with_what_does() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    let sent = write(&world, &letter(family.peer, Address::Session(family.child), "by the way")).await;
    let sent = sent.expect("sent");
    assert_eq!((sent.wakes, sent.status, world.runs(family.child).await), (false, Status::Ready, 0));
    world.post(family.child, "go", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    assert_eq!(holder.drive_with(vec![says("both read")]).await, Status::Idle);
    let Some(TurnBody::User(turn)) = holder.session.turns.first().map(|turn| &turn.body) else {
        panic!("the first turn is what was said")
    };
    let told = turn.said.iter().any(|said| {
        matches!(said, Said::Text(text) if text.ends_with("\nby the way") && text.contains(&end(family.peer)))
    });
    assert!(told && turn.said.len() == 2, "{:?}", turn.said);
}

#[tokio::test]
async fn the_recipients_current_agent_decides_not_the_one_its_last_run_used() {
    let world = World::new().await;
    let family = Family::of(&world).await;
    assert!(!woken(&world, family.child, family.peer).await);
    waking(&world, &[WakeClass::Peer], false).await;
    assert!(woken(&world, family.child, family.peer).await);
}

async fn paused(world: &World, session: SessionId) {
    accept::pause(&world.store, &caller(), session).await.expect("a pause");
    world.hold().await.drive_with(Vec::new()).await;
    assert_eq!(world.row(session).await.status, "paused");
}

#[tokio::test]
async fn any_mail_resumes_a_paused_session_only_where_its_agent_says_so() {
    for resume in [false, true] {
        let world = World::new().await;
        let agent = waking(&world, &[WakeClass::Parent], resume).await;
        let world = World { agent, ..world };
        let family = Family::of(&world).await;
        paused(&world, family.child).await;
        // Of a class that doesn't wake.
        let sent = write(&world, &letter(family.peer, Address::Session(family.child), "get up")).await;
        let sent = sent.expect("sent");
        assert_eq!(sent.wakes, resume);
        if resume {
            assert_eq!(sent.status, Status::Running);
            assert_eq!(world.hold().await.drive_with(vec![says("up")]).await, Status::Idle);
        } else {
            assert_eq!((sent.status, world.runs(family.child).await), (Status::Paused, 0));
        }
    }
}

#[tokio::test]
async fn mail_after_an_order_to_pause_resumes_although_no_step_has_obeyed_it() {
    let world = World::new().await;
    let agent = waking(&world, &[], true).await;
    let world = World { agent, ..world };
    let family = Family::of(&world).await;
    let send = async || {
        write(&world, &letter(family.peer, Address::Session(family.child), "hello"))
            .await
            .expect("sent")
            .wakes
    };
    world.post(family.child, "work", Mode::UntilBlocked).await;
    assert!(!send().await, "nothing is paused");
    accept::pause(&world.store, &caller(), family.child).await.expect("a pause");
    assert!(send().await);
    assert!(!send().await, "the order is lifted");
    assert_eq!(world.hold().await.drive_with(vec![says("done")]).await, Status::Idle);
}

#[tokio::test]
async fn a_stopped_session_is_not_resumed_by_mail() {
    let world = World::new().await;
    let agent = waking(&world, &[WakeClass::Peer], true).await;
    let world = World { agent, ..world };
    let family = Family::of(&world).await;
    world.post(family.child, "work", Mode::UntilBlocked).await;
    accept::cancel(&world.store, &caller(), family.child, false).await.expect("stopped");
    world.hold().await.drive_with(Vec::new()).await;
    let sent = write(&world, &letter(family.peer, Address::Session(family.child), "hello")).await;
    assert!(!sent.expect("sent").wakes);
}

/// A recipient about to end its run, its commit held at `point`, is written to by its parent.
async fn written_to_while_it_ends(point: &'static str) {
    let world = World::new().await;
    let family = Family::of(&world).await;
    world.post(family.child, "work", Mode::UntilBlocked).await;
    let mut holder = world.hold().await;
    holder.decide();
    holder.answer(says("hi"));
    holder.decide();
    let work = holder.work(RunAfter::End { status: Status::Idle, detail: None });
    let (gate, stopper) = Stopper::at(point);
    let store = world.gated(gate);
    let committing = tokio::spawn(async move { send(&store, &work).await });
    stopper.reached().await;
    let note = letter(family.top, Address::Session(family.child), "and another thing");
    let sending = tokio::spawn({
        let store = world.store.clone();
        async move { correspond::send(&store, OWNER, &note).await }
    });
    let sent = if point == "commit.begun" {
        let sent = sending.await;
        stopper.release();
        sent
    } else {
        until_queued(&world.sql().await, 1).await;
        stopper.release();
        sending.await
    };
    assert!(sent.expect("ended").expect("sent").wakes);
    let outcome = committing.await.expect("ended").expect("an outcome");
    let mut next: Holder = match outcome {
        Outcome::Stored { released: true, .. } => world.hold().await,
        _ => {
            holder.learn(outcome).await;
            holder
        }
    };
    assert_eq!(matches!(outcome, Outcome::Stored { released: true, .. }), point == "commit.written");
    assert_eq!(next.drive_with(vec![says("noted")]).await, Status::Idle);
    let cursor =
        "SELECT count(*) FROM sessions WHERE mail_cursor = mail_seq AND mail_left = '{}' AND mail_seq = 2";
    assert_eq!(world.count(cursor).await, 1, "both letters are read");
}

#[tokio::test]
async fn a_recipient_that_ends_its_run_while_a_letter_comes_is_woken() {
    for point in ["commit.begun", "commit.written"] {
        Box::pin(written_to_while_it_ends(point)).await;
    }
}

#[tokio::test]
async fn sixty_four_rival_senders_keep_their_order_dense_numbers_and_the_bound() {
    const SENDERS: usize = 64;
    const EACH: usize = 8;
    let world = World::with_connections(24).await;
    let recipient = below(&world, None).await;
    let mut senders = Vec::new();
    for _ in 0..SENDERS {
        senders.push(below(&world, Some(recipient)).await);
    }
    let sending = senders.iter().map(|sender| {
        let (store, sender) = (world.store.clone(), *sender);
        tokio::spawn(async move {
            let (mut taken, mut refused) = (Vec::new(), 0);
            for number in 0..EACH {
                let note = letter(sender, Address::Parent, &number.to_string());
                match correspond::send(&store, OWNER, &note).await {
                    Ok(sent) => taken.push((number, sent.receipt.seq)),
                    Err(SendError::MailboxFull { .. }) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            (sender, taken, refused)
        })
    });
    let mut by_sender = BTreeMap::new();
    let mut refused = 0;
    for done in join_all(sending).await {
        let (sender, taken, no_room) = done.expect("ended");
        by_sender.insert(sender, taken);
        refused += no_room;
    }
    let limit = usize::try_from(MAILBOX_LIMIT).expect("a small number");
    assert_eq!(refused, SENDERS * EACH - limit);
    let mail = history::mail(&world.store, recipient, 0, true, 500).await.expect("mail");
    assert_eq!(
        mail.iter().map(|letter| letter.seq).collect::<Vec<_>>(),
        (1..=MAILBOX_LIMIT).collect::<Vec<_>>()
    );
    let mut read: BTreeMap<SessionId, Vec<(usize, i64)>> = BTreeMap::new();
    for letter in mail {
        let (Sender::Session { session_id, .. }, MailBody::AgentMessage { text, .. }) =
            (letter.from, letter.body)
        else {
            panic!("letters of sessions")
        };
        read.entry(session_id).or_default().push((text.parse().expect("a number"), letter.seq));
    }
    by_sender.retain(|_, taken| !taken.is_empty());
    assert_eq!(
        read, by_sender,
        "each sender's letters are there in its order, under the numbers it was told"
    );
    assert!(read.values().all(|letters| letters.is_sorted()));
    // One run, whoever woke it, and it knows of them all.
    assert_eq!(world.count("SELECT wake_seq FROM runs").await, MAILBOX_LIMIT);
}

#[tokio::test]
async fn orders_results_and_messages_wake_whatever_the_agent_says() {
    let world = World::new().await;
    let (waiting, _, token) = world.waiting().await;
    waking(&world, &[], false).await;
    let report = Report::Result(ToolResult::text("done"));
    complete(&world.store, &caller(), token, &report, true).await.expect("completed");
    assert_eq!(world.runs(waiting).await, 1);
    let (posted, ordered, told) = (world.session().await, world.session().await, world.session().await);
    world.post(posted, "hello", Mode::UntilBlocked).await;
    let order = Letter {
        id: MailId(Uuid::now_v7()),
        from: Sender::User { owner: None },
        priority: Priority::High,
        hops: 0,
        body: MailBody::Control { message: holdfast_engine::mail::Control::Resume },
    };
    let asked = Ask::Run(Mode::UntilBlocked);
    let done = accept::send(&world.store, &caller(), ordered, order.clone(), asked, &[]).await;
    assert!(matches!(done, Ok(Done::Now(_))), "{done:?}");
    let query = MailBody::UserMessage { query: message("hello").query };
    let mail = Letter { id: MailId(Uuid::now_v7()), body: query, ..order };
    accept::send(&world.store, &caller(), told, mail, WakeClass::User, &[]).await.expect("taken");
    let runs = (world.runs(posted).await, world.runs(ordered).await, world.runs(told).await);
    assert_eq!(runs, (1, 1, 0));
}
