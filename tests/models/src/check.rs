//! A breadth-first checker: it visits every state that a model can get into, once, and says by which
//! shortest way a promise is broken.
//!
//! States are kept whole and compared whole, so no two are ever taken for one. Beside what must hold in
//! every state it knows what must stay possible from every state, whatever happened before: that is how a
//! run that nobody can finish any more is found, also where the model goes round in circles for ever.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Debug, Display},
    hash::{BuildHasherDefault, Hash, Hasher},
    rc::Rc,
};

/// What kinds of actions there are.
pub trait Kind: Debug + Copy {
    /// Kinds that the protocol as it is must show.
    const REAL: &'static [&'static str];

    /// The kind of this one.
    fn kind(&self) -> &'static str;
}

/// A protocol as states and what may happen in them.
pub trait Model {
    /// Everything that matters at one moment.
    type State: Clone + Eq + Hash + Debug;
    /// Something that happens at once.
    type Action: Kind;

    /// Where it begins.
    fn start(&self) -> Self::State;

    /// What may happen next.
    fn actions(&self, state: &Self::State) -> Vec<Self::Action>;

    /// The state after an action that [`Model::actions`] named.
    fn after(&self, state: &Self::State, action: Self::Action) -> Self::State;

    /// What the protocol promises.
    fn promises(&self) -> Vec<Promise<Self::State>>;
}

/// Something that a protocol promises.
#[derive(Debug)]
pub struct Promise<S> {
    name: &'static str,
    form: Form,
    holds: fn(&S) -> bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Always,
    AlwaysPossible,
}

impl<S> Promise<S> {
    /// It holds in every state.
    pub fn always(name: &'static str, holds: fn(&S) -> bool) -> Self {
        Self { name, form: Form::Always, holds }
    }

    /// From every state one in which it holds can still be reached.
    pub fn always_possible(name: &'static str, holds: fn(&S) -> bool) -> Self {
        Self { name, form: Form::AlwaysPossible, holds }
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// What a search found.
#[derive(Debug)]
pub struct Report {
    /// How many states were visited.
    pub states: usize,
    /// How many actions were tried, also those that led to a known state.
    pub actions: usize,
    /// How many actions the farthest state is from the start.
    pub depth: usize,
    /// How often each kind of action was tried.
    pub kinds: BTreeMap<&'static str, usize>,
    /// The broken promise with the shortest way to it; the search ends with it.
    pub broken: Option<Counterexample>,
}

impl Report {
    /// Kinds that the protocol has and that never occurred.
    pub fn missing<A: Kind>(&self) -> Vec<&'static str> {
        A::REAL.iter().copied().filter(|kind| !self.kinds.contains_key(kind)).collect()
    }
}

/// How a promise is broken.
#[derive(Debug)]
pub struct Counterexample {
    /// Which promise.
    pub promise: &'static str,
    /// What happened, from the start on.
    pub trace: Vec<String>,
    /// The state after that.
    pub state: String,
}

impl Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "broken after {} actions: {}", self.trace.len(), self.promise)?;
        for (number, action) in self.trace.iter().enumerate() {
            writeln!(f, "{:>4}. {action}", number + 1)?;
        }
        write!(f, "   in: {}", self.state)
    }
}

/// Searches all states for a broken promise.
///
/// # Panics
/// If there are more than `limit` states: the model isn't as small as it was meant to be.
pub fn check<M: Model>(model: &M, limit: usize) -> Report {
    search(model, limit, &model.promises())
}

/// As [`check`], for the one promise of that name.
///
/// # Panics
/// As [`check`], and if there is no such promise.
pub fn check_one<M: Model>(model: &M, limit: usize, name: &str) -> Report {
    let promises: Vec<_> = model.promises().into_iter().filter(|promise| promise.name == name).collect();
    assert_eq!(promises.len(), 1, "the model has one promise of the name {name}");
    search(model, limit, &promises)
}

/// A visited state, and how it was first reached.
struct Visit<M: Model> {
    state: Rc<M::State>,
    depth: usize,
    by: Option<(usize, M::Action)>,
    /// States from which an action leads here.
    before: Vec<usize>,
}

/// A hash for states, which nobody chooses to make them collide.
#[derive(Default)]
struct Quick(u64);

impl Hasher for Quick {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, byte: u8) {
        self.0 = (self.0.rotate_left(5) ^ u64::from(byte)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u8(number.to_le_bytes()[0]);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u8(number.to_le_bytes()[0]);
    }
}

fn search<M: Model>(model: &M, limit: usize, promises: &[Promise<M::State>]) -> Report {
    let mut report = Report { states: 0, actions: 0, depth: 0, kinds: BTreeMap::new(), broken: None };
    let mut known: HashMap<Rc<M::State>, usize, BuildHasherDefault<Quick>> = HashMap::default();
    let start = Rc::new(model.start());
    known.insert(Rc::clone(&start), 0);
    let mut visits: Vec<Visit<M>> = vec![Visit { state: start, depth: 0, by: None, before: Vec::new() }];
    let mut next = 0;
    while next < visits.len() {
        let state = Rc::clone(&visits[next].state);
        let depth = visits[next].depth;
        (report.states, report.depth) = (visits.len(), depth);
        let always = promises.iter().filter(|promise| promise.form == Form::Always);
        if let Some(promise) = always.into_iter().find(|promise| !(promise.holds)(&state)) {
            report.broken = Some(counterexample(&visits, next, promise.name));
            return report;
        }
        for action in model.actions(&state) {
            report.actions += 1;
            *report.kinds.entry(action.kind()).or_default() += 1;
            let after = model.after(&state, action);
            let place = known.get(&after).copied().unwrap_or_else(|| {
                let after = Rc::new(after);
                known.insert(Rc::clone(&after), visits.len());
                visits.push(Visit {
                    state: after,
                    depth: depth + 1,
                    by: Some((next, action)),
                    before: Vec::new(),
                });
                visits.len() - 1
            });
            visits[place].before.push(next);
        }
        assert!(visits.len() <= limit, "more than {limit} states");
        next += 1;
    }
    for promise in promises.iter().filter(|promise| promise.form == Form::AlwaysPossible) {
        if let Some(stuck) = stuck(&visits, promise.holds) {
            report.broken = Some(counterexample(&visits, stuck, promise.name));
            return report;
        }
    }
    report
}

/// The first state from which none that holds can be reached.
fn stuck<M: Model>(visits: &[Visit<M>], holds: fn(&M::State) -> bool) -> Option<usize> {
    let mut reaches: Vec<bool> = visits.iter().map(|visit| holds(&visit.state)).collect();
    let mut waiting: Vec<usize> = (0..visits.len()).filter(|place| reaches[*place]).collect();
    while let Some(place) = waiting.pop() {
        for before in &visits[place].before {
            if !std::mem::replace(&mut reaches[*before], true) {
                waiting.push(*before);
            }
        }
    }
    reaches.iter().position(|reaches| !reaches)
}

fn counterexample<M: Model>(visits: &[Visit<M>], place: usize, promise: &'static str) -> Counterexample {
    let mut trace = Vec::new();
    let mut at = place;
    while let Some((before, action)) = &visits[at].by {
        trace.push(format!("{action:?}"));
        at = *before;
    }
    trace.reverse();
    Counterexample { promise, trace, state: format!("{:?}", visits[place].state) }
}
