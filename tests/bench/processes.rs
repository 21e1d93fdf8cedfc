//! CPU time of processes and of all below them, from /proc.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context as _, Result};

/// What /proc says of a process.
struct Stat {
    parent: u32,
    ticks: u64,
}

/// CPU time that `pid`, its descendants and the children it has waited for have used.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let mut stats = HashMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // A process may be gone by now.
        if let Some(stat) = read(pid) {
            stats.insert(pid, stat);
        }
    }
    let belongs = |mut one: u32| loop {
        if one == pid {
            break true;
        }
        match stats.get(&one) {
            Some(stat) if stat.parent != 0 => one = stat.parent,
            _ => break false,
        }
    };
    let ticks: u64 = stats.iter().filter(|(one, _)| belongs(**one)).map(|(_, stat)| stat.ticks).sum();
    let second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64(ticks as f64 / second as f64))
}

fn read(pid: u32) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let fields: Vec<&str> = text.get(text.rfind(')')? + 2..)?.split(' ').collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    // After the name: state, parent, …; 11 to 14 are user and system time, own and of waited-for children.
    let ticks = (11..=14).filter_map(number).sum();
    Some(Stat { parent: u32::try_from(number(1)?).ok()?, ticks })
}

/// Peak and current resident memory of a process, in bytes.
pub(crate) fn resident(pid: u32) -> Result<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = |name: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).context("no memory in /proc")?;
        Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? * 1024)
    };
    Ok((value("VmHWM:")?, value("VmRSS:")?))
}

/// A process's parent.
pub(crate) fn parent(pid: u32) -> Result<u32> {
    Ok(read(pid).context("the process is gone")?.parent)
}
