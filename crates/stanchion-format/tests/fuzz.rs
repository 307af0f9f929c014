//! Whatever bytes come from outside: no panic, no memory beyond the limits, and nothing that passes
//! for what it is not (FM-F11, FM-C3). `cargo test` tries a few thousand inputs each.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};
use stanchion_format::changed::{Changed, ChangedWriter};
use stanchion_format::checksum::{Crc, crc64};
use stanchion_format::client::{
    Answer, Ask, Base, Code, FLAG_CHECKPOINT, MemoryFile, Own, Part, PartFrom, Request, RestartInfo,
};
use stanchion_format::data::{ChunkAnswer, ChunkRequest, Piece};
use stanchion_format::frame::{self, FrameError, HEADER_BYTES};
use stanchion_format::holding::{self, Holding, HoldingError};
use stanchion_format::ids::*;
use stanchion_format::index::{HaltFile, INDEX_VERSION, IndexRecord, JobFile, LeaseFile, SlotFile};
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::{FileDecl, FileEntry, Manifest, pieces};
use stanchion_format::peer::*;
use stanchion_format::segment::{self, BLOCK, Entry, Life, Tag, Trailer};
use stanchion_format::{limits, name, regions};

const ITERATIONS: usize = 4000;

fn key() -> Key {
    Key { no: DatasetNo(7), inc: Incarnation { epoch: Epoch(3), count: 2 } }
}

fn manifest() -> Manifest {
    let entry = |rank: u32, path: &str, bytes: u64| FileEntry {
        rank: RankId(rank),
        path: path.into(),
        bytes,
        mode: 0o644,
        chunks: pieces(bytes, 4096).map(|(at, len)| Crc(at * 31 + u64::from(len))).collect(),
    };
    let files = vec![entry(0, "a/b", 10_000), entry(0, "c", 0), entry(3, "a/d", 4096)];
    Manifest { key: key(), slot: SlotId(1), chunk_bytes: 4096, files }
}

fn info() -> DatasetInfo {
    let range = |first, slot| RankRange { first: RankId(first), count: 2, slot: SlotId(slot) };
    DatasetInfo {
        key: key(),
        name: "ckpt.7".into(),
        flags: FLAG_CHECKPOINT,
        ranks: 4,
        sets: Sets::new(Scheme::Xor, 2, 2),
        chunk_bytes: 4096,
        bytes: 14_096,
        files: 3,
        placement: [range(0, 0), range(2, 1)].into(),
    }
}

fn record() -> IndexRecord {
    IndexRecord {
        version: INDEX_VERSION,
        job: JobId(u64::MAX),
        epoch: Epoch(3),
        inc: key().inc,
        ancestry: Ancestry(vec![(key().inc, DatasetNo(7))]),
        info: info(),
        unix_s: 1_700_000_000,
        slots: vec![(SlotId(0), Crc(1)), (SlotId(1), manifest().crc())],
        containers: Some(5),
        times: Some(Times { copy_us: 7, ..Times::default() }),
        crc: Crc(0),
    }
    .seal()
}

fn trouble() -> Trouble {
    Trouble::new(Cause::Size { want: 1, have: 2 }).slot(SlotId(1)).rank(RankId(2)).file("a/b")
}

fn decls() -> Vec<FileDecl> {
    vec![FileDecl { rank: RankId(1), path: "x/y".into(), bytes: 9 }]
}

fn increment() -> MemoryFile {
    let mut changed = ChangedWriter::default();
    for n in 1..9 {
        changed.same(n * 4096);
        changed.own(n * 40);
    }
    changed.same(77);
    let base = Some(Base { key: key(), path: "x/z".into(), changed: changed.finish() });
    let from = [
        PartFrom::Extent { id: ExtentId(3), offset: 4096 },
        PartFrom::Filled { number: 1 << 48, offset: 0 },
    ];
    let parts = from.map(|from| Part { from, bytes: 720 }).to_vec();
    MemoryFile { path: "x/y".into(), base, parts }
}

