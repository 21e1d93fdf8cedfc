//! Letters on their way in, in groups: those that come while a transaction is under way share the next one, one
//! statement a table. A lone letter waits for nobody.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use holdfast_engine::{
    content::Blob,
    decide::Mode,
    ids::{MailId, SessionId},
    mail::{Control, MailBody},
    session::{Hold, Status},
    waking::Waking,
};
use tokio::{sync::mpsc, task::JoinSet};
use uuid::Uuid;

use crate::{
    Store,
    accept::{Caller, cancel_continuations, has_room, refused_for_room},
    errors::StoreError,
    idempotency::{self, Done, Key},
    letters::{
        Ask, Letter, Locked, LockedRun, Mailbox, Receipt, insert_blobs, lock_runs, lock_sessions, write,
    },
    retry::against_rivals,
    room::{self, Room},
    sql,
    transaction::{Transaction, Writes},
    waking::{self, Wake},
};

/// Letters that one transaction takes in at the most.
pub const MAX_GROUP: usize = 64;

/// Bytes of blobs beyond which a group takes no further letter in.
const GROUP_BYTES: usize = 4 * 1024 * 1024;

/// How long a group waits for rows that others have locked before its letters go their own ways.
const PATIENCE: Duration = Duration::from_millis(200);

/// A letter on its way in.
#[derive(Debug)]
pub(crate) struct Request {
    session: SessionId,
    /// Whose session it has to be.
    owner: Option<String>,
    traceparent: Option<String>,
    letter: Letter,
    wake: Wake,
    blobs: Vec<Blob>,
}

/// What came of a letter.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) receipt: Receipt,
    /// What the session is doing by then.
    pub(crate) status: Status,
    /// Whether a run takes the letter up.
    pub(crate) wakes: bool,
    announces: bool,
    /// The owner whose queue a new run of it joins.
    queued: Option<String>,
}

/// Where letters are taken in.
pub(crate) type Postroom = Room<Request, Accepted>;

type Waiting = room::Waiting<Request, Accepted>;

/// Delivers a letter, and says what came of it.
pub(crate) async fn deliver(
    store: &Store,
    caller: &Caller,
    session: SessionId,
    letter: &Letter,
    wake: Wake,
    blobs: &[Blob],
) -> Result<Done<Accepted>, StoreError> {
    let request = Request {
        session,
        owner: caller.owner.clone(),
        traceparent: caller.traceparent.clone(),
        letter: letter.clone(),
        wake,
        blobs: blobs.to_vec(),
    };
    let accepted = match &caller.key {
        None => store.postroom.ask(request, |arriving| run(store.without_rooms(), arriving)).await?,
        Some(key) => match against_rivals(|| keyed(store, &request, key)).await? {
            Done::Now(accepted) => accepted,
            Done::Before { code, resource } => return Ok(Done::Before { code, resource }),
        },
    };
    if let Some(owner) = &accepted.queued {
        store.backlog.queued(owner);
    }
    if !accepted.receipt.duplicate {
        store.announce(session, accepted.announces);
    }
    Ok(Done::Now(accepted))
}

/// The letters of a session that somebody has locked, beside the groups of all others: they have one transaction at a
/// time, and so one connection, however many they are. There until none is left.
type Apart = HashMap<SessionId, Vec<Waiting>>;

async fn run(store: Store, mut arriving: mpsc::Receiver<Waiting>) {
    let mut apart = Apart::new();
    let mut serving: JoinSet<SessionId> = JoinSet::new();
    let serve = |session: SessionId, letters: Vec<Waiting>| {
        let store = store.clone();
        async move {
            take_apart(&store, letters).await;
            session
        }
    };
    loop {
        tokio::select! {
            first = arriving.recv() => {
                let Some(first) = first else { return };
                // Those that the last group has just answered get to speak: what they say next may join this one.
                tokio::task::yield_now().await;
                let group = next_group(first, &mut arriving, &mut apart);
                let mut left = Apart::new();
                for waiting in take_group(&store, group).await {
                    left.entry(waiting.request.session).or_default().push(waiting);
                }
                for (session, letters) in left {
                    apart.insert(session, Vec::new());
                    serving.spawn(serve(session, letters));
                }
            }
            Some(ended) = serving.join_next() => match ended {
                Ok(session) => match apart.remove(&session) {
                    Some(mut letters) if !letters.is_empty() => {
                        let later = letters.split_off(letters.len().min(MAX_GROUP));
                        apart.insert(session, later);
                        serving.spawn(serve(session, letters));
                    }
                    _ => {}
                },
                Err(error) => {
                    tracing::error!(%error, "taking the letters of a session in panicked");
                    // Nobody knows whose: all who wait are told to ask again.
                    apart.clear();
                }
            },
        }
    }
}

