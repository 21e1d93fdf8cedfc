//! How a session of an agent behaves towards open calls and mail.

use serde::{Deserialize, Serialize};

use crate::{agent::AgentError, scope::Scope};

/// The longest that a `wait` may be allowed to take, in seconds.
const MAX_WAIT_SECONDS: u64 = 86_400;

/// The deepest that sessions may be allowed to call sessions.
const MAX_DEPTH: usize = 32;

/// Whether the model may be asked while calls of its last answer are open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ExecutionMode {
    /// Only when somebody interrupts.
    #[default]
    Synchronous,
    /// Also when calls that run in the background have been waited for long enough.
    Asynchronous,
}

/// For how long the conversation waits for calls that may run in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum YieldStrategy {
    /// Until all have ended.
    #[default]
    WhenAllDone,
    /// Until one has ended.
    OnAnyProgress,
    /// So many milliseconds from the model's answer on.
    OnTimeout(u64),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum YieldForm {
    Word(YieldWord),
    Tagged(YieldTagged),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum YieldWord {
    YieldWhenAllDone,
    YieldOnAnyProgress,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "tag", deny_unknown_fields)]
enum YieldTagged {
    #[serde(rename = "yieldWhenAllDone")]
    WhenAllDone {},
    #[serde(rename = "yieldOnAnyProgress")]
    OnAnyProgress {},
    #[serde(rename = "yieldOnTimeout")]
    OnTimeout { milliseconds: u64 },
}

impl Serialize for YieldStrategy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let form = match *self {
            Self::WhenAllDone => YieldForm::Word(YieldWord::YieldWhenAllDone),
            Self::OnAnyProgress => YieldForm::Word(YieldWord::YieldOnAnyProgress),
            Self::OnTimeout(milliseconds) => YieldForm::Tagged(YieldTagged::OnTimeout { milliseconds }),
        };
        form.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for YieldStrategy {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let known = "asyncYieldStrategy must be \"yieldWhenAllDone\", \"yieldOnAnyProgress\" or \
                     {\"tag\": \"yieldOnTimeout\", \"milliseconds\": N}";
        match YieldForm::deserialize(deserializer) {
            Ok(
                YieldForm::Word(YieldWord::YieldWhenAllDone) | YieldForm::Tagged(YieldTagged::WhenAllDone {}),
            ) => Ok(Self::WhenAllDone),
            Ok(
                YieldForm::Word(YieldWord::YieldOnAnyProgress)
                | YieldForm::Tagged(YieldTagged::OnAnyProgress {}),
            ) => Ok(Self::OnAnyProgress),
            Ok(YieldForm::Tagged(YieldTagged::OnTimeout { milliseconds })) => {
                Ok(Self::OnTimeout(milliseconds))
            }
            Err(_) => Err(serde::de::Error::custom(known)),
        }
    }
}

/// The part of an agent file that says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conduct {
    /// Whether turns may be answered in part.
    pub execution_mode: ExecutionMode,
    /// For how long calls that may run in the background are waited for.
    pub async_yield_strategy: YieldStrategy,
    /// Whether an interrupt ends a model request under way.
    pub interrupt_completions: bool,
    /// Whether mail that comes with results is shown inside the last of them, for providers that take no
    /// user message behind results.
    pub mail_in_tool_result: bool,
    /// Whether a pause ends the calls that run.
    pub pause_cancels_calls: bool,
    /// The longest that a `wait` may take, in seconds.
    pub max_wait_seconds: u64,
    /// To which sessions it may write.
    pub mail_scope: Scope,
    /// Which sessions it may interrupt.
    pub interrupt_scope: Scope,
    /// How often a letter may be an answer to an answer.
    pub max_mail_hops: u32,
    /// How many sessions deep it may be called, and call others.
    pub max_recursion_depth: usize,
}

impl Default for Conduct {
    fn default() -> Self {
        Self {
            execution_mode: ExecutionMode::Synchronous,
            async_yield_strategy: YieldStrategy::WhenAllDone,
            interrupt_completions: false,
            mail_in_tool_result: false,
            pause_cancels_calls: false,
            max_wait_seconds: 300,
            mail_scope: Scope::Subtree,
            interrupt_scope: Scope::Children,
            max_mail_hops: 16,
            max_recursion_depth: 8,
        }
    }
}

impl Conduct {
    /// Checks the numbers.
    ///
    /// # Errors
    /// [`AgentError::OutOfRange`].
    pub fn check(&self) -> Result<(), AgentError> {
        if !(1..=MAX_WAIT_SECONDS).contains(&self.max_wait_seconds) {
            return Err(AgentError::OutOfRange { field: "maxWaitSeconds", range: "1 to 86400" });
        }
        if self.max_mail_hops > 1000 {
            return Err(AgentError::OutOfRange { field: "maxMailHops", range: "0 to 1000" });
        }
        if self.max_recursion_depth > MAX_DEPTH {
            return Err(AgentError::OutOfRange { field: "maxRecursionDepth", range: "0 to 32" });
        }
        match self.async_yield_strategy {
            YieldStrategy::OnTimeout(ms) if ms > 86_400_000 => Err(AgentError::OutOfRange {
                field: "asyncYieldStrategy.milliseconds",
                range: "0 to 86400000",
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_read_in_both_forms_and_written_in_one() {
        let read = |text: &str| serde_json::from_str::<YieldStrategy>(text);
        for text in ["\"yieldOnAnyProgress\"", r#"{"tag": "yieldOnAnyProgress"}"#] {
            assert_eq!(read(text).expect(text), YieldStrategy::OnAnyProgress);
        }
        let timeout = r#"{"tag":"yieldOnTimeout","milliseconds":500}"#;
        assert_eq!(read(timeout).expect("known"), YieldStrategy::OnTimeout(500));
        assert_eq!(serde_json::to_string(&YieldStrategy::OnTimeout(500)).expect("JSON"), timeout);
        let refused = read("\"yieldNever\"").expect_err("unknown").to_string();
        assert!(refused.contains("yieldWhenAllDone"), "{refused}");
    }

    #[test]
    fn numbers_have_bounds() {
        let with = |change: &dyn Fn(&mut Conduct)| {
            let mut conduct = Conduct::default();
            change(&mut conduct);
            conduct.check().is_ok()
        };
        assert!(with(&|_| {}));
        assert!(!with(&|conduct| conduct.max_wait_seconds = 0));
        assert!(with(&|conduct| conduct.max_wait_seconds = MAX_WAIT_SECONDS));
        assert!(!with(&|conduct| conduct.max_wait_seconds = MAX_WAIT_SECONDS + 1));
        assert!(with(&|conduct| conduct.max_mail_hops = 1000) && !with(&|c| c.max_mail_hops = 1001));
        assert!(with(&|c| c.max_recursion_depth = 32) && !with(&|c| c.max_recursion_depth = 33));
        let day = 86_400_000;
        assert!(with(&|c| c.async_yield_strategy = YieldStrategy::OnTimeout(day)));
        assert!(!with(&|c| c.async_yield_strategy = YieldStrategy::OnTimeout(day + 1)));
    }
}