fn requests() -> Vec<Request> {
    let own = Own {
        valid: true,
        files: decls(),
        write_us: 5,
        memory: vec![increment()],
        ..Own::default()
    };
    let settings = vec![("a".into(), "b".into())];
    vec![
        Request::Hello { rank: RankId(1), size: 4, pid: 9, settings },
        Request::Collective { ask: Ask::Begin { name: "n".into(), flags: 3 }, own: own.clone() },
        Request::Collective { ask: Ask::Complete, own },
        Request::Wait { no: DatasetNo(1), level: Level::Protected, timeout_ms: 10 },
        Request::Warn { text: "text".into() },
        Request::Attach { rank: RankId(1), thread: true },
        Request::Copied,
    ]
}

fn answers() -> Vec<Answer> {
    let (name, dir) = ("n".to_owned(), "/dir".to_owned());
    let restart =
        RestartInfo { key: key(), name: name.clone(), flags: 1, dir: dir.clone(), files: decls() };
    vec![
        Answer::Ok,
        Answer::Flag(true),
        Answer::Began { key: key(), name, dir },
        Answer::Restart(Some(restart)),
        Answer::Failed { code: Code::Ranks, text: "why".into() },
    ]
}

fn envelopes() -> Vec<Envelope> {
    let inc = key().inc;
    let contrib = Contrib {
        ranks: 2,
        ask: Some(Ask::NeedCheckpoint),
        trouble: Some(trouble()),
        ranges: info().placement.to_vec(),
        ..Contrib::default()
    };
    let holding = DatasetHolding {
        info: info(),
        certified: true,
        levels: vec![Level::Cached, Level::Persistent],
        slots: vec![SlotHolding { slot: SlotId(1), data: true, parity: false }],
    };
    let holdings = Holdings {
        epoch: Epoch(1),
        round: 2,
        inc,
        ancestry: Ancestry::default(),
        datasets: vec![holding],
        newest_committed: Some(key()),
    };
    let messages = [
        Msg::Ping(5),
        Msg::Holdings(Box::new(holdings)),
        Msg::Up(inc, CollId::Seq(4), Box::new(contrib)),
        Msg::Down(inc, CollId::Filled(key()), Verdict::Record(3)),
        Msg::Down(inc, CollId::Init, Verdict::Failed(Code::Io, trouble())),
        Msg::Record(inc, 3, Record::Commit(Box::new(info()))),
        Msg::Manifest(inc, Box::new(manifest())),
        Msg::Notice(Severity::Warn, "text".into()),
    ];
    messages.map(|msg| Envelope { from: PeerId::Agent(AgentId(3)), msg }).into()
}

/// Which of several valid encodings, and how to change it: (kind, place, byte).
type Edits = (u8, Vec<(u8, u16, u8)>);

/// A valid encoding with a few bytes changed, inserted or cut off.
fn bend(valid: &[u8], edits: &[(u8, u16, u8)]) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for (kind, at, byte) in edits {
        let at = usize::from(*at) % (bytes.len() + 1);
        match kind % 4 {
            0 if at < bytes.len() => bytes[at] = *byte,
            1 if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
            2 => bytes.insert(at, *byte),
            3 => bytes.truncate(at),
            _ => {}
        }
    }
    bytes
}

fn body<T: Serialize>(value: &T) -> Vec<u8> {
    frame::encode(1, value, u32::MAX).unwrap()[HEADER_BYTES..].to_vec()
}

/// Whatever decodes encodes again to what decodes to the same.
fn stable<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    if let Ok(value) = frame::decode::<T>(bytes) {
        assert_eq!(frame::decode::<T>(&body(&value)).unwrap(), value);
    }
}

fn stable_everything(bytes: &[u8]) {
    stable::<Request>(bytes);
    stable::<Answer>(bytes);
    stable::<Envelope>(bytes);
    stable::<ChunkRequest>(bytes);
    stable::<ChunkAnswer>(bytes);
    stable::<Manifest>(bytes);
}

#[test]
fn any_bytes_as_a_message() {
    bolero::check!().with_iterations(ITERATIONS).for_each(stable_everything);
}

