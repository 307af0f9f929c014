//! The notation of SCR's configuration files and of `SCR_Config`: one line, one setting, one question,
//! or members of an entry (`CKPT=0 TYPE=XOR SET_SIZE=4`).

use crate::limits;

/// Tables of entries with members.
pub const TABLES: &[&str] = &["CKPT", "STORE", "GROUPS"];
/// Longest line, bytes.
pub const LINE_BYTES_MAX: usize = 2 * limits::SETTING_BYTES_MAX;

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrLine {
    /// Nothing.
    Empty,
    /// `NAME`: what is its value?
    Ask(String),
    /// `NAME=VALUE`; an empty value takes it back.
    Set(String, String),
    /// `TABLE=ENTRY MEMBER`: what is the member's value?
    AskMember {
        /// The table.
        table: String,
        /// The entry.
        entry: String,
        /// The member.
        member: String,
    },
    /// `TABLE=ENTRY MEMBER=VALUE ...`; the members not named stay as they are.
    Members {
        /// The table.
        table: String,
        /// The entry.
        entry: String,
        /// Names and values.
        members: Vec<(String, String)>,
    },
}

/// Why a line is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScrLineError {
    /// Too many bytes.
    #[error("the line is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// A newline or other control character.
    #[error("the line holds a control character")]
    Control,
    /// `=` without a name.
    #[error("a '=' has no name before it")]
    NoName,
    /// A quotation mark without its partner, or text after it.
    #[error("a quoted value does not end with its quotation mark")]
    Quote,
    /// Several settings, or members of something that has none.
    #[error("only CKPT, STORE and GROUPS have members; settings come one by one")]
    Several,
    /// A question and a setting in one.
    #[error("a line sets or asks, not both")]
    Both,
}

/// The name, and the value after its `=`.
type Item = (String, Option<String>);

/// Takes one item off the front; `None` at the end.
fn item(rest: &mut &str) -> Result<Option<Item>, ScrLineError> {
    *rest = rest.trim_start();
    if rest.is_empty() {
        return Ok(None);
    }
    let end = rest.find([' ', '\t', '=']).unwrap_or(rest.len());
    let (name, after) = rest.split_at(end);
    if name.is_empty() {
        return Err(ScrLineError::NoName);
    }
    let name = name.to_owned();
    let Some(value) = after.trim_start().strip_prefix('=') else {
        *rest = after;
        return Ok(Some((name, None)));
    };
    let value = value.trim_start();
    let (value, after) = match value.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"').ok_or(ScrLineError::Quote)?,
        None => value.split_at(value.find([' ', '\t']).unwrap_or(value.len())),
    };
    if !after.is_empty() && !after.starts_with([' ', '\t']) {
        return Err(ScrLineError::Quote);
    }
    *rest = after;
    Ok(Some((name, Some(value.to_owned()))))
}

/// Reads a line.
pub fn parse(line: &str) -> Result<ScrLine, ScrLineError> {
    if line.len() > LINE_BYTES_MAX {
        return Err(ScrLineError::TooLong);
    }
    if line.chars().any(|c| c.is_control() && c != '\t') {
        return Err(ScrLineError::Control);
    }
    let mut rest = line;
    let mut items = Vec::new();
    while let Some(item) = item(&mut rest)? {
        items.push(item);
    }
    let mut items = items.into_iter();
    let Some((first, value)) = items.next() else { return Ok(ScrLine::Empty) };
    let more: Vec<Item> = items.collect();
    let Some(entry) = value else {
        return if more.is_empty() { Ok(ScrLine::Ask(first)) } else { Err(ScrLineError::Both) };
    };
    if !TABLES.contains(&first.as_str()) {
        return if more.is_empty() {
            Ok(ScrLine::Set(first, entry))
        } else {
            Err(ScrLineError::Several)
        };
    }
    if let [(member, None)] = &more[..] {
        return Ok(ScrLine::AskMember { table: first, entry, member: member.clone() });
    }
    let members: Option<Vec<_>> = more.into_iter().map(|(n, v)| Some((n, v?))).collect();
    let members = members.ok_or(ScrLineError::Both)?;
    Ok(ScrLine::Members { table: first, entry, members })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, value: &str) -> Result<ScrLine, ScrLineError> {
        Ok(ScrLine::Set(name.into(), value.into()))
    }

    #[test]
    fn the_forms_of_the_users_guide() {
        assert_eq!(parse("SCR_FLUSH=10"), set("SCR_FLUSH", "10"));
        assert_eq!(parse(" SCR_FLUSH = 10 "), set("SCR_FLUSH", "10"));
        assert_eq!(parse("SCR_FLUSH="), set("SCR_FLUSH", ""));
        assert_eq!(parse("SCR_FLUSH"), Ok(ScrLine::Ask("SCR_FLUSH".into())));
        assert_eq!(parse("P=\"/a b/=/c\""), set("P", "/a b/=/c"));
        assert_eq!(parse("P=a=b=c"), set("P", "a=b=c"));
        assert_eq!(parse(" \t"), Ok(ScrLine::Empty));
        let (table, entry) = (String::from("CKPT"), String::from("0"));
        let members = vec![("TYPE".into(), "XOR".into()), ("SET_SIZE".into(), "16".into())];
        let line = ScrLine::Members { table: table.clone(), entry: entry.clone(), members };
        assert_eq!(parse("CKPT=0 TYPE=XOR SET_SIZE=16"), Ok(line));
        let member = "TYPE".into();
        assert_eq!(parse("CKPT=0 TYPE"), Ok(ScrLine::AskMember { table, entry, member }));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert_eq!(parse("=3"), Err(ScrLineError::NoName));
        assert_eq!(parse("A B"), Err(ScrLineError::Both));
        assert_eq!(parse("A=1 B=2"), Err(ScrLineError::Several));
        assert_eq!(parse("CKPT=0 TYPE=XOR SET_SIZE"), Err(ScrLineError::Both));
        assert_eq!(parse("A=\"x"), Err(ScrLineError::Quote));
        assert_eq!(parse("A=\"x\"y"), Err(ScrLineError::Quote));
        assert_eq!(parse("A=1\nB=2"), Err(ScrLineError::Control));
        assert_eq!(parse(&"x".repeat(LINE_BYTES_MAX + 1)), Err(ScrLineError::TooLong));
    }

    #[test]
    fn any_text_is_read_or_refused() {
        bolero::check!().with_type::<String>().for_each(|line| {
            if let Ok(ScrLine::Set(name, _) | ScrLine::Ask(name)) = parse(line) {
                assert!(!name.is_empty());
            }
        });
    }
}
