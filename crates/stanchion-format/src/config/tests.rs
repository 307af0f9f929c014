use super::*;

#[test]
fn defaults_are_values_of_their_units() {
    for s in SETTINGS {
        assert!(s.default.is_empty() || canonical(s, s.default).is_ok(), "{}", s.name);
    }
}

#[test]
fn names_are_found_and_unknown_ones_explained() {
    assert_eq!(find("SCR_COPY_TYPE").unwrap().name, "scheme");
    assert_eq!(find("STANCHION_SET_SIZE").unwrap().name, "set_size");
    let text = find("flush_evry").unwrap_err().to_string();
    assert!(text.contains("did you mean 'flush_every'"), "{text}");
}

#[test]
fn malformed_values_say_what_is_taken() {
    let mut s = Settings::default();
    for (name, value) in [
        ("set_size", "1"),
        ("scheme", "RAID"),
        ("flush_every", "-3"),
        ("chunk_bytes", "99T"),
        ("fetch", "maybe"),
        ("prefix", "a\nb"),
    ] {
        let text = s.set(name, value).unwrap_err().to_string();
        assert!(text.contains(name) && text.contains("takes"), "{text}");
    }
}

#[test]
fn ours_before_scr_before_file() {
    let vars = [
        ("SCR_FLUSH", "3"),
        ("STANCHION_FLUSH_EVERY", "4"),
        ("SCR_CRC_ON_COPY", "1"),
        ("SCR_NONSENSE", "1"),
    ];
    let mut e = from_environment(vars.iter().map(|(a, b)| (a.to_string(), b.to_string())));
    let (file, _) = from_file("# x\nSCR_FLUSH=9\nset_size = 4 # y\n").unwrap();
    e.settings.fill_from(&file);
    assert_eq!(e.settings.number("flush_every"), 4);
    assert_eq!(e.settings.number("set_size"), 4);
    assert_eq!(e.without_meaning.len(), 1);
    assert_eq!(e.unknown, ["SCR_NONSENSE"]);
}

#[test]
fn the_application_cannot_move_the_prefix() {
    let mut s = Settings::default();
    s.set("prefix", "/p").unwrap();
    assert!(s.set_by_application("SCR_PREFIX", "/p", false).is_ok());
    assert!(matches!(
        s.set_by_application("SCR_PREFIX", "/q", false),
        Err(ConfigError::TooLate { .. })
    ));
    assert!(s.set_by_application("SCR_COPY_TYPE", "partner", false).is_ok());
    assert!(s.set_by_application("SCR_COPY_TYPE", "single", true).is_err());
    assert!(s.set_by_application("SCR_FLUSH", "2", true).is_ok());
}
