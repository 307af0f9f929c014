//! Compiles the one function that Rust cannot define: it takes a variable number of arguments.

fn main() {
    println!("cargo::rerun-if-changed=src/configf.c");
    // What libstanchion and other crates export stays out of this library's interface.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    cc::Build::new().file("src/configf.c").std("c11").warnings(true).compile("scr_configf");
}
