//! A rank's calls against an agent that behaves.

mod fake;

use fake::{Fake, Reply, failed};
use stanchion::{Client, Code, Environment, Error, FLAG_CHECKPOINT, FLAG_OUTPUT, Level, Options};
use stanchion_format::client::{Ask, Own, Request};
use std::path::Path;

fn write(client: &mut Client, file: &str, bytes: &[u8]) -> String {
    let place = client.route(file).unwrap();
    std::fs::write(&place, bytes).unwrap();
    place
}

fn completes(requests: &[Request]) -> Vec<&Own> {
    requests
        .iter()
        .filter_map(|r| match r {
            Request::Collective { ask: Ask::Complete, own } => Some(own),
            _ => None,
        })
        .collect()
}

#[test]
fn a_dataset_is_written_and_read_again() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    assert_eq!(client.have_restart().unwrap(), None);
    assert!(client.need_checkpoint().unwrap());
    let begun = client.begin("step.1", FLAG_CHECKPOINT | FLAG_OUTPUT).unwrap();
    assert_eq!((begun.no.0, begun.name.as_str()), (1, "step.1"));
    // FM-S16: one name in two directories is two files; one path twice is one.
    let a = write(&mut client, "a/f", b"one");
    let b = write(&mut client, "b/f", b"three");
    assert_ne!(a, b);
    assert_eq!(client.route("./a//f").unwrap(), a);
    client.complete(true).unwrap();
    client.wait(begun.no, Level::Protected, 1000).unwrap();
    let offer = client.have_restart().unwrap().unwrap();
    assert_eq!((offer.no, offer.flags), (begun.no, 3));
    assert_eq!(client.start_restart().unwrap(), offer);
    assert_eq!(client.route("a/f").unwrap(), a);
    assert_eq!(std::fs::read(client.route("b/f").unwrap()).unwrap(), b"three");
    client.complete_restart(true).unwrap();
    assert!(!client.should_exit().unwrap());
    client.barrier().unwrap();
    client.finalize().unwrap();
    assert!(matches!(client.barrier(), Err(Error::State { .. })));
    drop(client);

    let (_, requests) = fake.end();
    let own = completes(&requests)[0];
    let files: Vec<_> = own.files.iter().map(|f| (f.path.as_str(), f.bytes)).collect();
    assert_eq!(files, [("a/f", 3), ("b/f", 5)]);
    assert!(own.valid);
    assert!(requests.iter().all(|r| !matches!(r, Request::Warn { .. })));
}

#[test]
fn unnamed_datasets_get_names() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    assert_eq!(client.begin("", FLAG_CHECKPOINT).unwrap().name, "dataset.1");
    client.complete(true).unwrap();
}

#[test]
fn a_missing_file_drops_the_dataset_and_is_named() {
    // FM-S2, FM-F10
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    write(&mut client, "there", b"x");
    client.route("dir/missing").unwrap();
    let error = client.complete(true).unwrap_err();
    assert_eq!(error.code(), Code::Dropped);
    let text = error.to_string();
    assert!(text.contains("rank 0") && text.contains("dir/missing"), "{text}");
    // The next one is possible, and nothing of the old one sticks to it.
    client.begin("e", FLAG_CHECKPOINT).unwrap();
    let place = client.route("link").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", place).unwrap();
    assert_eq!(client.complete(true).unwrap_err().code(), Code::Dropped);
    client.begin("f", FLAG_CHECKPOINT).unwrap();
    assert_eq!(client.complete(false).unwrap_err().code(), Code::Dropped);
    client.begin("g", FLAG_CHECKPOINT).unwrap();
    client.complete(true).unwrap();
    drop(client);
    let (model, requests) = fake.end();
    assert_eq!(model.complete.len(), 1);
    let valid: Vec<bool> = completes(&requests).iter().map(|o| o.valid).collect();
    assert_eq!(valid, [false, false, false, true]);
    assert!(completes(&requests).iter().all(|o| o.files.is_empty()));
}

#[test]
fn bare_names_find_their_file_at_a_restart() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    let place = write(&mut client, "dir/only", b"x");
    write(&mut client, "dir/both", b"x");
    write(&mut client, "both2/both", b"x");
    client.complete(true).unwrap();
    client.start_restart().unwrap();
    assert_eq!(client.route("only").unwrap(), place);
    assert!(matches!(client.route("both"), Err(Error::Ambiguous { .. })));
    assert_eq!(client.route("other").unwrap_err().code(), Code::NotFound);
    assert_eq!(client.route("wrong/only").unwrap_err().code(), Code::NotFound);
    assert!(client.route("both2/both").is_ok());
    std::fs::remove_file(&place).unwrap();
    assert_eq!(client.route("only").unwrap_err().code(), Code::Io);
    assert_eq!(client.complete_restart(false).unwrap_err().code(), Code::Rejected);
    assert_eq!(client.have_restart().unwrap(), None);
    assert!(matches!(client.start_restart(), Err(Error::State { .. })));
}

