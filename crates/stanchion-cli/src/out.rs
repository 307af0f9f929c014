//! Output that people and programs read: tables, JSON, units. A closed pipe is no error.

use crate::exit::Failed;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use std::io::{ErrorKind, Write};

/// Writes to standard output; that nobody reads on is fine.
pub fn print(text: &str) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(e).context("standard output cannot be written").into())
        }
        _ => Ok(()),
    }
}

/// Writes a JSON document.
pub fn print_json(value: &serde_json::Value) -> Result<(), Failed> {
    print(&format!("{value:#}\n"))
}

/// Says something to the user; that nobody reads it is fine, too.
pub fn say(text: &str) {
    let _nobody_listens = writeln!(std::io::stderr().lock(), "stanchion: {text}");
}

/// A table without lines; the columns named in `right` are aligned to the right.
pub fn table(header: &[&str], right: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if !header.is_empty() {
        table.set_header(header.iter().copied());
    }
    for row in rows {
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut text = String::new();
    for line in table.lines() {
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `1.25 s`, `12 ms`, `2 min 05 s`.
pub fn millis(ms: u64) -> String {
    match ms {
        0..=999 => format!("{ms} ms"),
        1_000..=119_999 => format!("{:.2} s", ms as f64 / 1000.0),
        120_000..=7_199_999 => format!("{} min {:02} s", ms / 60_000, ms / 1000 % 60),
        _ => format!("{} h {:02} min", ms / 3_600_000, ms / 60_000 % 60),
    }
}

/// Seconds since 1970 as `2025-01-31 12:00:00Z`.
pub fn utc(unix_s: u64) -> String {
    let (days, rest) = ((unix_s / 86_400) as i64, unix_s % 86_400);
    let (y, m, d) = civil(days);
    format!("{y:04}-{m:02}-{d:02} {:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Year, month and day of a day since 1970 in the Gregorian calendar. Years are counted from March, so
/// that the leap day comes last.
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468; // days since 0000-03-01
    let era = z.div_euclid(146_097);
    let day = z.rem_euclid(146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let d = day - (153 * month + 2) / 5 + 1;
    let m = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(m <= 2), m, d)
}

/// The day since 1970 of a date; the inverse of [`civil`].
fn days(y: i64, m: i64, d: i64) -> i64 {
    let y = if m <= 2 { y - 1 } else { y };
    let era = y.div_euclid(400);
    let year = y.rem_euclid(400);
    let month = (m + 9) % 12;
    let day = (153 * month + 2) / 5 + d - 1;
    era * 146_097 + year * 365 + year / 4 - year / 100 + day - 719_468
}

/// A point in time as users give it: seconds since 1970, `2030-01-31T12:00[:00]Z`, or from now `+90s`,
/// `+15m`, `+2h`, `+1d`.
pub fn parse_time(text: &str, now_unix_s: u64) -> Option<u64> {
    if let Some(rest) = text.strip_prefix('+') {
        let (number, factor) = match rest.chars().last()? {
            's' => (&rest[..rest.len() - 1], 1),
            'm' => (&rest[..rest.len() - 1], 60),
            'h' => (&rest[..rest.len() - 1], 3600),
            'd' => (&rest[..rest.len() - 1], 86_400),
            _ => (rest, 1),
        };
        return now_unix_s.checked_add(number.parse::<u64>().ok()?.checked_mul(factor)?);
    }
    if let Ok(unix_s) = text.parse() {
        return Some(unix_s);
    }
    let (date, time) = text.strip_suffix('Z')?.split_once(['T', ' '])?;
    let numbers = |text: &str, sep: char| -> Option<Vec<i64>> {
        text.split(sep).map(|part| part.parse().ok()).collect()
    };
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let ([y @ 1970..=9999, m @ 1..=12, d @ 1..=31], [h @ 0..=23, min @ 0..=59, sec @ ..]) =
        (&date[..], &time[..])
    else {
        return None;
    };
    let s = match sec {
        [] => 0,
        [s @ 0..=59] => *s,
        _ => return None,
    };
    let day = days(*y, *m, *d);
    if civil(day) != (*y, *m, *d) {
        return None;
    }
    u64::try_from(day * 86_400 + h * 3600 + min * 60 + s).ok()
}

/// The seconds since 1970.
pub fn unix_s() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_and_out() {
        // `date -u -d @951782400` and so on.
        for (unix, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (951_782_400, "2000-02-29 00:00:00Z"),
            (1_709_210_096, "2024-02-29 12:34:56Z"),
            (4_107_542_399, "2100-02-28 23:59:59Z"),
        ] {
            assert_eq!(utc(unix), text);
            assert_eq!(parse_time(text, 0), Some(unix));
        }
        assert_eq!(parse_time("+2h", 100), Some(7300));
        assert_eq!(parse_time("1700000000", 0), Some(1_700_000_000));
        assert_eq!(parse_time("2024-02-29T12:34Z", 0), Some(1_709_210_040));
        for bad in
            ["", "+", "+xh", "tomorrow", "2023-02-29T00:00:00Z", "2024-01-01T24:00:00Z", "é", "+é"]
        {
            assert_eq!(parse_time(bad, 0), None, "{bad}");
        }
    }

    #[test]
    fn sizes_and_durations_read_well() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
        assert_eq!(millis(12), "12 ms");
        assert_eq!(millis(1250), "1.25 s");
        assert_eq!(millis(125_000), "2 min 05 s");
    }
}
