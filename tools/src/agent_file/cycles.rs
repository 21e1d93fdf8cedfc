//! Circles among agents that call agents: allowed, since calls go only so deep, and told.

/// How many circles are named; more are counted.
const NAMED: usize = 32;

/// Warnings of each agent about the circles that were entered at it. `helpers` are the agents that each
/// calls. Each call that leads back to a caller closes one circle; the first [`NAMED`] are named.
pub(super) fn warnings<'a>(helpers: &[&[usize]], slug: impl Fn(usize) -> &'a str) -> Vec<Vec<String>> {
    let mut warnings = vec![Vec::new(); helpers.len()];
    let (mut named, mut more) = (0, 0);
    each_circle(helpers, |path| {
        if named == NAMED {
            more += 1;
            return;
        }
        named += 1;
        let names: Vec<&str> = path.iter().chain(path.first()).map(|agent| slug(*agent)).collect();
        let names = names.join(" → ");
        warnings[path[0]].push(format!("calls can go in a circle, until maxRecursionDepth: {names}"));
    });
    if more > 0 {
        warnings[0].push(format!("calls can go in {more} more circles"));
    }
    warnings
}

/// Goes down all calls, into each agent once, and tells of each that leads back: the agents from the one
/// that it leads back to, to the one that makes it.
fn each_circle(helpers: &[&[usize]], mut tell: impl FnMut(&[usize])) {
    let mut seen = vec![false; helpers.len()];
    for start in 0..helpers.len() {
        if seen[start] {
            continue;
        }
        seen[start] = true;
        // The agents on the way down, and which of its helpers is next for each.
        let (mut path, mut next) = (vec![start], vec![0]);
        while let (Some(agent), Some(index)) = (path.last(), next.last_mut()) {
            let Some(helper) = helpers[*agent].get(*index) else {
                path.pop();
                next.pop();
                continue;
            };
            *index += 1;
            if let Some(from) = path.iter().position(|above| above == helper) {
                tell(&path[from..]);
            } else if !seen[*helper] {
                seen[*helper] = true;
                path.push(*helper);
                next.push(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(helpers: &[&[usize]]) -> Vec<String> {
        let slugs: Vec<String> = (0..helpers.len()).map(|agent| agent.to_string()).collect();
        let prefix = "calls can go in a circle, until maxRecursionDepth: ";
        let warnings = warnings(helpers, |agent| &slugs[agent]).into_iter().flatten();
        warnings.map(|warning| warning.trim_start_matches(prefix).to_owned()).collect()
    }

    #[test]
    fn each_circle_is_named_once_where_it_was_entered() {
        assert_eq!(told(&[&[1, 2], &[2], &[]]), Vec::<String>::new(), "two ways to one agent are no circle");
        assert_eq!(told(&[&[0]]), ["0 → 0"]);
        assert_eq!(told(&[&[1], &[0]]), ["0 → 1 → 0"]);
        assert_eq!(told(&[&[1], &[2, 1], &[1, 0]]), ["0 → 1 → 2 → 0", "1 → 2 → 1", "1 → 1"]);
        assert_eq!(told(&[&[], &[2], &[1]]), ["1 → 2 → 1"], "also where the first agent doesn't lead");
    }

    #[test]
    fn so_many_are_named_and_the_others_counted() {
        // Everybody calls everybody: 10 call themselves, and 45 pairs call each other.
        let everybody: Vec<usize> = (0..10).collect();
        let told = told(&[everybody.as_slice(); 10]);
        assert_eq!(told.len(), NAMED + 1);
        let more = format!("calls can go in {} more circles", 10 + 45 - NAMED);
        assert!(told.contains(&more), "{told:?}");
    }
}
