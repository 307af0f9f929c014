//! Compiles the functions that Rust cannot define: those that take a variable number of arguments.

fn main() {
    println!("cargo::rerun-if-changed=src/printf.c");
    // What other crates export stays out of this library's interface.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    cc::Build::new().file("src/printf.c").std("c11").warnings(true).compile("stanchion_printf");
}