/// Letters for one transaction. Those of sessions that are apart join their own.
fn next_group(first: Waiting, arriving: &mut mpsc::Receiver<Waiting>, apart: &mut Apart) -> Vec<Waiting> {
    let (mut group, mut bytes) = (Vec::new(), 0_usize);
    let mut next = Some(first);
    while let Some(waiting) = next {
        if let Some(own) = apart.get_mut(&waiting.request.session) {
            own.push(waiting);
        } else if !waiting.answer.is_closed() {
            bytes = waiting.request.blobs.iter().fold(bytes, |sum, blob| sum.saturating_add(blob.text.len()));
            group.push(waiting);
        }
        next = if group.len() < MAX_GROUP && bytes < GROUP_BYTES { arriving.try_recv().ok() } else { None };
    }
    group
}

/// Takes a group in. Returns its letters if it failed as a whole, or had to wait for somebody's lock: then each
/// session's are taken in by themselves, so that only the culprit's fail or wait.
async fn take_group(store: &Store, group: Vec<Waiting>) -> Vec<Waiting> {
    if group.is_empty() {
        return group;
    }
    let store = store.clone();
    // A task of its own, so that a panic costs one group and not those behind it.
    let taking = tokio::spawn(async move {
        let requests: Vec<&Request> = group.iter().map(|waiting| &waiting.request).collect();
        let taken = Box::pin(take_in(&store, &requests, None, Some(PATIENCE))).await;
        settle(group, taken)
    });
    match taking.await {
        Ok(left) => left,
        Err(error) => {
            tracing::error!(%error, "taking a group of letters in panicked");
            Vec::new()
        }
    }
}

/// Takes letters of one session in, however long somebody else has it locked. Who goes away leaves nothing behind.
async fn take_apart(store: &Store, mut letters: Vec<Waiting>) {
    loop {
        letters.retain(|waiting| !waiting.answer.is_closed());
        if letters.is_empty() {
            return;
        }
        let taken = {
            let (requests, mut answers): (Vec<&Request>, Vec<_>) =
                letters.iter_mut().map(|waiting| (&waiting.request, &mut waiting.answer)).unzip();
            let gone =
                futures::future::select_all(answers.iter_mut().map(|answer| Box::pin(answer.closed())));
            tokio::select! {
                taken = against_rivals(|| Box::pin(take_in(store, &requests, None, None))) => taken,
                _ = gone => continue,
            }
        };
        match taken {
            Err(error) if letters.len() == 1 => {
                if let Some(waiting) = letters.pop() {
                    let _ = waiting.answer.send(Err(error));
                }
                return;
            }
            taken => {
                // What is left failed as a whole: one of them is at fault, and the others needn't share it.
                for one in settle(letters, taken) {
                    Box::pin(take_apart(store, vec![one])).await;
                }
                return;
            }
        }
    }
}

/// Answers those whose letters were taken in or refused. Returns those whose transaction failed and may be tried again.
fn settle(
    letters: Vec<Waiting>,
    taken: Result<Done<Vec<Result<Accepted, StoreError>>>, StoreError>,
) -> Vec<Waiting> {
    match taken {
        Ok(Done::Now(taken)) => {
            for (waiting, accepted) in letters.into_iter().zip(taken) {
                // Nobody may be waiting any more.
                let _ = waiting.answer.send(accepted);
            }
            Vec::new()
        }
        // Whether it was stored nobody knows: those who sent it will ask again.
        Err(StoreError::Unavailable(why)) => {
            for waiting in letters {
                let _ = waiting.answer.send(Err(StoreError::Unavailable(why.clone())));
            }
            Vec::new()
        }
        Ok(Done::Before { .. }) | Err(_) => letters,
    }
}

