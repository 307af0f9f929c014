//! Streams against an agent with a small pool of real memory, and against one that has none.

mod fake;
#[path = "fake/pool.rs"]
mod pool;

use fake::{Fake, failed};
use pool::Pool;
use stanchion::{Client, Code, Environment, Error, FLAG_CHECKPOINT, Mode, Options, StreamId};
use stanchion_format::client::Request;

const CHUNK: u64 = 16 << 10;
const PLENTY: u64 = 1 << 30;

fn client(fake: &Fake) -> Client {
    Client::connect(&fake.options(&[])).unwrap()
}

fn begin(client: &mut Client) {
    client.begin("d", FLAG_CHECKPOINT).unwrap();
}

fn open(client: &mut Client, path: &str) -> StreamId {
    client.stream_open(path, Mode::Write).unwrap()
}

/// A whole stream.
fn put(client: &mut Client, path: &str, bytes: &[u8], step: usize) -> Result<(), Error> {
    let id = client.stream_open(path, Mode::Write)?;
    for piece in bytes.chunks(step) {
        client.stream_write(id, piece)?;
    }
    client.stream_close(id)
}

/// All of a file of the restart, in steps.
fn get(client: &mut Client, path: &str, step: usize) -> Vec<u8> {
    let id = client.stream_open(path, Mode::Read).unwrap();
    let size = client.stream_size(id).unwrap();
    let (mut all, mut buf) = (Vec::new(), vec![0xee; step]);
    loop {
        let got = client.stream_read(id, &mut buf).unwrap();
        all.extend_from_slice(&buf[..got]);
        if got == 0 {
            break;
        }
    }
    client.stream_close(id).unwrap();
    assert_eq!(all.len() as u64, size);
    all
}

