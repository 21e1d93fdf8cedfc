//! Names of tools as models accept them: a letter, then letters, digits and `_`, at most 64.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

/// The longest name that every provider takes.
pub const MAX_NAME: usize = 64;

/// Makes `name` fit for a model: other characters become `_`, runs of `_` collapse, a leading
/// digit gets `t`, case stays; a name that is too long keeps its head and ends in 8 hex digits of
/// its hash.
pub fn normalize(name: &str) -> String {
    let mut fit = String::with_capacity(name.len());
    for c in name.chars() {
        let c = if c.is_ascii_alphanumeric() { c } else { '_' };
        if c != '_' || !fit.ends_with('_') {
            fit.push(c);
        }
    }
    if !fit.starts_with(|c: char| c.is_ascii_alphabetic()) {
        fit.insert(0, 't');
    }
    if fit.len() > MAX_NAME {
        let digest = Sha256::digest(name.as_bytes());
        let hash: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        fit.truncate(MAX_NAME - 9);
        fit.push('_');
        fit.push_str(&hash);
    }
    fit
}

/// Gives each of `names` a name of its own, in order: the second of two equal ones gets `_2`, the
/// third `_3`.
pub fn assign<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut taken = HashSet::new();
    let mut assigned = Vec::new();
    for name in names {
        let base = normalize(name);
        let mut candidate = base.clone();
        let mut n = 2;
        while !taken.insert(candidate.clone()) {
            let suffix = format!("_{n}");
            let head = base.len().min(MAX_NAME - suffix.len());
            candidate = format!("{}{suffix}", &base[..head]);
            n += 1;
        }
        assigned.push(candidate);
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_fit_for_models() {
        assert_eq!(normalize("pet.findByStatus"), "pet_findByStatus");
        assert_eq!(normalize("users//pets--get"), "users_pets_get");
        assert_eq!(normalize("2.0_getPet"), "t2_0_getPet");
        assert_eq!(normalize("_x"), "t_x");
        assert_eq!(normalize("é"), "t_");
        let long = "a".repeat(80);
        let fit = normalize(&long);
        assert_eq!(fit.len(), MAX_NAME);
        assert_ne!(fit, normalize(&"a".repeat(81)), "the hash tells long names apart");
    }

    #[test]
    fn equal_names_are_numbered_in_order() {
        assert_eq!(assign(["a-b", "a_b", "a.b", "c"]), ["a_b", "a_b_2", "a_b_3", "c"]);
        let long = "a".repeat(64);
        let two = assign([long.as_str(), long.as_str()]);
        assert_eq!(two[1].len(), MAX_NAME);
        assert!(two[1].ends_with("_2"));
    }
}