#[test]
fn bent_messages() {
    let mut bodies: Vec<Vec<u8>> = requests().iter().map(body).collect();
    bodies.extend(answers().iter().map(body));
    bodies.extend(envelopes().iter().map(body));
    bodies.push(body(&ChunkRequest { key: key(), slot: SlotId(1), piece: Piece::Data(4) }));
    bodies.push(body(&ChunkAnswer::Bytes { len: 4, crc: Crc(9) }));
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(which, edits)| {
        stable_everything(&bend(&bodies[usize::from(*which) % bodies.len()], edits));
    });
}

#[test]
fn every_valid_message_survives() {
    for value in requests() {
        let bytes = frame::encode(1, &value, 1 << 20).unwrap();
        assert_eq!(frame::read::<Request>(&mut &bytes[..], 1 << 20).unwrap(), value);
    }
    for value in answers() {
        let bytes = frame::encode(2, &value, 1 << 20).unwrap();
        assert_eq!(frame::read::<Answer>(&mut &bytes[..], 1 << 20).unwrap(), value);
    }
    for value in envelopes() {
        let bytes = frame::encode(8, &value, 1 << 20).unwrap();
        assert_eq!(frame::read::<Envelope>(&mut &bytes[..], 1 << 20).unwrap(), value);
        let long = frame::encode(8, &value, 1);
        assert!(matches!(long, Err(FrameError::TooLong { max: 1, .. })));
    }
}

#[test]
fn any_bytes_as_a_frame() {
    const MAX: u32 = 4096;
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        if let Ok((_, body)) = frame::read_raw(&mut &bytes[..], MAX) {
            assert!(body.len() <= MAX as usize && bytes.len() >= HEADER_BYTES + body.len());
        }
    });
}

#[test]
fn a_bent_frame_is_the_same_frame_or_none() {
    let content = b"the body of a frame".to_vec();
    let valid = frame::seal(17, &content);
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(_, edits)| {
        if let Ok((kind, got)) = frame::read_raw(&mut &bend(&valid, edits)[..], 1 << 20) {
            assert_eq!((kind, &got), (17, &content));
        }
    });
}

#[test]
fn a_frame_beyond_the_limit_is_refused_by_its_header() {
    // Nothing follows: a reader that believed the length would say that the stream ended.
    let long = frame::seal(1, &vec![0u8; 5000]);
    let read = frame::read_raw(&mut &long[..HEADER_BYTES], 4999);
    assert!(matches!(read, Err(FrameError::TooLong { bytes: 5000, max: 4999 })));
}

/// A file of ours, bent: it is what it was, or it is refused.
fn bent_file<T: Serialize + PartialEq + Debug>(value: &T, parse: fn(&[u8]) -> Option<T>) {
    let valid = serde_json::to_vec_pretty(value).unwrap();
    assert_eq!(parse(&valid).as_ref(), Some(value));
    let judge = |bytes: &[u8]| parse(bytes).is_none_or(|got| got == *value);
    // Every byte once, then whatever comes.
    for at in 0..valid.len() {
        for bit in 0..8 {
            assert!(judge(&bend(&valid, &[(1, at as u16, bit)])), "byte {at}, bit {bit}");
        }
        assert!(judge(&valid[..at]), "cut to {at}");
    }
    let mut x = 1u64;
    for _ in 0..ITERATIONS {
        let mut next = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            x >> 33
        };
        let change: Vec<_> = (0..4).map(|_| (next() as u8, next() as u16, next() as u8)).collect();
        assert!(judge(&bend(&valid, &change)), "{change:?}");
    }
}

#[test]
fn bent_files() {
    bent_file(&record(), IndexRecord::parse);
    let slot = SlotFile { version: INDEX_VERSION, manifest: manifest(), crc: manifest().crc() };
    bent_file(&slot, SlotFile::parse);
    bent_file(&JobFile::new(JobId(u64::MAX)), JobFile::parse);
}

#[test]
fn any_bytes_as_files() {
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        assert_eq!(IndexRecord::parse(bytes), None);
        assert_eq!(SlotFile::parse(bytes), None);
        assert_eq!(JobFile::parse(bytes), None);
        let _ = serde_json::from_slice::<HaltFile>(bytes);
        let _ = serde_json::from_slice::<LeaseFile>(bytes);
    });
}

