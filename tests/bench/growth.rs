//! Does a step cost more when the history is longer? One session, one worker in this process, a model
//! that asks for one more call each time; bytes of WAL and time per step, early against late.
//!
//! Prints ratios and exits with 1 if a ratio is above 1.3.

use std::{io::Write as _, sync::PoisonError, time::Duration};

use anyhow::{Result, ensure};
use holdfast_store::sessions;

use crate::{flags, rig};

/// What a ratio may be.
const LIMIT: f64 = 1.3;

pub(crate) async fn measure(arguments: &[String]) -> Result<()> {
    let [turns] = flags::numbers(arguments, [("turns", 200)])?;
    let rig = rig::Rig::start().await?;
    let (store, agent) = rig.store(8).await?;
    let model = rig::Asking::new(turns / 2, Some(rig.connect().await?));
    let work = async {
        let id = rig::create(&store).await?;
        model.until_finished(1).await?;
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while sessions::get(&store, None, id).await?.active {
            tick.tick().await;
        }
        Ok(())
    };
    Box::pin(rig::with_worker(&rig.url, &store, agent, 1, model.clone(), work)).await?;

    let marks = model.marks.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let loops: Vec<(f64, f64)> = marks
        .windows(2)
        .map(|pair| ((pair[1].0 - pair[0].0).as_secs_f64() * 1000.0, (pair[1].1 - pair[0].1) as f64))
        .collect();
    // Two turns a loop: turn 10 is in the fifth. The first loops warm caches.
    let window = loops.len() / 5;
    let (early, late) = (&loops[5..5 + window], &loops[loops.len() - window..]);
    let (time, bytes) = (ratio(early, late, |mark| mark.0), ratio(early, late, |mark| mark.1));
    let mut out = std::io::stdout();
    writeln!(out, "loops {} (of two turns and two commits)", loops.len())?;
    writeln!(out, "ms per loop    early {:.3}  late {:.3}  ratio {:.2}", time.0, time.1, time.2)?;
    writeln!(out, "WAL per loop   early {:.0}  late {:.0}  ratio {:.2}", bytes.0, bytes.1, bytes.2)?;
    ensure!(time.2 <= LIMIT && bytes.2 <= LIMIT, "a ratio is above {LIMIT}");
    Ok(())
}

fn ratio(early: &[(f64, f64)], late: &[(f64, f64)], pick: fn(&(f64, f64)) -> f64) -> (f64, f64, f64) {
    let quartile = |marks: &[(f64, f64)]| {
        let mut values: Vec<f64> = marks.iter().map(pick).collect();
        values.sort_by(f64::total_cmp);
        // Others share these cores: the lower quartile is what the work itself takes.
        values[values.len() / 4]
    };
    let (early, late) = (quartile(early), quartile(late));
    (early, late, late / early)
}