fn sample(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes as u32)
        .map(|n| (n.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
        .collect()
}

#[test]
fn what_is_written_is_in_the_pool_and_comes_back() {
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    // Twice: the second dataset finds the first one's bytes in what it is lent.
    for round in 0..2 {
        let (large, small) = (sample(300_007, round), sample(5000, round + 9));
        begin(&mut client);
        put(&mut client, "a/large", &large, 70_000).unwrap();
        put(&mut client, "a/small", &small, 1).unwrap();
        put(&mut client, "empty", b"", 1).unwrap();
        let routed = client.route("routed").unwrap();
        std::fs::write(routed, b"by hand").unwrap();
        client.complete(true).unwrap();
        assert!(pool.file("a/large").unwrap() == large);
        assert!(pool.file("a/small").unwrap() == small);
        assert_eq!(pool.file("empty"), None, "nothing is no memory");
        client.start_restart().unwrap();
        assert!(get(&mut client, "a/large", 4099) == large);
        assert!(get(&mut client, "a/small", 1 << 20) == small);
        assert_eq!(get(&mut client, "empty", 10), b"");
        assert_eq!(get(&mut client, "routed", 3), b"by hand");
        client.complete_restart(true).unwrap();
        client.delete("d").unwrap();
    }
    let own = pool.completes().pop().unwrap();
    assert!(own.valid && own.copy_us > 0 && own.blocked_us >= own.copy_us);
    assert_eq!(own.files.len(), 4);
    drop(client);
    fake.end();
}

#[test]
fn a_hundred_megabytes_at_once_and_a_request_for_few_of_many_writes() {
    let pool = Pool::new(4 << 20, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    let bytes = sample(100 << 20, 3);
    begin(&mut client);
    put(&mut client, "f", &bytes, usize::MAX).unwrap();
    client.complete(true).unwrap();
    assert!(pool.file("f").unwrap() == bytes);
    let before = pool.lends().len();
    begin(&mut client);
    let id = open(&mut client, "g");
    for byte in &bytes[..1 << 20] {
        client.stream_write(id, &[*byte]).unwrap();
    }
    client.stream_close(id).unwrap();
    client.complete(true).unwrap();
    assert_eq!(pool.lends().len(), before + 1, "a mebibyte of single bytes is one request");
    assert!(pool.file("g").unwrap() == bytes[..1 << 20]);
}

#[test]
fn seeking_overwriting_and_holes() {
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    begin(&mut client);
    let id = open(&mut client, "f");
    let other = open(&mut client, "other");
    client.stream_write(id, &[1; 100]).unwrap();
    client.stream_write(other, &[9; 70_000]).unwrap();
    client.stream_seek(id, 200_000).unwrap();
    assert_eq!(client.stream_size(id).unwrap(), 100, "seeking alone makes nothing");
    client.stream_write(id, &[2; 50]).unwrap();
    client.stream_seek(id, 90).unwrap();
    client.stream_write(id, &[3; 20]).unwrap();
    client.stream_seek(id, 150_000).unwrap();
    client.stream_write(id, &[4; 1]).unwrap();
    client.stream_seek(id, 500_000).unwrap();
    assert_eq!(client.stream_size(id).unwrap(), 200_050);
    client.stream_close(id).unwrap();
    client.stream_close(other).unwrap();
    client.complete(true).unwrap();
    let mut want = vec![0; 200_050];
    want[..90].fill(1);
    want[90..110].fill(3);
    want[150_000] = 4;
    want[200_000..].fill(2);
    assert!(pool.file("f").unwrap() == want);
    assert!(pool.file("other").unwrap() == [9; 70_000]);
    // FM-P5 holds for the reader, too: holes are the same piece of memory many times.
    client.start_restart().unwrap();
    assert!(get(&mut client, "f", 10_000) == want);
    let id = client.stream_open("f", Mode::Read).unwrap();
    client.stream_seek(id, 149_999).unwrap();
    let mut three = [7; 3];
    assert_eq!(client.stream_read(id, &mut three).unwrap(), 3);
    assert_eq!(three, [0, 4, 0]);
    client.stream_seek(id, 1 << 40).unwrap();
    assert_eq!(client.stream_read(id, &mut three).unwrap(), 0);
    client.complete_restart(true).unwrap();
    assert!(matches!(client.stream_read(id, &mut three), Err(Error::NoStream { .. })));
}

#[test]
fn many_open_readers_hold_few_descriptors() {
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    begin(&mut client);
    for n in 0..400u32 {
        put(&mut client, &n.to_string(), &sample(20_000, n), 5000).unwrap();
    }
    client.complete(true).unwrap();
    client.start_restart().unwrap();
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = fds();
    let open = |n: u32| (n, client.stream_open(&n.to_string(), Mode::Read).unwrap());
    let ids: Vec<(u32, StreamId)> = (0..400).map(open).collect();
    let mut buf = vec![0; 10_000];
    for half in [0, 10_000] {
        for (n, id) in &ids {
            assert_eq!(client.stream_read(*id, &mut buf).unwrap(), 10_000);
            assert!(buf == sample(20_000, *n)[half..half + 10_000]);
        }
    }
    // Other tests of this process open some meanwhile.
    assert!(fds() < before + 350, "{} and {before}", fds());
    client.complete_restart(true).unwrap();
}

#[test]
fn a_thousand_small_streams_take_few_chunks() {
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    begin(&mut client);
    for n in 0..1000u32 {
        put(&mut client, &format!("dir/{n}"), &n.to_le_bytes(), 3).unwrap();
    }
    client.complete(true).unwrap();
    assert!(pool.held() <= 10 * CHUNK, "{}", pool.held());
    for n in 0..1000u32 {
        assert_eq!(pool.file(&format!("dir/{n}")).unwrap(), n.to_le_bytes());
    }
}

#[test]
fn where_the_pool_is_too_small_streams_go_on_as_files() {
    for max in [0, CHUNK, 5 * CHUNK] {
        let pool = Pool::new(CHUNK, max);
        let fake = pool.fake();
        let mut client = client(&fake);
        let bytes = sample(200_000, 5);
        begin(&mut client);
        let small = open(&mut client, "sub/small");
        client.stream_write(small, b"before ").unwrap();
        let id = open(&mut client, "sub/large");
        client.stream_seek(id, 1000).unwrap();
        for piece in bytes.chunks(7001) {
            client.stream_write(id, piece).unwrap();
        }
        client.stream_seek(id, 10).unwrap();
        client.stream_write(id, b"front").unwrap();
        assert_eq!(client.stream_size(id).unwrap(), 201_000);
        client.stream_write(small, b"after").unwrap();
        client.stream_close(id).unwrap();
        client.stream_close(small).unwrap();
        // The place is taken, whatever became of the stream.
        assert!(matches!(client.route("sub/large"), Err(Error::Taken { .. })));
        client.complete(true).unwrap();
        assert_eq!(pool.file("sub/large"), None);
        assert_eq!(pool.file("sub/small").is_some(), max > 0, "what the other gave back is enough");
        client.start_restart().unwrap();
        let mut want = vec![0; 1000];
        want[10..15].copy_from_slice(b"front");
        want.extend(&bytes);
        assert!(get(&mut client, "sub/large", 4000) == want);
        assert_eq!(get(&mut client, "sub/small", 4000), b"before after");
        // As an ordinary file.
        assert!(std::fs::read(client.route("sub/large").unwrap()).unwrap() == want);
        client.complete_restart(true).unwrap();
    }
}

#[test]
fn a_stream_that_is_open_at_complete_drops_the_dataset() {
    // FM-S2
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    begin(&mut client);
    put(&mut client, "closed", b"x", 1).unwrap();
    let id = open(&mut client, "dir/forgotten");
    client.stream_write(id, b"x").unwrap();
    let error = client.complete(true).unwrap_err();
    assert_eq!(error.code(), Code::Dropped);
    let text = error.to_string();
    assert!(text.contains("rank 0") && text.contains("'dir/forgotten' is still open"), "{text}");
    assert!(!pool.completes()[0].valid);
    assert_eq!(pool.held(), 0);
    // Its number is nobody's, now and when others are open.
    begin(&mut client);
    let next = open(&mut client, "dir/forgotten");
    assert_ne!(next, id);
    assert_eq!(client.stream_write(id, b"x").unwrap_err().code(), Code::Invalid);
    client.stream_close(next).unwrap();
    client.complete(true).unwrap();
}

#[test]
fn memory_that_does_not_come_is_an_error_and_the_dataset_is_dropped() {
    for (code, good) in [(Code::Space, 0), (Code::Timeout, 2)] {
        let pool = Pool::new(CHUNK, PLENTY);
        pool.fail_after(good, failed(code, "the pool is full"));
        let fake = pool.fake();
        let mut client = client(&fake);
        begin(&mut client);
        let (a, b) = (open(&mut client, "a"), open(&mut client, "b"));
        let error = loop {
            match client.stream_write(a, &[1; 1000]) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.code(), code);
        // Nobody waits a second time.
        let asked = pool.lends().len();
        assert_eq!(client.stream_write(b, b"x").unwrap_err().code(), Code::State);
        client.stream_close(a).unwrap();
        client.stream_close(b).unwrap();
        assert_eq!(pool.lends().len(), asked);
        let error = client.complete(true).unwrap_err();
        assert_eq!(error.code(), Code::Dropped);
        assert!(error.to_string().contains("stream 'a' could not be written: the pool is full"));
        assert!(!pool.completes()[0].valid);
        assert!(client.alive(), "the agent has answered");
        begin(&mut client);
        client.complete(true).unwrap();
    }
}

#[test]
fn a_path_is_one_file() {
    // FM-S16
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    let refused = |done: Result<StreamId, Error>| {
        let error = done.unwrap_err();
        assert!(matches!(error, Error::Taken { .. }), "{error}");
        assert_eq!(error.code(), Code::Invalid);
    };
    let phase = client.stream_open("f", Mode::Write).unwrap_err();
    assert_eq!(phase.code(), Code::State);
    assert_eq!(client.stream_open("f", Mode::Read).unwrap_err().code(), Code::State);
    begin(&mut client);
    let id = open(&mut client, "dir/f");
    refused(client.stream_open("./dir//f", Mode::Write));
    refused(client.stream_open("dir/f/g", Mode::Write));
    refused(client.stream_open("dir", Mode::Write));
    client.stream_close(id).unwrap();
    refused(client.stream_open("dir/f", Mode::Write));
    std::fs::write(client.route("dir/routed").unwrap(), b"r").unwrap();
    refused(client.stream_open("dir/routed", Mode::Write));
    assert!(matches!(client.route("dir/f"), Err(Error::Taken { .. })));
    assert!(matches!(client.stream_open("../f", Mode::Write), Err(Error::Name { .. })));
    put(&mut client, "dir/f2", b"x", 1).unwrap();
    client.complete(true).unwrap();
    // In the next dataset all are free again.
    begin(&mut client);
    put(&mut client, "dir/routed", b"s", 1).unwrap();
    client.complete(true).unwrap();
    assert_eq!(pool.file("dir/routed").unwrap(), b"s");
}

#[test]
fn what_is_not_possible_is_said() {
    let pool = Pool::new(CHUNK, PLENTY);
    let fake = pool.fake();
    let mut client = client(&fake);
    begin(&mut client);
    let id = open(&mut client, "f");
    let code = |done: Result<(), Error>| done.unwrap_err().code();
    client.stream_seek(id, i64::MAX as u64 - 5000).unwrap();
    assert_eq!(code(client.stream_write(id, &[0; 6000])), Code::Invalid);
    assert_eq!(code(client.stream_seek(id, u64::MAX)), Code::Invalid);
    // A hole that no memory can have: an ordinary file with a hole.
    client.stream_seek(id, 1 << 36).unwrap();
    client.stream_write(id, b"far").unwrap();
    client.stream_close(id).unwrap();
    assert_eq!(client.stream_read(id, &mut [0]).unwrap_err().code(), Code::Invalid);
    client.complete(true).unwrap();
    let own = pool.completes().pop().unwrap();
    assert_eq!((own.files[0].bytes, own.memory.len()), ((1 << 36) + 3, 0));
    client.start_restart().unwrap();
    let id = client.stream_open("f", Mode::Read).unwrap();
    assert_eq!(code(client.stream_write(id, b"x")), Code::Invalid);
    assert!(matches!(client.stream_open("g", Mode::Read), Err(Error::NoFile { .. })));
    client.stream_seek(id, (1 << 36) - 1).unwrap();
    let mut four = [9; 5];
    assert_eq!(client.stream_read(id, &mut four).unwrap(), 4);
    assert_eq!(&four, b"\0far\x09");
}

#[test]
fn a_lost_agent_is_not_waited_for() {
    let fake =
        Fake::with(|_| {}, |_, r| matches!(r, Request::Lend { .. }).then_some(fake::Reply::Close));
    let mut client = client(&fake);
    begin(&mut client);
    let id = open(&mut client, "f");
    assert_eq!(client.stream_write(id, b"x").unwrap_err().code(), Code::Agent);
    assert_eq!(client.stream_write(id, b"x").unwrap_err().code(), Code::State);
    assert_eq!(client.complete(true).unwrap_err().code(), Code::Agent);
}

#[test]
fn disabled_streams_are_files_in_the_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().to_str().unwrap();
    let pairs = [("STANCHION_ENABLE", "0"), ("STANCHION_PREFIX", prefix)];
    let options = Options {
        identity: Some((0, 1)),
        environment: Environment::of_pairs(pairs),
        ..Options::default()
    };
    let mut client = Client::connect(&options).unwrap();
    let name = format!("{prefix}/sub/f");
    begin(&mut client);
    let id = open(&mut client, &name);
    client.stream_seek(id, 3).unwrap();
    client.stream_write(id, b"def").unwrap();
    client.stream_seek(id, 0).unwrap();
    client.stream_write(id, b"a").unwrap();
    assert_eq!(client.stream_size(id).unwrap(), 6);
    assert!(matches!(client.stream_open(&name, Mode::Write), Err(Error::Taken { .. })));
    client.stream_close(id).unwrap();
    client.complete(true).unwrap();
    assert_eq!(std::fs::read(&name).unwrap(), b"a\0\0def");
    assert_eq!(get(&mut client, &name, 4), b"a\0\0def");
    assert_eq!(client.stream_open("/none", Mode::Read).unwrap_err().code(), Code::Io);
    begin(&mut client);
    let _open = open(&mut client, &name);
    assert_eq!(client.complete(true).unwrap_err().code(), Code::Dropped);
}
