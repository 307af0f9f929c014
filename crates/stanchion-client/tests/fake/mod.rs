//! An agent of which a test chooses every reply. Also used by the tests of `stanchion-scr`.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use stanchion::{Code, Environment, FLAG_CHECKPOINT, Options};
use stanchion_format::client::{Answer, Ask, KIND_ANSWER, KIND_REQUEST, Own, Request, RestartInfo};
use stanchion_format::frame;
use stanchion_format::ids::{DatasetNo, Incarnation, Key, SlotId};
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use stanchion_format::manifest::FileDecl;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Something done with a connection.
pub type Act = Box<dyn FnOnce(&UnixStream) -> std::io::Result<()>>;

/// What the agent does about a request.
pub enum Reply {
    /// Answers.
    Answer(Answer),
    /// Sends these bytes, whatever they are.
    Raw(Vec<u8>),
    /// Whatever this does with the connection.
    Do(Act),
    /// Sends these bytes and closes.
    RawThenClose(Vec<u8>),
    /// Sends one byte at a time, with a pause after each.
    Drip(Vec<u8>, Duration),
    /// Says nothing, until the other side closes.
    Silence,
    /// Closes.
    Close,
}

pub fn failed(code: Code, text: &str) -> Answer {
    Answer::Failed { code, text: text.into() }
}

pub fn sealed(answer: &Answer) -> Vec<u8> {
    frame::encode(KIND_ANSWER, answer, CLIENT_FRAME_BYTES_MAX).unwrap()
}

/// A complete dataset.
#[derive(Clone, Debug)]
pub struct Dataset {
    pub key: Key,
    pub name: String,
    pub flags: u32,
    pub files: Vec<FileDecl>,
}

/// A well-behaved agent of a job with one rank.
pub struct Model {
    pub root: PathBuf,
    pub settings: Vec<(String, String)>,
    pub answer_timeout_ms: u64,
    /// Takes what is full.
    pub stores: bool,
    pub complete: Vec<Dataset>,
    pub warnings: Vec<String>,
    open: Option<Dataset>,
    number: u64,
}

impl Model {
    pub fn new(root: &Path) -> Model {
        std::fs::create_dir_all(root.join("prefix")).unwrap();
        Model {
            root: root.to_owned(),
            settings: Vec::new(),
            answer_timeout_ms: 20_000,
            stores: false,
            complete: Vec::new(),
            warnings: Vec::new(),
            open: None,
            number: 0,
        }
    }

    pub fn prefix(&self) -> String {
        self.root.join("prefix").to_str().unwrap().to_owned()
    }

    pub fn dir(&self, key: Key) -> String {
        self.root.join(format!("cache/{}/r0", key.no)).to_str().unwrap().to_owned()
    }

    pub fn answer(&mut self, request: &Request) -> Answer {
        match request {
            Request::Hello { settings, .. } => {
                for (name, value) in settings {
                    self.settings.retain(|(n, _)| n != name);
                    self.settings.push((name.clone(), value.clone()));
                }
                Answer::Welcome {
                    slot: SlotId(0),
                    prefix: self.prefix(),
                    settings: self.settings.clone(),
                    stores: self.stores,
                    answer_timeout_ms: self.answer_timeout_ms,
                }
            }
            Request::Collective { ask, own } => self.collective(ask, own),
            Request::Wait { no, .. } if self.complete.iter().any(|d| d.key.no == *no) => Answer::Ok,
            Request::Wait { no, .. } => failed(Code::NotFound, &format!("no dataset {no}")),
            Request::Warn { text } => {
                self.warnings.push(text.clone());
                Answer::Ok
            }
            // An agent whose pool is too small for anything: regions become files.
            Request::Reserve { .. } | Request::Lend { .. } => Answer::Lent(Vec::new()),
            Request::Attach { .. } | Request::Copied => Answer::Ok,
            Request::OpenMemory { .. } => Answer::Memory(Vec::new()),
            Request::GetSetting { name } => Answer::Setting(
                self.settings.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()),
            ),
        }
    }

    fn restart(&self) -> Answer {
        let newest = self.complete.iter().rfind(|d| d.flags & FLAG_CHECKPOINT != 0);
        Answer::Restart(newest.map(|d| RestartInfo {
            key: d.key,
            name: d.name.clone(),
            flags: d.flags,
            dir: self.dir(d.key),
            files: d.files.clone(),
        }))
    }

    fn named(&mut self, name: &str, gone: bool) -> Answer {
        let Some(at) = self.complete.iter().position(|d| d.name == name) else {
            return failed(Code::NotFound, &format!("there is no dataset '{name}'"));
        };
        if gone {
            self.complete.remove(at);
        } else {
            self.complete.truncate(at + 1);
        }
        Answer::Ok
    }

    fn collective(&mut self, ask: &Ask, own: &Own) -> Answer {
        for (name, value) in &own.settings {
            self.settings.retain(|(n, _)| n != name);
            self.settings.push((name.clone(), value.clone()));
        }
        match ask {
            Ask::NeedCheckpoint => Answer::Flag(true),
            Ask::ShouldExit => Answer::Flag(false),
            Ask::Barrier | Ask::Finalize => Answer::Ok,
            Ask::Begin { name, flags } => {
                self.number += 1;
                let key = Key { no: DatasetNo(self.number), inc: Incarnation::default() };
                let name = match name.as_str() {
                    "" => format!("dataset.{}", self.number),
                    name => name.to_owned(),
                };
                let dir = self.dir(key);
                std::fs::create_dir_all(&dir).unwrap();
                self.open =
                    Some(Dataset { key, name: name.clone(), flags: *flags, files: Vec::new() });
                Answer::Began { key, name, dir }
            }
            Ask::Complete | Ask::Snapshot => {
                let Some(mut dataset) = self.open.take() else {
                    return failed(Code::State, "nothing was begun");
                };
                dataset.files = own.files.clone();
                if !own.valid {
                    return failed(Code::Dropped, "the dataset was dropped: rank 0 said invalid");
                }
                self.complete.push(dataset);
                Answer::Ok
            }
            Ask::HaveRestart | Ask::StartRestart => self.restart(),
            Ask::CompleteRestart if own.valid => Answer::Ok,
            Ask::CompleteRestart => {
                let newest = self.complete.iter().rposition(|d| d.flags & FLAG_CHECKPOINT != 0);
                self.complete.remove(newest.unwrap());
                failed(Code::Rejected, "rank 0 rejected the dataset")
            }
            Ask::Current { name } => self.named(name, false),
            Ask::Drop { name } | Ask::Delete { name } => self.named(name, true),
        }
    }
}

