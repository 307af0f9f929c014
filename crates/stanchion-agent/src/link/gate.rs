//! The one TCP listener of an agent: lets in who has the job's secret, drops everybody else.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stanchion_format::ids::PeerId;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, warn};

use super::handshake::{Credentials, LinkError, Role};
use super::stream::{DataStream, respond, tune};
use super::{Links, Tuning};

/// Different refusals that are told; beyond, only those who asked for details are.
const REFUSALS_TOLD_MAX: usize = 256;
/// Pause when the system gives no new connection (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why there is no listener.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The address cannot be listened on.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, io::Error),
}

/// An authenticated data connection.
pub struct DataConn {
    pub(crate) peer: PeerId,
    pub(crate) stream: DataStream,
}

/// What lets peers in.
pub struct Gate {
    listener: TcpListener,
    address: SocketAddr,
}

impl Gate {
    /// Listens on a port of the system's choice.
    pub async fn listen(ip: IpAddr) -> Result<Gate, GateError> {
        let wanted = SocketAddr::new(ip, 0);
        let failed = |e| GateError::Listen(wanted, e);
        let listener = TcpListener::bind(wanted).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Gate { listener, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts until dropped. Control links go to `links`, data connections to `data`.
    pub async fn run(
        self,
        who: Arc<Credentials>,
        tuning: Tuning,
        links: Links,
        data: impl Fn(DataConn) + Send + Sync + 'static,
    ) {
        let inside = Arc::new(Inside { who, tuning, links, data, told: Mutex::default() });
        let mut shakes = JoinSet::new();
        let mut order: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let accepted = tokio::select! {
                a = self.listener.accept() => a,
                Some(_) = shakes.join_next() => continue,
            };
            let (stream, from) = match accepted {
                Ok(a) => a,
                Err(e) => {
                    inside.refused(None, &LinkError::Io(e));
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            order.retain(|h| !h.is_finished());
            // Half-open connections cost their owner the place, not those who come after.
            if order.len() >= inside.tuning.handshakes_max
                && let Some(oldest) = order.pop_front()
            {
                oldest.abort();
            }
            order.push_back(shakes.spawn(inside.clone().admit(stream, from)));
        }
    }
}

struct Inside<F> {
    who: Arc<Credentials>,
    tuning: Tuning,
    links: Links,
    data: F,
    told: Mutex<HashSet<(Option<IpAddr>, std::mem::Discriminant<LinkError>)>>,
}

impl<F: Fn(DataConn)> Inside<F> {
    async fn admit(self: Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let shake = self.shake(stream);
        let result = tokio::time::timeout(self.tuning.handshake, shake).await;
        match result.unwrap_or(Err(LinkError::Timeout)) {
            Ok(()) => debug!(%from, "let in"),
            Err(error) => self.refused(Some(from.ip()), &error),
        }
    }

    async fn shake(&self, mut stream: TcpStream) -> Result<(), LinkError> {
        tune(&stream, self.tuning.silence)?;
        let (role, session) = respond(&mut stream, &self.who).await?;
        match role {
            Role::Control => self.links.adopt(stream, session),
            Role::Data => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                let peer = session.peer;
                let stream = DataStream::new(stream, session, self.who.encrypt);
                (self.data)(DataConn { peer, stream });
            }
        }
        Ok(())
    }

    /// Says once for each address and reason who was not let in.
    fn refused(&self, from: Option<IpAddr>, error: &LinkError) {
        let mut told = self.told.lock().expect("no thread panics while it holds this");
        let what = (from, std::mem::discriminant(error));
        let tell = told.len() < REFUSALS_TOLD_MAX && told.insert(what);
        drop(told);
        let from = from.map(|ip| ip.to_string()).unwrap_or_default();
        if tell {
            warn!(from, %error, "a connection is refused; further ones like it are not told");
        } else {
            debug!(from, %error, "a connection is refused");
        }
    }
}
