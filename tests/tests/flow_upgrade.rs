//! The previous release and this one side by side on one database, through a migration, under load.

use std::{path::Path, sync::Arc};

use anyhow::{Result, ensure};
use holdfast_tests::{
    cluster::{Database, empty_database},
    load::{self, Balancer, Load},
    world::{Node, Signal, World, binary, previous_binary},
};

/// Seconds of a lease: no run may wait for one.
const LEASE_TTL: u64 = 60;

const ROLES: [&str; 5] = ["api", "worker", "worker", "scheduler", "api"];

/// A deployment of one release.
struct Release {
    nodes: Vec<(Node, String)>,
}

impl Release {
    async fn start(world: &World, binary: &Path) -> Result<Self> {
        let mut nodes = Vec::new();
        for role in ROLES {
            nodes.push(world.node_from(binary, &world.url, role, &["--no-migrate"], &[]).await?);
        }
        Ok(Self { nodes })
    }

    fn apis(&self) -> Vec<String> {
        let of_role = ROLES.iter().zip(&self.nodes).filter(|(role, _)| **role == "api");
        of_role.map(|(_, node)| node.1.clone()).collect()
    }

    /// Tells every node to leave; each has to end in order. Returns what they said.
    async fn leave(self) -> Result<Vec<String>> {
        let mut logs = Vec::new();
        for (mut node, _) in self.nodes {
            node.signal(Signal::TERM)?;
            let status = node.ended().await?;
            ensure!(status.success(), "a node ended with {status}: {}", node.log_text());
            logs.push(node.log_text());
        }
        Ok(logs)
    }
}

async fn migrations(database: &Database) -> Result<i64> {
    let sql = "SELECT count(*) FROM _sqlx_migrations WHERE success";
    Ok(database.connect().await.query_one(sql, &[]).await?.try_get(0)?)
}

async fn migrate(binary: &Path, database: &Database) -> Result<()> {
    let mut command = tokio::process::Command::new(binary);
    let output = command.args(["migrate", "--database-url", database.url()]).output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_previous_release_and_this_one_share_a_database_through_a_migration() -> Result<()> {
    let (old, new) = (previous_binary()?, binary()?);
    let database = empty_database().await;
    let mut world = World::canonical(database.url(), false).await?;
    world.lease_ttl = LEASE_TTL;
    let world = Arc::new(world);

    migrate(&old, &database).await?;
    let before = migrations(&database).await?;
    let old_release = Release::start(&world, &old).await?;
    let balancer = Balancer::over(old_release.apis());
    let load = Load::start(&world, &balancer, 6);
    // These are asked by the old release and answered by the new one.
    let mut across = Vec::new();
    for number in 0..4 {
        across.push(load::ask(&world, &balancer, number).await?);
    }

    migrate(&new, &database).await?;
    ensure!(migrations(&database).await? > before, "there is nothing to migrate: name an older release");
    // A node of the old release that is started again finds a schema newer than it.
    let (again, _) = world.node_from(&old, &world.url, "worker", &["--no-migrate"], &[]).await?;
    load::ask(&world, &balancer, 0).await.map(|id| across.push(id))?;

    let new_release = Release::start(&world, &new).await?;
    for address in new_release.apis() {
        balancer.add(&address);
    }
    // Side by side: whatever one release writes the other one reads.
    for number in 0..8 {
        across.push(load::ask(&world, &balancer, number).await?);
    }
    for (number, id) in across.iter().take(6).enumerate() {
        load::finish(&world, &balancer, *id, number).await?;
    }

    for (old, new) in old_release.apis().iter().zip(new_release.apis()) {
        balancer.swap(old, &new);
    }
    let mut old_logs = old_release.leave().await?;
    old_logs.extend(Release { nodes: vec![(again, String::new())] }.leave().await?);
    for (number, id) in across.iter().skip(6).enumerate() {
        load::finish(&world, &balancer, *id, number).await?;
    }
    let mut sessions = load.end().await?;
    sessions.extend(across);
    load::check_logs(&new_release.leave().await?, &[])?;
    // That release takes a run that has ended for lost when the next one of its session comes to the same worker
    // first; it says so, and nothing else comes of it.
    load::check_logs(&old_logs, &[load::LEASE_LOST])?;
    load::check_effects(&world, &sessions)
}