#[test]
fn calls_out_of_order_are_errors_and_change_nothing() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    let state = |r: Result<(), Error>| assert_eq!(r.unwrap_err().code(), Code::State);
    state(client.complete(true));
    state(client.complete_restart(true));
    state(client.start_restart().map(|_| ()));
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    state(client.begin("e", FLAG_CHECKPOINT).map(|_| ()));
    state(client.need_checkpoint().map(|_| ()));
    state(client.have_restart().map(|_| ()));
    state(client.complete_restart(true));
    state(client.finalize());
    state(client.delete("d"));
    client.complete(true).unwrap();
    client.start_restart().unwrap();
    state(client.complete(true));
    state(client.begin("e", FLAG_CHECKPOINT).map(|_| ()));
    client.complete_restart(true).unwrap();
    client.finalize().unwrap();
    state(client.finalize());
    state(client.begin("e", FLAG_CHECKPOINT).map(|_| ()));
    state(client.route("f").map(|_| ()));
}

#[test]
fn every_code_of_the_agent_comes_through() {
    let codes = [
        Code::Invalid,
        Code::State,
        Code::Timeout,
        Code::Agent,
        Code::Mismatch,
        Code::Dropped,
        Code::Rejected,
        Code::NotFound,
        Code::Ranks,
        Code::Level,
        Code::Space,
        Code::Io,
        Code::Closing,
        Code::Protocol,
        Code::Internal,
    ];
    let fake = Fake::with(
        |_| {},
        move |n, _| (n > 0).then(|| Reply::Answer(failed(codes[n - 1], "rank 3: a\u{7} cause"))),
    );
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    for code in codes {
        let error = client.begin("d", FLAG_CHECKPOINT).unwrap_err();
        assert_eq!(error.code(), code);
        assert_eq!(error.to_string(), "rank 3: a\\u{7} cause");
    }
}

#[test]
fn a_refusal_at_the_door_is_told() {
    let refuse =
        |_: usize, _: &Request| Some(Reply::Answer(failed(Code::Timeout, "rank 3 did not come")));
    let fake = Fake::with(|_| {}, refuse);
    let error = Client::connect(&fake.options(&[])).unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (Code::Timeout, "rank 3 did not come"));
}

#[test]
fn settings_go_out_once_and_the_environment_first() {
    let fake = Fake::with(|m| m.settings.push(("flush_every".into(), "7".into())), |_, _| None);
    let env = [("SCR_FLUSH", "3"), ("SCR_PREFIX", "/launch"), ("STANCHION_SET_SIZE", "4")];
    let mut options = fake.options(&env);
    let pair = |n: &str, v: &str| (n.to_owned(), v.to_owned());
    options.settings = vec![pair("flush_every", "5"), pair("SCR_COPY_TYPE", "partner")];
    let mut client = Client::connect(&options).unwrap();
    client.set("SCR_CHECKPOINT_SECONDS", "30").unwrap();
    client.set("checkpoint_s", "60").unwrap();
    assert_eq!(client.get("checkpoint_s").unwrap().as_deref(), Some("60"));
    assert_eq!(client.get("SCR_FLUSH").unwrap().as_deref(), Some("3"));
    assert!(matches!(client.set("scheme", "SINGLE"), Err(Error::Setting(_))), "too late");
    assert!(client.set("scheme", "PARTNER").is_ok(), "it is so already");
    assert_eq!(client.set("no_such", "1").unwrap_err().code(), Code::NotFound);
    assert_eq!(client.set("checkpoint_s", "soon").unwrap_err().code(), Code::Invalid);
    client.barrier().unwrap();
    client.barrier().unwrap();
    drop(client);
    let (_, requests) = fake.end();
    let Request::Hello { rank, size, settings, .. } = &requests[0] else { panic!() };
    assert_eq!((rank.0, *size), (0, 1));
    let hello = [pair("flush_every", "3"), pair("scheme", "PARTNER"), pair("set_size", "4")];
    assert_eq!(*settings, hello);
    let sent: Vec<_> = requests
        .iter()
        .filter_map(|r| match r {
            Request::Collective { own, .. } => Some(own.settings.clone()),
            _ => None,
        })
        .collect();
    let changed = vec![pair("checkpoint_s", "60"), pair("scheme", "PARTNER")];
    assert_eq!(sent, [changed, vec![]]);
}

#[test]
fn malformed_settings_stop_before_anything_is_said() {
    let fake = Fake::model();
    let error = Client::connect(&fake.options(&[("SCR_FLUSH", "often")])).unwrap_err();
    assert!(error.to_string().contains("flush_every"), "{error}");
    let error = Client::connect(&fake.options(&[("PMI_RANK", "1")])).unwrap_err();
    assert!(error.to_string().contains("PMI_SIZE"), "{error}");
    assert!(fake.end().1.is_empty());
}

