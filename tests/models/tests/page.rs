//! docs/models.md names every mistake with the promise that it breaks and the test that shows it.

use std::{fs, path::Path};

fn text(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join(path)).expect("the file");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_page_names_every_mistake_with_its_promise_and_its_test() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md"));
    let page = page.expect("the page");
    let tests = ["tests/lease.rs", "tests/mail.rs", "tests/token.rs"].map(text).join(" ");
    let mut rows = 0;
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [variant, promise, test] = cells[..] else { panic!("three columns: {line}") };
        let (variant, test) = (variant.trim_matches('`'), test.trim_matches('`'));
        let shown = format!("fn {test}() {{ breaks(Variant::{variant}, \"{promise}\"); }}");
        assert!(tests.contains(&shown), "no test reads: {shown}");
        rows += 1;
    }
    assert_eq!(rows, tests.matches(" breaks(Variant::").count(), "every test has its row");
    let counts: Vec<&str> = tests.split("(Variant::Correct), LIMIT, ").skip(1).collect();
    assert_eq!(counts.len(), 3);
    for count in counts.iter().filter_map(|rest| rest.split(')').next()) {
        assert!(page.contains(&format!("{} states", count.replace('_', ","))), "{count} is not on the page");
    }
    for model in ["lease", "mail", "token"] {
        let source = text(&format!("src/{model}.rs"));
        let variants = source.split("pub enum Variant {").nth(1).and_then(|rest| rest.split('}').next());
        let variants = variants.expect("the model's variants").split("///").skip(1);
        for variant in variants.map(|one| one.trim().trim_end_matches(',')) {
            let name = variant.rsplit(' ').next().unwrap_or_default();
            assert!(name == "Correct" || page.contains(&format!("| `{name}` |")), "{name} has no row");
        }
    }
}
