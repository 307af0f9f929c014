//! Regions of memory against an agent that behaves.

mod fake;

use fake::Fake;
use stanchion::{Client, Code, Environment, Error, FLAG_CHECKPOINT, Options, Region, RegionMut};
use stanchion_format::client::{Ask, Request};
use std::os::unix::fs::FileExt;

fn store(client: &mut Client, name: &str, regions: &[(u64, &[u8])]) -> Result<(), Error> {
    let regions: Vec<Region<'_>> =
        regions.iter().map(|(id, bytes)| Region { id: *id, bytes }).collect();
    client.checkpoint(name, FLAG_CHECKPOINT, &regions).map(|_| ())
}

/// Restores into memory of these sizes.
fn restore(client: &mut Client, sizes: &[(u64, usize)]) -> Result<Vec<Vec<u8>>, Error> {
    let mut memory: Vec<(u64, Vec<u8>)> =
        sizes.iter().map(|(id, size)| (*id, vec![0xee; *size])).collect();
    let mut regions: Vec<RegionMut<'_>> =
        memory.iter_mut().map(|(id, bytes)| RegionMut { id: *id, bytes }).collect();
    client.restore(&mut regions)?;
    Ok(memory.into_iter().map(|(_, bytes)| bytes).collect())
}

#[test]
fn regions_come_back_as_they_were() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    assert!(matches!(restore(&mut client, &[(1, 1)]), Err(Error::NoRestart)));
    let large: Vec<u8> = (0..100_001u32).map(|i| ((i * 7) >> 3) as u8).collect();
    store(&mut client, "a", &[(1, b"one"), (5, &large), (9, b"")]).unwrap();
    let back = restore(&mut client, &[(1, 3), (5, large.len()), (9, 0)]).unwrap();
    assert_eq!((&back[0][..], &back[1], &back[2][..]), (&b"one"[..], &large, &b""[..]));
    // With sizes asked for first.
    client.start_restart().unwrap();
    let sizes: Vec<(u64, u64)> =
        client.regions_stored().unwrap().iter().map(|r| (r.id, r.bytes)).collect();
    assert_eq!(sizes, [(1, 3), (5, 100_001), (9, 0)]);
    restore(&mut client, &[(1, 3), (5, 100_001), (9, 0)]).unwrap();
    assert!(matches!(client.regions_stored(), Err(Error::State { .. })));
    // No region at all is a dataset as well: another rank may have some.
    store(&mut client, "none", &[]).unwrap();
    assert!(restore(&mut client, &[]).unwrap().is_empty());
    drop(client);
    let (_, requests) = fake.end();
    let paths: Vec<&str> = requests
        .iter()
        .filter_map(|r| match r {
            Request::Collective { ask: Ask::Complete, own } => Some(own.files[0].path.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(paths, ["a/rank.000000.stn", "none/rank.000000.stn"]);
}

#[test]
fn a_snapshot_goes_to_a_file_where_there_is_no_pool() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    let regions = [Region { id: 3, bytes: b"as it was" }];
    client.checkpoint_cow("d", FLAG_CHECKPOINT, &regions).unwrap();
    assert_eq!(restore(&mut client, &[(3, 9)]).unwrap(), [b"as it was"]);
    // What cannot be stored keeps nobody waiting.
    let twice = [Region { id: 3, bytes: b"x" }, Region { id: 3, bytes: b"y" }];
    let error = client.checkpoint_cow("e", FLAG_CHECKPOINT, &twice).unwrap_err();
    assert!(matches!(error, Error::Regions { .. }), "{error}");
    drop(client);
    let (_, requests) = fake.end();
    let said = requests.iter().filter_map(|r| match r {
        Request::Collective { ask: Ask::Snapshot, own } => Some((own.valid, own.child, own)),
        _ => None,
    });
    let said: Vec<_> = said.collect();
    assert_eq!(
        said.iter().map(|s| (s.0, s.1)).collect::<Vec<_>>(),
        [(true, false), (false, false)]
    );
    // Writing it kept the caller from its work.
    assert!(said[0].2.copy_us > 0 && said[0].2.blocked_us >= said[0].2.copy_us);
}

#[test]
fn other_regions_than_the_datasets_are_refused_before_anything_is_overwritten() {
    for (sizes, says) in [
        (vec![(1, 3), (2, 5)], "region 2 is protected with 5 bytes, dataset 'd' has 4"),
        (vec![(1, 3), (2, 4), (3, 1)], "region 3 is protected, dataset 'd' has none"),
        (vec![(1, 3)], "dataset 'd' has a region 2, which is not protected"),
    ] {
        let fake = Fake::model();
        let mut client = Client::connect(&fake.options(&[])).unwrap();
        store(&mut client, "d", &[(1, b"abc"), (2, b"defg")]).unwrap();
        let mut memory: Vec<Vec<u8>> = sizes.iter().map(|(_, n)| vec![0xee; *n]).collect();
        let mut regions: Vec<RegionMut<'_>> = memory
            .iter_mut()
            .zip(&sizes)
            .map(|(bytes, (id, _))| RegionMut { id: *id, bytes })
            .collect();
        let error = client.restore(&mut regions).unwrap_err();
        assert_eq!(error.code(), Code::Invalid);
        assert!(error.to_string().contains(says), "{error}");
        assert!(memory.iter().flatten().all(|b| *b == 0xee));
        // It was rejected: there is no other.
        assert!(matches!(restore(&mut client, &[]), Err(Error::NoRestart)));
        drop(client);
        fake.end();
    }
}

#[test]
fn what_cannot_be_stored_drops_the_dataset_and_says_why() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    // Ids that do not ascend.
    let error = store(&mut client, "d", &[(2, b"x"), (2, b"y")]).unwrap_err();
    assert!(matches!(error, Error::Regions { .. }), "{error}");
    let error = store(&mut client, "../d", &[(2, b"x")]).unwrap_err();
    assert_eq!(error.code(), Code::Invalid);
    store(&mut client, "good", &[(2, b"x")]).unwrap();
    drop(client);
    let (model, requests) = fake.end();
    assert_eq!(model.complete.len(), 1);
    let completes: Vec<bool> = requests
        .iter()
        .filter_map(|r| match r {
            Request::Collective { ask: Ask::Complete, own } => Some(own.valid),
            _ => None,
        })
        .collect();
    assert_eq!(completes, [false, true]);
}