/// Takes one letter in with the key of its request: a refusal leaves no key behind.
async fn keyed(store: &Store, request: &Request, key: &Key) -> Result<Done<Accepted>, StoreError> {
    match Box::pin(take_in(store, &[request], Some(key), None)).await? {
        Done::Now(mut taken) => taken.pop().unwrap_or(Err(StoreError::Rival)).map(Done::Now),
        Done::Before { code, resource } => Ok(Done::Before { code, resource }),
    }
}

/// Takes letters in, in one transaction; a letter that is refused changes nothing. Rows that others have locked are
/// waited for as long as `patience` lasts.
///
/// # Errors
/// Of all of them, with nothing stored; [`StoreError::Unavailable`] leaves it unknown. [`StoreError::Rival`] if the
/// patience has run out.
async fn take_in(
    store: &Store,
    requests: &[&Request],
    key: Option<&Key>,
    patience: Option<Duration>,
) -> Result<Done<Vec<Result<Accepted, StoreError>>>, StoreError> {
    let tx = Transaction::over(store.client().await?);
    tx.prepare(&[sql::LOCK_SESSION, sql::LOCK_RUN, sql::FIND_LETTERS, sql::WAKE_TERMS]).await?;
    let sessions: Vec<SessionId> = requests.iter().map(|request| request.session).collect();
    let letters: Vec<Uuid> = requests.iter().map(|request| request.letter.id.0).collect();
    let by_class: Vec<SessionId> = requests
        .iter()
        .filter(|request| matches!(request.wake, Wake::As(_)))
        .map(|request| request.session)
        .collect();
    let reads = async {
        let ids: Vec<Uuid> = sessions.iter().map(|id| id.0).collect();
        let terms = async {
            if by_class.is_empty() { Ok(HashMap::new()) } else { waking::terms(&tx, &by_class).await }
        };
        futures::try_join!(
            lock_sessions(&tx, &sessions),
            lock_runs(&tx, &sessions),
            async { tx.query(sql::FIND_LETTERS, &[&ids, &letters]).await },
            terms
        )
    };
    let resource = requests.first().map(|one| format!("{}/{}", one.session, one.letter.id));
    let beginning = idempotency::begin(&tx, key, resource.as_deref().unwrap_or_default(), reads);
    let begun = match patience {
        Some(patience) => {
            tokio::time::timeout(patience, beginning).await.map_err(|_| StoreError::Rival)??
        }
        None => beginning.await?,
    };
    let (sessions, runs, known, terms) = match begun {
        Done::Now(read) => read,
        Done::Before { code, resource } => return Ok(Done::Before { code, resource }),
    };
    let mut tray = Tray::new(sessions, &runs, terms);
    for row in known {
        let place = (SessionId(row.try_get(0)?), MailId(row.try_get(1)?));
        tray.known.insert(place, row.try_get(2)?);
    }
    let mut writes = Writes::default();
    let mut taken = Vec::with_capacity(requests.len());
    for request in requests {
        match Box::pin(tray.take(&tx, &mut writes, request)).await {
            Ok(accepted) => taken.push(Ok(accepted)),
            Err(refused @ (StoreError::UnknownSession | StoreError::MailboxFull { .. })) => {
                taken.push(Err(refused));
            }
            Err(error) => return Err(error),
        }
    }
    if key.is_some() && taken.iter().any(Result::is_err) {
        tx.rollback().await?;
        return Ok(Done::Now(taken));
    }
    write(&mut writes, tray.mailboxes.values())?;
    let new = requests.iter().zip(&taken).filter(|(_, accepted)| {
        matches!(accepted, Ok(Accepted { receipt: Receipt { duplicate: false, .. }, .. }))
    });
    let blobs = new.flat_map(|(request, _)| {
        let owner = tray.mailboxes.get(&request.session).map(|own| own.session.owner.as_str());
        owner.into_iter().flat_map(|owner| request.blobs.iter().map(move |blob| (owner, blob)))
    });
    insert_blobs(&mut writes, blobs);
    tx.commit(writes).await?;
    Ok(Done::Now(taken))
}