#[test]
fn bent_notes() {
    let (host, role) = ("h".into(), "run".into());
    let lease = LeaseFile { epoch: Epoch(1), host, pid: 3, unix_s: 4, role };
    let halt = HaltFile { before_unix_s: Some(5), ..HaltFile::default() };
    let notes = [serde_json::to_vec(&lease).unwrap(), serde_json::to_vec(&halt).unwrap()];
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(which, edits)| {
        let bytes = bend(&notes[usize::from(*which) % 2], edits);
        if let Ok(lease) = serde_json::from_slice::<LeaseFile>(&bytes) {
            let again = serde_json::to_vec(&lease).unwrap();
            assert_eq!(serde_json::from_slice::<LeaseFile>(&again).unwrap(), lease);
        }
        let _ = serde_json::from_slice::<HaltFile>(&bytes);
    });
}

#[test]
fn bent_lists_of_what_changed() {
    // FM-C3: what passes has the sums that the agent goes by, and is written as it was read.
    let valid = {
        let base = increment().base.unwrap();
        postcard::to_stdvec(&base.changed).unwrap()
    };
    bolero::check!().with_iterations(ITERATIONS).with_type::<Vec<(u8, u16, u8)>>().for_each(
        |edits| {
            let bent = bend(&valid, edits);
            let Ok((changed, rest)) = postcard::take_from_bytes::<Changed>(&bent) else { return };
            let mut sums = (0u64, 0u64, 0usize);
            for stretch in changed.stretches() {
                sums.0 += stretch.same + stretch.own;
                sums.1 += stretch.own;
                sums.2 += 1;
            }
            assert_eq!(sums, (changed.bytes(), changed.own(), changed.runs()));
            assert!(sums.2 <= limits::MEMORY_PARTS_MAX);
            let again = postcard::to_stdvec(&changed).unwrap();
            assert_eq!(postcard::take_from_bytes::<Changed>(&again), Ok((changed, &[][..])));
            assert!(again.len() <= bent.len() - rest.len());
        },
    );
}

#[test]
fn bent_tables_of_regions() {
    let sizes = [(1, 5), (2, 0), (900, 70_000)];
    let (placed, end) = regions::layout(&sizes).unwrap();
    let good = regions::encode(&placed);
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(_, edits)| {
        let bytes = bend(&good, edits);
        if let Ok(found) = regions::parse(&bytes, end) {
            assert_eq!((&found, &bytes), (&placed, &good));
        }
    });
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        assert!(regions::parse(bytes, u64::MAX).is_err());
    });
}

#[test]
fn bent_blocks_of_segments() {
    // FM-T1, FM-T3: what passes is what was written, or nothing does.
    const BYTES: u64 = 1 << 20;
    let life = Life { store: 1, segment: 2, life: 3 };
    let tag = Tag { key: key(), slot: SlotId(1), rank: RankId(2), file: 0, offset: 4096 };
    let entry = |at| Entry { tag, at, len: 5000, crc: Crc(at) };
    let entries = vec![entry(8192), entry(16_384)];
    let trailer = Trailer { at: BYTES - 2 * BLOCK as u64, entries: 2, crc: Crc(7) };
    let mut blocks = [[0; BLOCK]; 3];
    segment::put_header(&mut blocks[0], life, BYTES);
    segment::put_group(&mut blocks[1], life, 4096, &entries);
    segment::put_trailer(&mut blocks[2], life, trailer);
    let read = |bytes: &[u8]| {
        let group = segment::group(bytes, life, 4096, BYTES);
        (segment::header(bytes), group, segment::trailer(bytes, life, BYTES))
    };
    let whole: [_; 3] = blocks.map(|b| read(&b));
    assert_eq!(whole[0], (Some((life, BYTES)), None, None));
    assert_eq!(whole[1], (None, Some(entries), None));
    assert_eq!(whole[2], (None, None, Some(trailer)));
    let nothing = (None, None, None);
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(which, edits)| {
        let which = *which as usize % 3;
        let found = read(&bend(&blocks[which], edits));
        assert!(found == whole[which] || found == nothing, "{found:?}");
    });
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        assert_eq!(read(bytes), nothing);
        // Also where the checksum fits.
        for entry in segment::entries(bytes, crc64(bytes), BYTES).into_iter().flatten() {
            assert!(entry.len > 0 && entry.end() <= BYTES, "{entry:?}");
        }
    });
}

