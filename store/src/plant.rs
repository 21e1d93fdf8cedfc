//! Classic mistakes of engines like this one, which a build for tests makes on demand, so that the suites can be
//! seen to catch them. Without the feature `planted-mistakes` nothing of it is compiled but answers of "no".
//!
//! `HOLDFAST_PLANT` names the one mistake that a process makes.

/// Whether this build can make mistakes.
pub const PLANTED: bool = cfg!(feature = "planted-mistakes");

/// A mistake, planted where somebody might make it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// A commit is let through whatever epoch its run's lease has by now.
    NoEpochCheck,
    /// A commit that was fenced off is forced through, as if it only had to be sent again.
    RetryAfterLeaseLost,
    /// Waking inserts a run unless there is one, and leaves one that is there as it is.
    WakeDoNothing,
    /// A run ends by what its worker knew, without a look at what woke it meanwhile.
    EndIgnoresWake,
    /// A commit moves the cursor over mail that its step hasn't folded.
    CursorBeforeEffect,
    /// A heartbeat renews a session's lease whoever holds it.
    HeartbeatBySession,
    /// Sessions are read without their lock, and numbers of events and mail are taken from that.
    NumbersOutsideLock,
    /// A token's state is read before its session's lock and not again under it.
    TokenBeforeLock,
    /// A cancel closes tokens whatever state they are in.
    CancelOverwrites,
    /// A token that was listed as overdue is expired without another look.
    ExpireBlindly,
    /// Tools start before the commit that records their start.
    EffectBeforeCommit,
    /// Runs are taken over although their leases stand.
    ClaimStanding,
    /// A claim reads due runs without locking them.
    ClaimUnlocked,
    /// Idempotency keys are not remembered.
    ForgetKey,
    /// A call that its worker left behind is started again, whatever its tool's rule says.
    RestartOrphans,
    /// A commit whose answer was lost is taken for stored.
    UnknownIsStored,
}

impl Mistake {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::NoEpochCheck,
        Self::RetryAfterLeaseLost,
        Self::WakeDoNothing,
        Self::EndIgnoresWake,
        Self::CursorBeforeEffect,
        Self::HeartbeatBySession,
        Self::NumbersOutsideLock,
        Self::TokenBeforeLock,
        Self::CancelOverwrites,
        Self::ExpireBlindly,
        Self::EffectBeforeCommit,
        Self::ClaimStanding,
        Self::ClaimUnlocked,
        Self::ForgetKey,
        Self::RestartOrphans,
        Self::UnknownIsStored,
    ];

    /// Its name in `HOLDFAST_PLANT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoEpochCheck => "no-epoch-check",
            Self::RetryAfterLeaseLost => "retry-after-lease-lost",
            Self::WakeDoNothing => "wake-do-nothing",
            Self::EndIgnoresWake => "end-ignores-wake",
            Self::CursorBeforeEffect => "cursor-before-effect",
            Self::HeartbeatBySession => "heartbeat-by-session",
            Self::NumbersOutsideLock => "numbers-outside-lock",
            Self::TokenBeforeLock => "token-before-lock",
            Self::CancelOverwrites => "cancel-overwrites",
            Self::ExpireBlindly => "expire-blindly",
            Self::EffectBeforeCommit => "effect-before-commit",
            Self::ClaimStanding => "claim-standing",
            Self::ClaimUnlocked => "claim-unlocked",
            Self::ForgetKey => "forget-key",
            Self::RestartOrphans => "restart-orphans",
            Self::UnknownIsStored => "unknown-is-stored",
        }
    }
}

#[cfg(not(feature = "planted-mistakes"))]
mod planted {
    use super::Mistake;

    /// Whether this process makes a mistake: never, in a build without them.
    pub const fn made(_: Mistake) -> bool {
        false
    }

    /// A statement as it is sent: as it is written.
    pub(crate) const fn altered(statement: &'static str) -> &'static str {
        statement
    }
}

#[cfg(feature = "planted-mistakes")]
mod planted {
    use std::sync::OnceLock;

    use super::Mistake;
    use crate::sql;

