//! An agent that dies, is silent, or talks nonsense: codes, in time, and never a wrong answer (FM-V1, FM-F11).

mod fake;

use fake::{Fake, Reply, failed, sealed};
use stanchion::{Client, Code, Error, FLAG_CHECKPOINT, Level};
use stanchion_format::client::{Answer, KIND_ANSWER, KIND_REQUEST, Request, RestartInfo};
use stanchion_format::frame;
use stanchion_format::ids::{DatasetNo, Key, RankId};
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use stanchion_format::manifest::FileDecl;
use std::time::Duration;

/// A client whose first question after joining gets `reply`.
fn against(reply: impl Fn() -> Reply + Send + 'static) -> (Fake, Client) {
    against_within(60_000, reply)
}

/// The same, with a deadline of its own for answers.
fn against_within(ms: u64, reply: impl Fn() -> Reply + Send + 'static) -> (Fake, Client) {
    let script = move |n: usize, _: &Request| (n == 1).then(&reply);
    let fake = Fake::with(move |m| m.answer_timeout_ms = ms, script);
    let client = Client::connect(&fake.options(&[])).unwrap();
    (fake, client)
}

/// The error of the first question, and then the client must be dead.
fn fate(reply: impl Fn() -> Reply + Send + 'static) -> Error {
    fate_within(60_000, reply)
}

fn fate_within(ms: u64, reply: impl Fn() -> Reply + Send + 'static) -> Error {
    let (_fake, mut client) = against_within(ms, reply);
    let error = client.have_restart().unwrap_err();
    assert!(!client.alive());
    assert!(matches!(client.have_restart(), Err(Error::Dead { .. })));
    assert_eq!(client.warn("x").unwrap_err().code(), Code::Agent);
    error
}

#[test]
fn the_end_of_the_agent_is_its_own_code() {
    assert_eq!(fate(|| Reply::Close).code(), Code::Agent);
    let whole = sealed(&Answer::Restart(None));
    for part in [1, 8, whole.len() - 1] {
        let bytes = whole[..part].to_vec();
        assert_eq!(fate(move || Reply::RawThenClose(bytes.clone())).code(), Code::Agent);
    }
}

#[test]
fn last_words_of_a_closing_agent_are_heard() {
    let bytes = sealed(&failed(Code::Closing, "the job winds down"));
    let (_fake, mut client) = against(move || Reply::RawThenClose(bytes.clone()));
    assert_eq!(client.have_restart().unwrap_err().code(), Code::Closing);
    assert_eq!(client.have_restart().unwrap_err().code(), Code::Agent);
}

#[test]
fn silence_ends_at_the_deadline() {
    let error = fate_within(50, || Reply::Silence);
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.to_string().contains("have_restart"), "{error}");
}

#[test]
fn a_trickle_does_not_extend_the_deadline() {
    // Each byte comes well within the deadline, all of them do not.
    let bytes = sealed(&Answer::Restart(None));
    let pause = Duration::from_secs(6) / bytes.len() as u32;
    let error = fate_within(100, move || Reply::Drip(bytes.clone(), pause));
    assert_eq!(error.code(), Code::Timeout);
}

#[test]
fn an_agent_that_is_late_is_not_given_up() {
    // FM-V1: it had a tenth of a second beyond its deadline, and a node that is busy for so long lost the job.
    let bytes = sealed(&Answer::Restart(None));
    let pause = Duration::from_secs(1) / bytes.len() as u32;
    let (_fake, mut client) = against_within(50, move || Reply::Drip(bytes.clone(), pause));
    assert!(client.have_restart().unwrap().is_none());
    assert!(client.alive());
}

#[test]
fn silence_at_the_door_ends_too() {
    let fake = Fake::with(|_| {}, |_, _| Some(Reply::Silence));
    let options = fake.options(&[("STANCHION_INIT_TIMEOUT_MS", "50")]);
    assert_eq!(Client::connect(&options).unwrap_err().code(), Code::Timeout);
}

#[test]
fn nobody_accepts() {
    // A listener that never accepts: the connection stands, and the deadline still counts.
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("agent");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let fake = Fake::model();
    let mut options = fake.options(&[("STANCHION_INIT_TIMEOUT_MS", "50")]);
    options.nodes = Some(vec![path]);
    assert_eq!(Client::connect(&options).unwrap_err().code(), Code::Timeout);
}

#[test]
fn wait_has_its_own_deadline_and_the_agents_timeout_is_no_death() {
    let (_fake, mut client) = against(|| Reply::Answer(failed(Code::Timeout, "not yet protected")));
    let wait = |c: &mut Client| c.wait(DatasetNo(1), Level::Protected, 50).unwrap_err();
    assert_eq!(wait(&mut client).code(), Code::Timeout);
    assert!(client.alive(), "the agent answered");
    let (_fake, mut client) = against(|| Reply::Silence);
    assert_eq!(wait(&mut client).code(), Code::Timeout);
    assert!(!client.alive());
}

