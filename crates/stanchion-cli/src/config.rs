//! `stanchion config`.

use crate::args::ConfigArgs;
use crate::exit::{Exit, Failed, OrExit};
use crate::{out, settings};
use anyhow::Context;
use serde_json::json;
use stanchion_format::config::{self, Scope, Setting};

/// Shows settings, their values and origins.
pub fn config(args: &ConfigArgs) -> Result<Exit, Failed> {
    if args.markdown {
        out::print(&config::markdown())?;
        return Ok(Exit::Success);
    }
    let mut options = settings::pairs(&args.set)?;
    if let Some(prefix) = &args.prefix {
        options.push(("prefix".into(), prefix.to_string_lossy().into_owned()));
    }
    let gathered = settings::gather(&options)?;
    for warning in &gathered.warnings {
        out::say(&format!("warning: {warning}"));
    }
    let rows: Vec<&'static Setting> = match &args.name {
        Some(name) => vec![config::find(name).context("stanchion config").or_exit(Exit::Usage)?],
        None => config::SETTINGS.iter().collect(),
    };
    if args.json {
        let list: Vec<serde_json::Value> = rows
            .iter()
            .map(|s| {
                json!({
                    "name": s.name, "scr": s.scr, "value": gathered.settings.text(s.name), "default": s.default,
                    "unit": s.unit.as_str(), "when": when(s.scope),
                    "origin": gathered.origin(s.name).to_string(), "help": s.help,
                })
            })
            .collect();
        out::print_json(&json!(list))?;
    } else if args.name.is_some() {
        out::print(&one(rows[0], &gathered))?;
    } else {
        let table = rows
            .iter()
            .map(|s| {
                let value = gathered.settings.text(s.name);
                let value = if value.is_empty() { "-" } else { value };
                vec![
                    s.name.into(),
                    value.into(),
                    gathered.origin(s.name).to_string(),
                    s.help.into(),
                ]
            })
            .collect();
        out::print(&out::table(&["SETTING", "VALUE", "FROM", "WHAT"], &[], table))?;
    }
    Ok(Exit::Success)
}

fn when(scope: Scope) -> &'static str {
    match scope {
        Scope::Launch => "launch",
        Scope::Job => "job",
        Scope::Live => "live",
    }
}

fn one(setting: &Setting, gathered: &settings::Gathered) -> String {
    let dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let rows = vec![
        vec!["name".into(), setting.name.into()],
        vec!["environment".into(), format!("STANCHION_{}", setting.name.to_uppercase())],
        vec!["SCR's name".into(), dash(setting.scr.unwrap_or(""))],
        vec!["value".into(), dash(gathered.settings.text(setting.name))],
        vec!["from".into(), gathered.origin(setting.name).to_string()],
        vec!["default".into(), dash(setting.default)],
        vec!["takes".into(), setting.unit.as_str()],
        vec!["can change".into(), when(setting.scope).into()],
        vec!["what".into(), setting.help.into()],
    ];
    out::table(&[], &[], rows)
}