    static MADE: OnceLock<Option<Mistake>> = OnceLock::new();
    static ALTERED: OnceLock<Vec<(&'static str, String)>> = OnceLock::new();

    /// Whether this process makes a mistake.
    ///
    /// # Panics
    /// If `HOLDFAST_PLANT` names none: a check of the suites that plants nothing would prove nothing.
    pub fn made(mistake: Mistake) -> bool {
        *MADE.get_or_init(|| {
            let name = std::env::var("HOLDFAST_PLANT").ok().filter(|name| !name.is_empty())?;
            let found = Mistake::ALL.into_iter().find(|mistake| mistake.name() == name);
            Some(found.unwrap_or_else(|| panic!("HOLDFAST_PLANT={name} is no mistake that is known")))
        }) == Some(mistake)
    }

    /// A statement as it is sent: as it is written, unless the planted mistake is one of statements.
    ///
    /// # Panics
    /// If a statement has changed so that the mistake can't be made in it any more.
    pub(crate) fn altered(statement: &'static str) -> &'static str {
        let altered = ALTERED.get_or_init(|| {
            let mut altered: Vec<(&'static str, String)> = Vec::new();
            for (_, text, from, to) in STATEMENTS.iter().filter(|(mistake, ..)| made(*mistake)) {
                let at = altered.iter().position(|(original, _)| original == text).unwrap_or_else(|| {
                    altered.push((text, (*text).to_owned()));
                    altered.len() - 1
                });
                assert!(altered[at].1.contains(from), "{from:?} isn't in the statement:\n{text}");
                altered[at].1 = altered[at].1.replace(from, to);
            }
            altered
        });
        altered.iter().find(|(text, _)| *text == statement).map_or(statement, |(_, text)| text)
    }

    /// Mistakes of statements: which statement, what is taken out of it, and what is put in its place.
    pub(super) const STATEMENTS: [(Mistake, &str, &str, &str); 15] = [
        (Mistake::RetryAfterLeaseLost, sql::COMMIT_SESSION, " AND s.version = n.version", ""),
        (
            Mistake::WakeDoNothing,
            sql::WAKE_RUN,
            "coalesce(runs.traceparent, excluded.traceparent)",
            "runs.traceparent WHERE false",
        ),
        (
            Mistake::CursorBeforeEffect,
            sql::COMMIT_SESSION,
            "mail_cursor = n.cursor",
            "mail_cursor = s.mail_seq",
        ),
        (Mistake::HeartbeatBySession, sql::HEARTBEAT, " AND r.epoch = h.epoch", ""),
        (Mistake::HeartbeatBySession, sql::HEARTBEAT, " AND epoch = h.epoch", ""),
        (
            Mistake::HeartbeatBySession,
            sql::HEARTBEAT,
            "SELECT r.session_id, r.epoch, r.wake_seq, r.mode, false",
            "SELECT r.session_id, h.epoch, r.wake_seq, r.mode, false",
        ),
        (
            Mistake::HeartbeatBySession,
            sql::HEARTBEAT,
            "SELECT session_id, epoch, wake_seq, mode, true FROM renewed",
            "SELECT n.session_id, h.epoch, n.wake_seq, n.mode, true FROM renewed n JOIN held h USING (session_id)",
        ),
        (Mistake::NumbersOutsideLock, sql::LOCK_SESSION, "FOR NO KEY UPDATE", ""),
        (Mistake::NumbersOutsideLock, sql::LOCK_SESSION_OF_TOKEN, "FOR NO KEY UPDATE", ""),
        (Mistake::TokenBeforeLock, sql::SETTLE_CONTINUATION, " AND state || '' = 'open'", ""),
        (Mistake::CancelOverwrites, sql::CANCEL_OPEN_CONTINUATIONS, " AND state || '' = 'open'", ""),
        (Mistake::ExpireBlindly, sql::SETTLE_CONTINUATION, " AND state || '' = 'open'", ""),
        (Mistake::ClaimStanding, sql::CLAIM_EXPIRED, " AND lease_until < now()", ""),
        (Mistake::ClaimUnlocked, sql::CLAIM_QUEUED, "FOR UPDATE SKIP LOCKED", ""),
        (Mistake::ClaimUnlocked, sql::CLAIM_NAMED, " FOR UPDATE SKIP LOCKED", ""),
    ];
}

pub(crate) use planted::altered;
pub use planted::made;

#[cfg(all(test, feature = "planted-mistakes"))]
mod tests {
    use super::planted::STATEMENTS;

    #[test]
    fn every_mistake_of_a_statement_can_still_be_made() {
        for (mistake, statement, from, _) in STATEMENTS {
            assert!(statement.contains(from), "{mistake:?}: {from:?} isn't in\n{statement}");
        }
    }
}