#[test]
fn damage_is_a_protocol_error() {
    let good = sealed(&Answer::Restart(None));
    let flip = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 0x40;
        bytes
    };
    let body = good.len() - 1;
    for bytes in [flip(0), flip(4), flip(6), flip(8), flip(20), flip(28), flip(body)] {
        assert_eq!(fate(move || Reply::Raw(bytes.clone())).code(), Code::Protocol);
    }
    assert_eq!(fate(|| Reply::Raw(vec![b'x'; 4096])).code(), Code::Protocol);
    let trailing = frame::seal(KIND_ANSWER, &[4, 0, 9]);
    assert_eq!(fate(move || Reply::Raw(trailing.clone())).code(), Code::Protocol);
    let kind = frame::seal(KIND_REQUEST, &[4, 0]);
    assert_eq!(fate(move || Reply::Raw(kind.clone())).code(), Code::Protocol);
}

#[test]
fn an_announced_giant_is_refused_before_it_comes() {
    // FM-C3: only the header is sent; waiting for the body would end in a timeout.
    let giant = frame::seal(KIND_ANSWER, &vec![0; CLIENT_FRAME_BYTES_MAX as usize + 1]);
    let header = giant[..frame::HEADER_BYTES].to_vec();
    let error = fate(move || Reply::Raw(header.clone()));
    assert_eq!(error.code(), Code::Protocol);
    assert!(error.to_string().contains("limit"), "{error}");
}

fn info(dir: &str, name: &str, rank: u32, path: &str) -> Answer {
    let files = vec![FileDecl { rank: RankId(rank), path: path.into(), bytes: 1 }];
    let (dir, name) = (dir.into(), name.into());
    Answer::Restart(Some(RestartInfo { key: Key::default(), name, flags: 1, dir, files }))
}

fn began(dir: &str, name: &str) -> Answer {
    Answer::Began { key: Key::default(), name: name.into(), dir: dir.into() }
}

#[test]
fn answers_to_other_questions_are_refused() {
    type Call = fn(&mut Client) -> Result<(), Error>;
    type Wrong = &'static [fn() -> Answer];
    let calls: &[(Call, Wrong)] = &[
        (
            |c| c.have_restart().map(|_| ()),
            &[
                || Answer::Ok,
                || Answer::Flag(true),
                || info("relative", "d", 0, "f"),
                || info("/dir\0", "d", 0, "f"),
                || info("/dir", "../d", 0, "f"),
                || info("/dir", "d", 0, "../f"),
                || info("/dir", "d", 1, "f"),
            ],
        ),
        (|c| c.need_checkpoint().map(|_| ()), &[|| Answer::Ok, || Answer::Restart(None)]),
        (
            |c| c.begin("d", FLAG_CHECKPOINT).map(|_| ()),
            &[|| Answer::Ok, || began("relative", "d"), || began("/dir", "a\nb")],
        ),
        (Client::barrier, &[|| Answer::Flag(true)]),
        (Client::finalize, &[|| Answer::Setting(None)]),
        (|c| c.get("debug").map(|_| ()), &[|| Answer::Ok]),
        (|c| c.wait(DatasetNo(1), Level::Cached, 9), &[|| Answer::Flag(true)]),
    ];
    for (call, answers) in calls {
        for answer in *answers {
            let (_fake, mut client) = against(move || Reply::Answer(answer()));
            let error = call(&mut client).unwrap_err();
            assert_eq!(error.code(), Code::Protocol, "{error}");
            assert!(!client.alive());
        }
    }
}

#[test]
fn a_begin_that_failed_opens_nothing() {
    let (_fake, mut client) = against(|| Reply::Answer(failed(Code::Space, "no space")));
    assert_eq!(client.begin("d", FLAG_CHECKPOINT).unwrap_err().code(), Code::Space);
    assert_eq!(client.complete(true).unwrap_err().code(), Code::State);
    assert_eq!(client.route("plain").unwrap(), "plain");
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    client.complete(true).unwrap();
}

#[test]
fn a_yes_to_an_invalid_rank_is_no_yes() {
    let script = |n: usize, _: &Request| (n == 2).then_some(Reply::Answer(Answer::Ok));
    let fake = Fake::with(|_| {}, script);
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    assert_eq!(client.complete(false).unwrap_err().code(), Code::Dropped);
}

#[test]
fn any_bytes_in_a_sound_frame_are_survived() {
    // The header is right, so that the decoder and the checks behind it see the bytes.
    let (bytes_in, bytes_out) = std::sync::mpsc::channel::<Vec<u8>>();
    let next = std::sync::Mutex::new(bytes_out);
    let fake = Fake::with(
        |_| {},
        move |_, request| match request {
            Request::Hello { .. } => None,
            _ => Some(Reply::Raw(frame::seal(KIND_ANSWER, &next.lock().unwrap().recv().unwrap()))),
        },
    );
    let options = fake.options(&[]);
    bolero::check!().with_type::<Vec<u8>>().with_iterations(1000).for_each(|bytes: &Vec<u8>| {
        let mut client = Client::connect(&options).unwrap();
        bytes_in.send(bytes.clone()).unwrap();
        let _ = client.start_restart();
        if client.alive() {
            bytes_in.send(bytes.clone()).unwrap();
            let _ = client.route("x");
            let _ = client.begin("d", FLAG_CHECKPOINT);
        }
        // What was not asked for must not answer the next connection.
        drop(client);
    });
}
