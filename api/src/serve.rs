//! Serving: listeners, signals, and an end within the grace.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::{
        fs::{DirBuilderExt, FileTypeExt, PermissionsExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
};

use holdfast_store::{Store, listen::Listener};
use tokio::{
    net::{TcpListener, UnixListener},
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    auth::TokensError,
    config::{Config, ConfigError},
    peer::{Peer, Tcp},
    routes,
    state::{Api, Shared},
};

/// Why a node doesn't serve, or no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The token file can't be used.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// An address or a socket can't be listened on.
    #[error("can't listen on {what}: {source}")]
    Bind {
        /// The address or path.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A listener failed.
    #[error("a listener failed: {0}")]
    Io(#[from] io::Error),
}

/// A node that has begun to listen.
#[derive(Debug, Clone)]
pub struct Bound {
    /// Where it serves over TCP.
    pub bind: SocketAddr,
    /// Where its metrics are served, if they have an address of their own.
    pub metrics: Option<SocketAddr>,
    /// The node, which can say what it counts.
    pub node: Shared,
}

/// Binds, serves until `shutdown`, then ends streams, answers waiting requests with the current state and
/// leaves within the grace. `on_bound` learns the addresses.
///
/// # Errors
/// [`ServeError`] if nothing can be served.
pub async fn serve(
    store: Store,
    listener: Listener,
    config: Config,
    shutdown: CancellationToken,
    on_bound: impl FnOnce(Bound),
) -> Result<(), ServeError> {
    config.check()?;
    let tcp = bind(config.bind).await?;
    let metrics = match config.metrics_bind {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let socket = config.socket.as_deref().map(Socket::bind).transpose()?;
    let grace = config.shutdown_grace;
    // Whatever ends this call also ends what waits on this node.
    let closing = shutdown.child_token();
    let _close = closing.clone().drop_guard();
    let api = Api::start(store, listener, config, closing.clone())?;
    let _hangups = match api.tokens {
        // Caught before anybody can send it: uncaught it would end the process.
        Some(_) => {
            let hangups = signal(SignalKind::hangup())?;
            Some(AbortOnDropHandle::new(tokio::spawn(reread(api.clone(), hangups))))
        }
        None => None,
    };
    let metrics_address = metrics.as_ref().map(TcpListener::local_addr).transpose()?;
    on_bound(Bound { bind: tcp.local_addr()?, metrics: metrics_address, node: api.clone() });

    let app = routes::router(api.clone());
    let serving = async {
        let on_tcp = axum::serve(Tcp(tcp), app.clone().into_make_service_with_connect_info::<Peer>())
            .with_graceful_shutdown(closing.clone().cancelled_owned());
        let on_socket = async {
            let Some(Socket { listener, remove: _remove }) = socket else { return Ok(()) };
            axum::serve(listener, app.into_make_service_with_connect_info::<Peer>())
                .with_graceful_shutdown(closing.clone().cancelled_owned())
                .await
        };
        let on_metrics = async {
            let Some(listener) = metrics else { return Ok(()) };
            axum::serve(listener, routes::metrics_router(api.clone()))
                .with_graceful_shutdown(closing.clone().cancelled_owned())
                .await
        };
        tokio::try_join!(on_tcp, on_socket, on_metrics)
    };
    let out_of_patience = async {
        shutdown.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        served = serving => { served?; }
        () = out_of_patience => {
            tracing::warn!(kind = "http.cut_off", "requests outlived the grace of the shutdown");
        }
    }
    Ok(())
}

async fn bind(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| ServeError::Bind { what: address.to_string(), source })
}

/// Reads the token file again at every SIGHUP; one that can't be used changes nothing.
async fn reread(api: Shared, mut hangups: Signal) {
    while hangups.recv().await.is_some() {
        let Some(tokens) = &api.tokens else { return };
        match tokens.reread() {
            Ok(count) => tracing::info!(kind = "server.tokens_reread", count),
            Err(error) => {
                tracing::error!(kind = "server.tokens_kept", %error, "the tokens stay as they were");
            }
        }
    }
}

/// A listening Unix socket that only this user may open; its file goes when serving ends.
#[derive(Debug)]
struct Socket {
    listener: UnixListener,
    remove: Remove,
}

#[derive(Debug)]
struct Remove(PathBuf);

impl Drop for Remove {
    fn drop(&mut self) {
        // Somebody may have tidied up already.
        let _ = fs::remove_file(&self.0);
    }
}

impl Socket {
    fn bind(path: &Path) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Bind { what: path.display().to_string(), source };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, "a file is in the way")));
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(failed(io::ErrorKind::AddrInUse.into()));
            }
            _ => {}
        }
        Self::bind_privately(path).map_err(failed)
    }

    /// Binds where nobody else can reach, closes the socket to others, and only then moves it to its place.
    fn bind_privately(path: &Path) -> io::Result<Self> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let private = parent.join(format!(".{:08x}", std::process::id()));
        match fs::remove_dir_all(&private) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::DirBuilder::new().mode(0o700).create(&private)?;
        let inside = private.join("s");
        let bound = UnixListener::bind(&inside).and_then(|listener| {
            fs::set_permissions(&inside, fs::Permissions::from_mode(0o600))?;
            fs::rename(&inside, path)?;
            Ok(Self { listener, remove: Remove(path.to_path_buf()) })
        });
        fs::remove_dir_all(&private)?;
        bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_private_and_replaces_a_stale_one_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("api.sock");
        let first = Socket::bind(&path).expect("a socket");
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(Socket::bind(&path).is_err(), "somebody listens there");
        let Socket { listener, remove } = first;
        drop(listener);
        let second = Socket::bind(&path).expect("the stale socket is replaced");
        std::mem::forget(remove);
        drop(second);
        assert!(!path.exists());
        fs::write(&path, "precious").expect("written");
        assert!(Socket::bind(&path).is_err(), "a file is in the way");
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 1, "nothing is left behind");
    }
}