#[test]
fn names_that_could_harm_are_refused_here() {
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    for name in ["..", "a/b", "a\nb", &"x".repeat(5000)] {
        assert_eq!(client.begin(name, FLAG_CHECKPOINT).unwrap_err().code(), Code::Invalid);
        assert_eq!(client.current(name).unwrap_err().code(), Code::Invalid);
        assert_eq!(client.delete(name).unwrap_err().code(), Code::Invalid);
    }
    assert_eq!(client.begin("d", 8).unwrap_err().code(), Code::Invalid);
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    for name in ["", "../f", "/etc/passwd", "a/", "a\nb", ".stanchion/x", &"x".repeat(5000)] {
        assert_eq!(client.route(name).unwrap_err().code(), Code::Invalid, "{name:.40}");
    }
    assert_eq!(client.route_within("f", 3).unwrap_err().code(), Code::Invalid);
    client.complete(true).unwrap();
    drop(client);
    assert!(completes(&fake.end().1)[0].files.is_empty());
}

#[test]
fn no_routed_path_leaves_its_directory() {
    // FM-F11
    let fake = Fake::model();
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    let dir = client.route("f").unwrap().strip_suffix("/f").unwrap().to_owned();
    let client = std::sync::Mutex::new(client);
    bolero::check!().with_type::<String>().with_iterations(2000).for_each(|name: &String| {
        if let Ok(place) = client.lock().unwrap_or_else(|p| p.into_inner()).route(name) {
            let below = place.strip_prefix(&dir).expect("below the directory");
            assert!(Path::new(below).components().all(|c| c.as_os_str() != ".."));
        }
    });
}

#[test]
fn without_an_agent_it_says_what_to_do() {
    let none = Options { environment: Environment::default(), ..Options::default() };
    let error = Client::connect(&none).unwrap_err();
    assert_eq!(error.code(), Code::Agent);
    assert_eq!(error.to_string(), "no agent: start the program with `stanchion run`");
    for nodes in ["", "::", &"x".repeat(9000)] {
        let pairs = [("STANCHION_NODES", nodes)];
        let environment = Environment::of_pairs(pairs);
        assert!(Client::connect(&Options { environment, ..Options::default() }).is_err());
    }
    let tmp = tempfile::tempdir().unwrap();
    let nodes = Some(vec![tmp.path().join("gone")]);
    let error = Client::connect(&Options { nodes, ..Options::default() }).unwrap_err();
    assert!(matches!(error, Error::Connect { slot: 0, .. }), "{error}");
}

#[test]
fn ranks_find_their_nodes_agent() {
    let fake = Fake::model();
    let nodes = format!("/no/such/socket:{}", fake.socket().display());
    let at = |rank: &str| {
        let pairs = [("STANCHION_NODES", &nodes[..]), ("PMI_RANK", rank), ("PMI_SIZE", "4")];
        let environment = Environment::of_pairs(pairs);
        Client::connect(&Options { environment, ..Options::default() })
    };
    assert!(at("1").is_err());
    assert_eq!(at("2").unwrap().identity().rank, 2);
}

#[test]
fn disabled_calls_pass_through() {
    let tmp = tempfile::tempdir().unwrap();
    let prefix = tmp.path().join("prefix");
    let prefix = prefix.to_str().unwrap();
    let pairs = [("SCR_ENABLE", "0"), ("SCR_PREFIX", prefix), ("SCR_CHECKPOINT_INTERVAL", "2")];
    let environment = Environment::of_pairs(pairs);
    let mut client = Client::connect(&Options { environment, ..Options::default() }).unwrap();
    assert!(!client.enabled());
    assert_eq!(client.have_restart().unwrap(), None);
    assert_eq!(client.start_restart().unwrap_err().code(), Code::State);
    let needed: Vec<bool> = (0..4).map(|_| client.need_checkpoint().unwrap()).collect();
    assert_eq!(needed, [false, true, false, true]);
    let begun = client.begin("d", FLAG_CHECKPOINT).unwrap();
    write(&mut client, "run/f", b"x");
    let elsewhere = tmp.path().join("elsewhere/f");
    write(&mut client, elsewhere.to_str().unwrap(), b"y");
    assert!(client.route("a\nb").is_err());
    client.complete(true).unwrap();
    assert!(Path::new(prefix).join("run/f").is_file() && elsewhere.is_file());
    assert_eq!(client.wait(begun.no, Level::Cached, 1).unwrap_err().code(), Code::Level);
    assert_eq!(client.barrier().unwrap_err().code(), Code::State);
    client.delete("d").unwrap();
    client.finalize().unwrap();
}

#[test]
fn the_jobs_file_can_disable_too() {
    let fake = Fake::with(|m| m.settings.push(("enable".into(), "0".into())), |_, _| None);
    let mut client = Client::connect(&fake.options(&[])).unwrap();
    assert!(!client.enabled());
    client.begin("d", FLAG_CHECKPOINT).unwrap();
    let place = client.route("f").unwrap();
    assert_eq!(place, format!("{}/prefix/f", fake.root().display()));
}
