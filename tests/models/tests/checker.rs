//! The checker itself: it finds every state, the shortest way, and what can't be reached any more.

use holdfast_models::check::{Kind, Model, Promise, check, check_one};

/// A walker goes up and down between 0 and 9. Whoever is at 7 or above can only come down into a pit, where it
/// goes round for ever.
struct Walk;

#[derive(Debug, Clone, Copy)]
enum Move {
    Up,
    Down,
}

impl Kind for Move {
    const REAL: &'static [&'static str] = &["Up", "Down", "Sideways"];

    fn kind(&self) -> &'static str {
        match self {
            Self::Up => "Up",
            Self::Down => "Down",
        }
    }
}

impl Model for Walk {
    type State = (u8, bool);
    type Action = Move;

    fn start(&self) -> (u8, bool) {
        (5, false)
    }

    fn actions(&self, (height, _): &(u8, bool)) -> Vec<Move> {
        let up = (*height < 9).then_some(Move::Up);
        up.into_iter().chain((*height > 0).then_some(Move::Down)).collect()
    }

    fn after(&self, (height, pit): &(u8, bool), action: Move) -> (u8, bool) {
        match action {
            Move::Up => (height + 1, *pit),
            Move::Down => (height - 1, *pit || *height == 7),
        }
    }

    fn promises(&self) -> Vec<Promise<(u8, bool)>> {
        vec![
            Promise::always("it stays within ten", |(height, _)| *height < 10),
            Promise::always("it stays below eight", |(height, _)| *height < 8),
            Promise::always_possible("the ground can be reached", |(height, _)| *height == 0),
            Promise::always_possible("the start can be reached", |state| *state == (5, false)),
        ]
    }
}

#[test]
fn every_state_is_visited_once_and_every_kind_counted() {
    let report = check_one(&Walk, 100, "it stays within ten");
    assert!(report.broken.is_none());
    assert_eq!(report.states, 20);
    assert_eq!((report.actions, report.depth), (36, 9));
    assert_eq!((report.kinds["Up"], report.kinds["Down"]), (18, 18));
    assert_eq!(report.missing::<Move>(), ["Sideways"]);
}

#[test]
fn the_first_broken_promise_is_shown_by_its_shortest_way() {
    let broken = check(&Walk, 100).broken.expect("a broken promise");
    assert_eq!(broken.promise, "it stays below eight");
    assert_eq!(broken.trace, ["Up", "Up", "Up"]);
    assert_eq!(broken.state, "(8, false)");
}

#[test]
fn what_cant_be_reached_any_more_is_found_where_states_go_round() {
    assert!(check_one(&Walk, 100, "the ground can be reached").broken.is_none());
    let broken = check_one(&Walk, 100, "the start can be reached").broken.expect("a pit");
    assert_eq!(broken.trace, ["Up", "Up"]);
}

#[test]
#[should_panic(expected = "more than 10 states")]
fn a_model_that_is_larger_than_it_should_be_is_refused() {
    check_one(&Walk, 10, "it stays within ten");
}