#[test]
fn a_table_that_makes_no_sense_is_refused() {
    // FM-F11: agents verify what they hand out, and still nothing of it is believed unseen.
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    type Bend = fn(&std::fs::File);
    let bent: [(&str, Bend); 3] = [
        ("damaged", |f| f.write_all_at(&[0xff], 40).unwrap()),
        ("no file of regions", |f| f.write_all_at(b"something else", 0).unwrap()),
        ("damaged", |f| f.set_len(40).unwrap()),
    ];
    for (says, bend) in bent {
        store(&mut client, "d", &[(1, b"abc")]).unwrap();
        client.start_restart().unwrap();
        let place = client.route(&format!("{}/d/rank.000000.stn", client.prefix())).unwrap();
        bend(&std::fs::OpenOptions::new().write(true).open(place).unwrap());
        let error = restore(&mut client, &[(1, 3)]).unwrap_err();
        assert!(
            matches!(error, Error::Regions { .. }) && error.to_string().contains(says),
            "{error}"
        );
        assert_eq!(error.code(), Code::Io);
    }
    drop(client);
    fake.end();
}

#[test]
fn disabled_stores_nothing_and_offers_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().to_str().unwrap();
    let pairs = [("STANCHION_ENABLE", "0"), ("STANCHION_PREFIX", prefix)];
    let options = Options {
        identity: Some((0, 1)),
        environment: Environment::of_pairs(pairs),
        ..Options::default()
    };
    let mut client = Client::connect(&options).unwrap();
    store(&mut client, "d", &[(1, b"abc")]).unwrap();
    assert!(matches!(restore(&mut client, &[(1, 3)]), Err(Error::NoRestart)));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
