//! What the binary is made of: every dependency comes from crates.io, under a licence that a product may
//! ship.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Licences that ask for nothing but their notice.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Whether an SPDX expression can be fulfilled with allowed licences alone. `/` is an old way to write OR.
fn allowed(expression: &str) -> bool {
    let plain = expression.replace('/', " OR ").replace(" WITH LLVM-exception", "").replace(['(', ')'], " ");
    // Every part that AND joins needs one alternative; parentheses never nest in what crates declare.
    plain.split(" AND ").all(|part| part.split(" OR ").any(|licence| ALLOWED.contains(&licence.trim())))
}

#[test]
fn every_dependency_is_from_the_registry_and_may_be_shipped() -> Result<()> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--offline",
            "--locked",
            "--filter-platform",
            "x86_64-unknown-linux-gnu",
        ])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("packages")?;
    ensure!(packages.len() > 100, "only {} packages", packages.len());
    let mut faults = Vec::new();
    for package in packages {
        let (name, licence) = (&package["name"], package["license"].as_str().unwrap_or("none"));
        if !allowed(licence) {
            faults.push(format!("{name}: licence {licence}"));
        }
        let source = package["source"].as_str();
        if source.is_some_and(|source| {
            !source.starts_with("registry+https://github.com/rust-lang/crates.io-index")
        }) {
            faults.push(format!("{name}: not from crates.io"));
        }
    }
    ensure!(faults.is_empty(), "{faults:#?}");
    Ok(())
}

#[test]
fn expressions_are_read_as_they_are_meant() {
    assert!(allowed("MIT OR GPL-3.0"));
    assert!(allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
    assert!(allowed("Apache-2.0/MIT"));
    assert!(!allowed("GPL-3.0"));
    assert!(!allowed("MIT AND GPL-3.0"));
    assert!(!allowed("none"));
}
