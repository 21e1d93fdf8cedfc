//! Child sessions that a step of their parent starts: they are there once the parent's commit is, with their first
//! letter and their run.

use holdfast_engine::{
    decide::{Mode, Spawn},
    mail::{Priority, Sender},
};

use crate::{
    commit::Commit,
    errors::StoreError,
    letters::{Ask, Beginning, Letter, Locked, begin, intake},
    sql,
    transaction::{Writes, parameters},
};

/// Adds what starts a child of `parent`, whose row is locked, in the step `work` of it.
pub(crate) fn spawn(
    writes: &mut Writes<'_>,
    parent: &Locked,
    work: &Commit,
    new: &Spawn,
) -> Result<(), StoreError> {
    let letter = Letter {
        id: new.letter,
        from: Sender::Session { session_id: parent.id, agent: Some(work.agent.clone()) },
        priority: Priority::Normal,
        hops: new.hops,
        body: new.body.clone(),
    };
    let fresh = Locked { event_seq: 1, ..Locked::fresh(new.id, &parent.owner, parent.root) };
    let intake = intake(&fresh, None, vec![letter], Ask::Run(Mode::UntilBlocked));
    writes.push(
        sql::SPAWN_SESSION,
        parameters![
            parent.id.0,
            new.id.0,
            new.agent.clone(),
            new.call.map(|call| call.0),
            intake.status.word(),
            intake.mail_seq,
            intake.event_seq,
        ],
    );
    let (session, owner, traceparent) = (new.id, parent.owner.as_str(), work.traceparent.as_deref());
    begin(writes, &[Beginning { session, owner, intake, traceparent }])
}
