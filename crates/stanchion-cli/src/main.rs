//! `stanchion`: keeps parallel jobs alive. One executable for everything.

mod agent;
mod args;
mod bench;
mod config;
mod exit;
mod export;
mod jobdir;
mod out;
mod prefix;
mod procs;
mod profile;
mod prune;
mod run;
mod scavenge;
mod settings;
mod shm;
mod status;
mod words;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use exit::{Exit, Failed};
use std::process::ExitCode;

fn main() -> ExitCode {
    // Usage errors end here with code 2, help and version with 0.
    let cli = Cli::parse();
    // The one command whose code is that of the program it runs.
    let code = match &cli.command {
        Command::Profile(args) => profile::profile(args),
        command => dispatch(command).map(|exit| exit as u8),
    };
    ExitCode::from(code.unwrap_or_else(|failed| {
        out::say(&format!("error: {:#}", failed.error));
        failed.exit as u8
    }))
}

fn dispatch(command: &Command) -> Result<Exit, Failed> {
    match command {
        Command::List(args) => prefix::list(args),
        Command::Inspect(args) => prefix::inspect(args),
        Command::Verify(args) => prefix::verify(args),
        Command::Export(args) => export::export(args),
        Command::Pin(args) => prune::pin(args),
        Command::Unpin(args) => prune::unpin(args),
        Command::Prune(args) => prune::prune(args),
        Command::Halt(args) => prefix::halt(args),
        Command::Status(args) => status::status(args),
        Command::Config(args) => config::config(args),
        Command::Help { topic } => help(topic.as_deref()),
        Command::Run(args) => run::run(args),
        Command::Scavenge(args) => scavenge::scavenge(args),
        Command::Agent(_) => agent::agent(),
        Command::Bench(args) => bench::bench(args),
        // `main` has taken it.
        Command::Profile(_) => Ok(Exit::Success),
    }
}

fn help(topic: Option<&str>) -> Result<Exit, Failed> {
    let mut cli = Cli::command();
    cli.build();
    let text = match topic {
        None => cli.render_long_help().to_string(),
        Some("exit-codes") => exit::help(),
        Some(name) => match cli.find_subcommand_mut(name) {
            Some(command) => command.render_long_help().to_string(),
            None => {
                let shown = stanchion_format::config::Shown::new(name);
                let error = anyhow::anyhow!("there is no help on '{shown}'; see `stanchion help`");
                return Err(Failed::new(Exit::Usage, error));
            }
        },
    };
    out::print(&text)?;
    Ok(Exit::Success)
}