/// The mailboxes of a group, with what is taken in of them.
struct Tray {
    mailboxes: BTreeMap<SessionId, Mailbox>,
    terms: HashMap<SessionId, Waking>,
    /// Numbers of letters that are there, those of this group included.
    known: HashMap<(SessionId, MailId), i64>,
    /// How many letters, and how many orders, this group adds to a mailbox, which nobody can count yet.
    added: HashMap<(SessionId, bool), i64>,
    /// Mailboxes that have no room for letters, or orders.
    full: HashSet<(SessionId, bool)>,
}

impl Tray {
    fn new(sessions: Vec<Locked>, runs: &[LockedRun], terms: HashMap<SessionId, Waking>) -> Self {
        let mailbox = |session: Locked| {
            let run = runs.iter().find(|run| run.session == session.id).copied();
            (session.id, Mailbox::of(session, run))
        };
        let mailboxes = sessions.into_iter().map(mailbox).collect();
        Self { mailboxes, terms, known: HashMap::new(), added: HashMap::new(), full: HashSet::new() }
    }

    async fn take(
        &mut self,
        tx: &Transaction,
        writes: &mut Writes<'_>,
        request: &Request,
    ) -> Result<Accepted, StoreError> {
        let (id, letter) = (request.session, &request.letter);
        let own = |session: &Locked| request.owner.as_ref().is_none_or(|owner| *owner == session.owner);
        let mailbox = self.mailboxes.get_mut(&id);
        let mailbox = mailbox.filter(|mailbox| !mailbox.session.deleted && own(&mailbox.session));
        let mailbox = mailbox.ok_or(StoreError::UnknownSession)?;
        if let Some(seq) = self.known.get(&(id, letter.id)) {
            let receipt = Receipt { id: letter.id, seq: *seq, duplicate: true };
            let status = mailbox.session.status;
            return Ok(Accepted { receipt, status, wakes: false, announces: false, queued: None });
        }
        let ask = match request.wake {
            Wake::By(ask) => ask,
            Wake::As(class) => {
                let terms = self.terms.get(&id).cloned().unwrap_or_default();
                waking::ask(tx, &terms, &mailbox.session, mailbox.run.as_ref(), class).await?
            }
        };
        let order = matches!(letter.body, MailBody::Control { .. });
        let place = (id, order);
        if self.full.contains(&place) {
            return Err(refused_for_room(order));
        }
        let added = self.added.get(&place).copied().unwrap_or_default();
        if let Err(refused) = has_room(tx, &mailbox.session, order, added).await {
            if matches!(refused, StoreError::MailboxFull { .. }) {
                self.full.insert(place);
            }
            return Err(refused);
        }
        if let MailBody::Control { message: Control::CancelCalls { tool_call_ids } } = &letter.body {
            cancel_continuations(writes, id, Some(tool_call_ids));
        }
        let (had_run, before) = (mailbox.run.is_some(), mailbox.session.mail_seq);
        let seq = mailbox.take(vec![letter.clone()], ask, request.traceparent.as_deref());
        // An order that lifts a hold may go before it.
        let more = mailbox.session.mail_seq - before - 1;
        *self.added.entry((id, true)).or_default() += more;
        *self.added.entry(place).or_default() += 1;
        self.known.insert((id, letter.id), seq);
        let session = &mailbox.session;
        let queued = (!had_run && matches!(ask, Ask::Run(_))).then(|| session.owner.clone());
        let wakes = match ask {
            Ask::Nothing | Ask::Fold => false,
            Ask::GoOn => session.hold == Hold::None,
            Ask::Run(mode) => mode != Mode::None,
        };
        let receipt = Receipt { id: letter.id, seq, duplicate: false };
        Ok(Accepted { receipt, status: session.status, wakes, announces: ask != Ask::Nothing, queued })
    }
}