/// The agent's thread and socket.
pub struct Fake {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<(Model, Vec<Request>)>>,
}

impl Fake {
    /// A well-behaved agent.
    pub fn model() -> Fake {
        Fake::with(|_| {}, |_, _| None)
    }

    /// `prepare`s the model; `script` may reply in its place, given how many requests came before.
    pub fn with(
        prepare: impl FnOnce(&mut Model),
        script: impl FnMut(usize, &Request) -> Option<Reply> + Send + 'static,
    ) -> Fake {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("agent")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let mut model = Model::new(dir.path());
        prepare(&mut model);
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mind = Arc::new(Mutex::new(Mind { model, script, requests: Vec::new() }));
            let mut served = Vec::new();
            loop {
                let (stream, _) = listener.accept().unwrap();
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let mind = mind.clone();
                served.push(std::thread::spawn(move || serve(stream, &mind)));
            }
            served.into_iter().for_each(|s| s.join().unwrap());
            let mind = Arc::into_inner(mind).expect("all connections have ended");
            let mind = mind.into_inner().unwrap();
            (mind.model, mind.requests)
        });
        Fake { dir, stop, thread: Some(thread) }
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("agent")
    }

    pub fn options(&self, environment: &[(&str, &str)]) -> Options {
        Options {
            nodes: Some(vec![self.socket()]),
            environment: Environment::of_pairs(environment.iter().copied()),
            ..Options::default()
        }
    }

    /// Ends it: what it knows, and what it was asked. All clients are gone by now.
    pub fn end(mut self) -> (Model, Vec<Request>) {
        let thread = self.thread.take().unwrap();
        self.wake();
        thread.join().unwrap()
    }

    fn wake(&self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(UnixStream::connect(self.socket()));
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // Not joined: a test that fails may still hold its client.
        self.wake();
    }
}

/// What all connections share.
struct Mind<S> {
    model: Model,
    script: S,
    requests: Vec<Request>,
}

impl<S: FnMut(usize, &Request) -> Option<Reply>> Mind<S> {
    fn reply(&mut self, request: Request) -> Reply {
        let reply = (self.script)(self.requests.len(), &request);
        let reply = reply.unwrap_or_else(|| Reply::Answer(self.model.answer(&request)));
        self.requests.push(request);
        reply
    }
}

fn serve<S: FnMut(usize, &Request) -> Option<Reply>>(
    mut stream: UnixStream,
    mind: &Mutex<Mind<S>>,
) {
    loop {
        let Ok((kind, body)) = frame::read_raw(&mut stream, CLIENT_FRAME_BYTES_MAX) else { return };
        assert_eq!(kind, KIND_REQUEST);
        let request: Request = frame::decode(&body).expect("requests are well-formed");
        let reply = mind.lock().unwrap().reply(request);
        let sent = match reply {
            Reply::Answer(answer) => stream.write_all(&sealed(&answer)),
            Reply::Raw(bytes) => stream.write_all(&bytes),
            Reply::Do(it) => it(&stream),
            Reply::RawThenClose(bytes) => {
                let _ = stream.write_all(&bytes);
                return;
            }
            Reply::Drip(bytes, pause) => bytes.iter().try_for_each(|byte| {
                // As long as nobody hangs up; who waits for an answer says nothing.
                stream.set_read_timeout(Some(pause))?;
                match stream.read(&mut [0]) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => stream.write_all(&[*byte]),
                    Ok(0) => Err(ErrorKind::BrokenPipe.into()),
                    other => panic!("in the middle of an answer: {other:?}"),
                }
            }),
            Reply::Silence => stream.read_to_end(&mut Vec::new()).map(|_| ()),
            Reply::Close => return,
        };
        if sent.is_err() {
            return;
        }
    }
}
