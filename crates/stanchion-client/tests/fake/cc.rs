//! Compiles and runs C and C++ programs against the libraries of this build.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Where cargo put the shared libraries that belong to this test.
pub fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn compiler(variable: &str, default: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| default.into())
}

/// `sources` as one program in `dir`, as C11 or C++17; warnings are errors.
pub fn compile(dir: &Path, cpp: bool, library: &str, sources: &[PathBuf]) -> PathBuf {
    compile_with(dir, cpp, library, sources, &[])
}

/// The same, with further directories for headers.
pub fn compile_with(
    dir: &Path,
    cpp: bool,
    library: &str,
    sources: &[PathBuf],
    headers: &[PathBuf],
) -> PathBuf {
    let name = sources[0].file_stem().unwrap().to_str().unwrap();
    let out = dir.join(format!("{name}{}", if cpp { "-cpp" } else { "-c" }));
    let mut command = if cpp {
        let mut c = Command::new(compiler("CXX", "c++"));
        c.args(["-std=c++17", "-x", "c++"]);
        c
    } else {
        let mut c = Command::new(compiler("CC", "cc"));
        c.arg("-std=c11");
        c
    };
    let libraries = libraries();
    let built = command
        .args(["-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread", "-o"])
        .arg(&out)
        .arg("-I")
        .arg(repository().join("include"))
        .args(headers.iter().flat_map(|h| [std::ffi::OsStr::new("-I"), h.as_os_str()]))
        .args(sources)
        .args(["-x", "none", "-L"])
        .arg(&libraries)
        .arg(format!("-l{library}"))
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    out
}

/// Runs a program with nothing of ours in its environment but `variables`.
pub fn run(program: &Path, arguments: &[&str], variables: &[(&str, &str)], cwd: &Path) -> Output {
    let mut command = Command::new(program);
    // Cargo's may lead to a library of an earlier build; the program knows its own.
    command.env_remove("LD_LIBRARY_PATH");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["STANCHION_", "SCR_", "PMI", "OMPI_", "SLURM_"].iter().any(|p| name.starts_with(p)) {
            command.env_remove(name);
        }
    }
    command.args(arguments).envs(variables.iter().copied()).current_dir(cwd).output().unwrap()
}

/// What it printed on standard error, after it ended well.
pub fn good(output: Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}\n{out}\n{text}", output.status);
    text
}

/// The symbols that a shared library exports.
pub fn exports(library: &str) -> Vec<String> {
    let path = libraries().join(format!("lib{library}.so"));
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(path).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<_> =
        text.lines().filter_map(|l| l.split_whitespace().nth(2)).map(str::to_owned).collect();
    names.sort();
    names
}

/// One function: its result and the types of its arguments, in C's words without names and spaces.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prototype {
    pub name: String,
    pub result: String,
    pub arguments: Vec<String>,
}

fn without_comments(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        out += before;
        rest = after.split_once("*/").unwrap().1;
    }
    out + rest
}

/// Drops the argument's name and all spaces: `const char *name` is `constchar*`.
fn c_type(declaration: &str) -> String {
    let d = declaration.trim();
    if d == "void" || d == "..." {
        return d.into();
    }
    let end = d.trim_end_matches(|c: char| c.is_alphanumeric() || c == '_').len();
    d[..end].replace(' ', "")
}

/// The functions that a header declares, of names that begin with `prefix`.
pub fn prototypes_of_header(header: &str, prefix: &str) -> Vec<Prototype> {
    let text = without_comments(header);
    let code: String =
        text.lines().filter(|l| !l.trim_start().starts_with('#')).collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for statement in code.split([';', '{', '}']) {
        let Some((head, arguments)) = statement.split_once('(') else { continue };
        let head = head.trim();
        let start = head.rfind(|c: char| !(c.is_alphanumeric() || c == '_')).map_or(0, |i| i + 1);
        let (result, name) = head.split_at(start);
        if !name.starts_with(prefix) {
            continue;
        }
        let arguments = arguments.trim().trim_end_matches(')');
        let arguments = arguments.split(',').map(c_type).filter(|t| t != "void").collect();
        found.push(Prototype { name: name.into(), result: result.replace(' ', ""), arguments });
    }
    found.sort();
    found
}

fn rust_type(text: &str) -> String {
    let text = text.trim();
    for (pointer, qualifier) in [("*const ", "const"), ("*mut ", "")] {
        if let Some(to) = text.strip_prefix(pointer) {
            return format!("{qualifier}{}*", rust_type(to));
        }
    }
    match text {
        "c_char" => "char",
        "c_int" => "int",
        "c_void" => "void",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        other => other,
    }
    .into()
}

/// The functions that a Rust source exports to C, in C's words.
pub fn prototypes_of_rust(source: &str, prefix: &str) -> Vec<Prototype> {
    let code = source.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for part in code.split("extern \"C\" fn ").skip(1) {
        let (name, rest) = part.split_once('(').unwrap();
        if !name.starts_with(prefix) {
            continue;
        }
        let (arguments, rest) = rest.split_once(')').unwrap();
        let result = rest.split_once('{').unwrap().0.trim();
        let result = result.strip_prefix("->").map_or("void".into(), rust_type);
        let arguments =
            arguments.split(',').filter_map(|a| Some(rust_type(a.split_once(':')?.1))).collect();
        found.push(Prototype { name: name.into(), result, arguments });
    }
    found.sort();
    found
}
