//! Small models of Holdfast's protocols, and a checker that looks at every state they can get into.
//!
//! A model's steps are what the database sees as one: a transaction, a statement, a message that arrives
//! or is lost. Each model has a `Variant`: the protocol as it is, or with one classic mistake in it. The
//! tests show that the one breaks no promise anywhere, and that each mistake breaks the promise that is
//! there to prevent it. See docs/models.md.

pub mod check;
pub mod lease;
pub mod mail;
pub mod token;

/// Makes the enum of a model's actions. The second block holds those that only mistakes bring about.
macro_rules! actions {
    (
        $(#[$about:meta])*
        pub enum $name:ident {
            real { $($(#[$real_about:meta])* $real:ident$(($($real_of:ty),+))?,)+ }
            mistaken { $($(#[$wrong_about:meta])* $wrong:ident$(($($wrong_of:ty),+))?,)* }
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$real_about])* $real$(($($real_of),+))?,)+
            $($(#[$wrong_about])* $wrong$(($($wrong_of),+))?,)*
        }

        impl $crate::check::Kind for $name {
            const REAL: &'static [&'static str] = &[$(stringify!($real)),+];

            fn kind(&self) -> &'static str {
                match self {
                    $(Self::$real { .. } => stringify!($real),)+
                    $(Self::$wrong { .. } => stringify!($wrong),)*
                }
            }
        }
    };
}
pub(crate) use actions;
