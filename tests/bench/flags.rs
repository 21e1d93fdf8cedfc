//! The flags of the bench programs: numbers, each as `--name=value`.

use anyhow::{Context as _, Result, bail};

/// The values of the `known` flags, in their order; those that aren't given have the defaults beside their
/// names.
pub(crate) fn numbers<const N: usize>(arguments: &[String], known: [(&str, usize); N]) -> Result<[usize; N]> {
    let mut values = known.map(|(_, default)| default);
    for argument in arguments {
        let given = argument.strip_prefix("--").and_then(|flag| flag.split_once('='));
        let place = given.and_then(|(name, _)| known.iter().position(|(known, _)| *known == name));
        let (Some((_, value)), Some(place)) = (given, place) else {
            let defaults = known.map(|(name, default)| format!("--{name}={default}")).join(" ");
            bail!("{argument}: the flags and their defaults are {defaults}");
        };
        values[place] = value.replace('_', "").parse().with_context(|| argument.clone())?;
    }
    Ok(values)
}