fn holding() -> Holding {
    let other = Manifest { slot: SlotId(0), ..manifest() };
    Holding {
        no: 3,
        job: JobId(9),
        inc: key().inc,
        ancestry: Ancestry::default(),
        info: info(),
        slot: SlotId(1),
        data: true,
        parity: true,
        manifests: vec![other.into(), manifest().into()],
    }
}

/// A body as it would be sealed by who means no good.
fn sealed(body: &[u8]) -> Vec<u8> {
    let mut bytes = holding().encode().unwrap()[..holding::HEADER_BYTES].to_vec();
    bytes[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    bytes[24..32].copy_from_slice(&crc64(body).0.to_le_bytes());
    let crc = crc64(&bytes[..32]);
    bytes[32..40].copy_from_slice(&crc.0.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn a_holding_is_whole_or_refused() {
    // FM-A2
    let valid = holding().encode().unwrap();
    assert_eq!(Holding::parse(&valid), Ok(holding()));
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(_, edits)| {
        let bytes = bend(&valid, edits);
        let parsed = Holding::parse(&bytes);
        assert!(bytes == valid || parsed.is_err(), "{parsed:?}");
    });
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        assert!(Holding::parse(bytes).is_err());
    });
    // Also where the checksums fit: what passes is sound.
    let body = body(&holding());
    assert_eq!(sealed(&body), valid);
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(_, edits)| {
        if let Ok(h) = Holding::parse(&sealed(&bend(&body, edits))) {
            h.manifests.iter().for_each(|m| sound(m));
            assert!(h.manifests.iter().any(|m| m.slot == h.slot && m.key == h.info.key));
        }
    });
}

#[test]
fn a_holding_that_contradicts_itself_is_refused() {
    // FM-A2, FM-S1
    let changes: [fn(&mut Holding); 11] = [
        |h| h.slot = SlotId(2),
        |h| h.inc.count += 1,
        |h| drop(h.manifests.pop()),
        |h| drop(h.manifests.remove(0)),
        |h| h.manifests.reverse(),
        |h| h.manifests.clear(),
        |h| h.manifests.push(manifest().into()),
        |h| h.info.key.no.0 += 1,
        |h| h.info.name = "a/b".into(),
        |h| h.info.chunk_bytes = 1,
        |h| h.info.ranks = 0,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut bad = holding();
        change(&mut bad);
        let bytes = bad.encode().unwrap();
        assert_eq!(Holding::parse(&bytes), Err(HoldingError::Unsound), "change {n}");
    }
    let mut newer = holding().encode().unwrap();
    newer[8] = 2;
    assert_eq!(Holding::parse(&newer), Err(HoldingError::Version(2)));
    // A dataset that was written before a restart is of the line; one that another line wrote is not.
    let mut later = holding();
    later.inc.count += 1;
    later.ancestry = Ancestry(vec![(key().inc, DatasetNo(7))]);
    assert_eq!(Holding::parse(&later.encode().unwrap()), Ok(later.clone()));
    later.ancestry = Ancestry(vec![(key().inc, DatasetNo(6))]);
    assert_eq!(Holding::parse(&later.encode().unwrap()), Err(HoldingError::Unsound));
}

#[test]
fn nesting_does_not_exhaust_the_stack() {
    assert_eq!(IndexRecord::parse("[".repeat(1 << 20).as_bytes()), None);
    let deep = format!("{{\"manifest\":{}", "{\"a\":".repeat(1 << 18));
    assert_eq!(SlotFile::parse(deep.as_bytes()), None);
}

