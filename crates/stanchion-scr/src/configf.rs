//! `SCR_Configf`: the exported symbol, as a jump to its body in `configf.c`.
//!
//! Stable Rust can call but not define functions with variable arguments, and what a C object in a Rust
//! library defines is not exported. A jump as the very first instruction leaves registers and stack as
//! the caller made them, so the callee finds its arguments wherever the platform's convention puts them.

use std::ffi::c_char;

unsafe extern "C" {
    fn stanchion_scr_configf(format: *const c_char, ...) -> *const c_char;
}

/// `SCR_Config` with a text made from a format and its arguments as by printf.
///
/// # Safety
/// `format` is NULL or a string of printf's language that fits the arguments.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SCR_Configf(_format: *const c_char) -> *const c_char {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!("jmp {body}", body = sym stanchion_scr_configf);
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!("b {body}", body = sym stanchion_scr_configf);
    #[cfg(target_arch = "riscv64")]
    core::arch::naked_asm!("tail {body}", body = sym stanchion_scr_configf);
}