/// What all arithmetic on chunks relies on.
fn sound(m: &Manifest) {
    let mut total = 0u64;
    for n in 0..m.chunk_count() {
        let at = m.chunk(n).expect("every chunk below the count is somewhere");
        assert!(at.len > 0 && at.len <= m.chunk_bytes);
        assert_eq!(at.offset % u64::from(m.chunk_bytes), 0);
        assert!(at.offset + u64::from(at.len) <= m.files[at.file].bytes);
        total += u64::from(at.len);
    }
    assert_eq!(total, m.bytes());
    assert_eq!((m.chunk(m.chunk_count()), m.chunk(u64::MAX)), (None, None));
    for pair in m.files.windows(2) {
        assert!((pair[0].rank, &pair[0].path) < (pair[1].rank, &pair[1].path));
    }
}

/// A manifest made of chance; `tame` ones are mostly right.
fn wild(chunk_bytes: u32, tame: bool, files: &[(u8, u8, u64, u8)]) -> Manifest {
    let chunk_bytes = if tame { limits::CHUNK_BYTES_MIN + chunk_bytes % 9000 } else { chunk_bytes };
    let entry = |(rank, path, bytes, chunks): &(u8, u8, u64, u8)| {
        let bytes = if tame { bytes % 100_000 } else { *bytes };
        let count = if tame { bytes.div_ceil(chunk_bytes.into()) } else { u64::from(*chunks) };
        FileEntry {
            rank: RankId((*rank % 3).into()),
            path: format!("d/{path}"),
            bytes,
            mode: 0o600,
            chunks: (0..count).map(Crc).collect(),
        }
    };
    let mut files: Vec<FileEntry> = files.iter().map(entry).collect();
    if tame {
        files.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
    }
    Manifest { key: key(), slot: SlotId(0), chunk_bytes, files }
}

#[test]
fn a_manifest_that_passes_is_sound() {
    sound(&manifest());
    type Wild = (u32, bool, Vec<(u8, u8, u64, u8)>);
    bolero::check!().with_iterations(ITERATIONS).with_type::<Wild>().for_each(
        |(chunk_bytes, tame, files)| {
            let m = wild(*chunk_bytes, *tame, files);
            if m.check().is_ok() {
                sound(&m);
            }
        },
    );
}

#[test]
fn a_bent_manifest_that_passes_is_sound() {
    let valid = body(&manifest());
    bolero::check!().with_iterations(ITERATIONS).with_type::<Edits>().for_each(|(_, edits)| {
        if let Ok(m) = frame::decode::<Manifest>(&bend(&valid, edits))
            && m.check().is_ok()
        {
            sound(&m);
        }
    });
}

#[test]
fn any_text_as_a_path() {
    // Mostly characters that mean something in paths.
    let text = |bytes: &[u8]| -> String {
        let chars: Vec<char> = "/..a/.-\u{fc}\n\0b ".chars().collect();
        bytes.iter().map(|b| chars[usize::from(*b) % chars.len()]).collect()
    };
    bolero::check!().with_iterations(ITERATIONS).with_type::<(Vec<u8>, Vec<u8>)>().for_each(
        |(name, cwd)| {
            let (name, cwd) = (text(name), text(cwd));
            if let Ok(path) = name::route(&name, "/p/x", &cwd) {
                name::check_path(&path).unwrap();
                assert!(path.split('/').all(|part| !matches!(part, "" | "." | "..")));
                assert_eq!(name::route(&path, "/p/x", "/p/x").as_ref(), Ok(&path));
            }
            if name::check_dataset(&name).is_ok() {
                assert!(!name.contains(['/', '\n', '\0']));
            }
        },
    );
}

#[test]
fn the_seal_covers_every_field() {
    let good = record();
    let changes: [fn(&mut IndexRecord); 8] = [
        |r| r.version += 1,
        |r| r.job.0 -= 1,
        |r| r.epoch.0 += 1,
        |r| r.inc.count += 1,
        |r| r.ancestry.0.clear(),
        |r| r.info.name.push('x'),
        |r| r.unix_s += 1,
        |r| r.slots[0].1 = crc64(b"other"),
    ];
    for change in changes {
        let mut bad = good.clone();
        change(&mut bad);
        assert_eq!(IndexRecord::parse(&serde_json::to_vec(&bad).unwrap()), None);
    }
}
