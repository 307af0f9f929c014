//! Regions of memory across the C boundary.

use super::{Error, stn_ctx};
use super::{
    Regions, call, call_with_regions, check_name_buffer, check_out, copy_out, store, text,
};
use crate::regions::{Region, RegionMut};
use stanchion_format::regions::REGIONS_MAX;
use stanchion_mem::maps::Span;
use std::ffi::{c_char, c_int, c_void};

/// `STN_INCREMENTAL`.
const INCREMENTAL: u32 = 1 << 17;
/// `STN_REGION_NO_IO`.
const REGION_NO_IO: u32 = 1;
/// `STN_COW`.
const COW: u32 = 1 << 16;

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context. As long as the region is protected, `start` points to `bytes` bytes during every
/// [`stn_checkpoint`], readable and changed by nobody else, and during every [`stn_restore`], writable and used
/// by nobody else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_protect(
    ctx: *mut stn_ctx,
    region_id: u64,
    start: *mut c_void,
    bytes: usize,
) -> c_int {
    const CALL: &str = "protect";
    let refuse = |what| Err(Error::Argument { call: CALL, what });
    let protect = |c: &mut crate::Client, regions: &mut Regions| {
        if start.is_null() && bytes != 0 {
            return refuse("a null pointer with a size");
        }
        if isize::try_from(bytes).is_err() || (start as usize).checked_add(bytes).is_none() {
            return refuse("the region goes beyond the address space");
        }
        if regions.len() >= REGIONS_MAX && !regions.contains_key(&region_id) {
            return refuse("a rank may protect 65536 regions, not more");
        }
        let old = regions.insert(region_id, (start.cast(), bytes));
        if old.is_some_and(|old| old != (start.cast(), bytes)) {
            // Where it was may be unmapped next.
            c.settle();
        }
        if bytes > 0 && old != Some((start.cast(), bytes)) {
            c.gather_at(Span { start: start as usize, len: bytes });
        }
        c.expect(old.map_or(0, |(_, bytes)| bytes) as u64, bytes as u64)
    };
    // SAFETY: as the caller promises.
    unsafe { call_with_regions(ctx, protect) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_unprotect(ctx: *mut stn_ctx, region_id: u64) -> c_int {
    let unprotect = |c: &mut crate::Client, regions: &mut Regions| match regions.remove(&region_id)
    {
        Some((_, bytes)) => {
            c.settle();
            c.declare_no_io(region_id, false);
            c.expect(bytes as u64, 0)
        }
        None => Err(Error::NoRegion { call: "unprotect", id: region_id }),
    };
    // SAFETY: as the caller promises.
    unsafe { call_with_regions(ctx, unprotect) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_advise(ctx: *mut stn_ctx, region_id: u64, advice: u32) -> c_int {
    const CALL: &str = "advise";
    let advise = |c: &mut crate::Client, regions: &mut Regions| {
        if advice & !REGION_NO_IO != 0 {
            return Err(Error::Argument { call: CALL, what: "unknown bits in advice" });
        }
        if !regions.contains_key(&region_id) {
            return Err(Error::NoRegion { call: CALL, id: region_id });
        }
        c.declare_no_io(region_id, advice & REGION_NO_IO != 0);
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { call_with_regions(ctx, advise) }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `buf` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_cow_text(ctx: *mut stn_ctx, buf: *mut c_char, len: usize) -> c_int {
    // SAFETY: as the caller promises.
    unsafe {
        copy_out("", buf, len);
        call(ctx, |c| {
            check_out("cow_text", buf)?;
            copy_out(&c.copied_by().1, buf, len);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the text has its length; `no` is NULL or writable; the regions are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_checkpoint(
    ctx: *mut stn_ctx,
    name: *const c_char,
    name_len: usize,
    flags: u32,
    no: *mut u64,
) -> c_int {
    // SAFETY: as the caller promises, here and at stn_protect: a region that is not empty has a pointer that
    // is not NULL to `len` readable bytes, which nobody changes now.
    unsafe {
        store(no, 0);
        call_with_regions(ctx, |c, regions| {
            let name = text("dataset", name, name_len)?;
            let regions: Vec<Region<'_>> = regions
                .iter()
                .map(|(id, (start, len))| Region {
                    id: *id,
                    bytes: if *len == 0 { &[] } else { std::slice::from_raw_parts(*start, *len) },
                })
                .collect();
            let kind = flags & !(INCREMENTAL | COW);
            let begun = match flags & (INCREMENTAL | COW) {
                0 => c.checkpoint(name, kind, &regions)?,
                COW => c.checkpoint_cow(name, kind, &regions)?,
                INCREMENTAL => c.checkpoint_incremental(name, kind, &regions)?,
                _ => c.checkpoint_cow_incremental(name, kind, &regions)?,
            };
            store(no, begun.no.0);
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; `bytes` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_region_bytes(
    ctx: *mut stn_ctx,
    region_id: u64,
    bytes: *mut usize,
) -> c_int {
    const CALL: &str = "region_bytes";
    // SAFETY: as the caller promises.
    unsafe {
        store(bytes, 0);
        call(ctx, |c| {
            check_out(CALL, bytes)?;
            let found = c.regions_stored()?.into_iter().find(|r| r.id == region_id);
            let region = found.ok_or(Error::NoRegion { call: CALL, id: region_id })?;
            // A file of this machine is never larger than its address space can say.
            store(bytes, usize::try_from(region.bytes).unwrap_or(usize::MAX));
            Ok(())
        })
    }
}

/// See `stanchion.h`.
///
/// # Safety
/// `ctx` is NULL or a context; the buffer has its room; `no` is NULL or writable; the regions are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stn_restore(
    ctx: *mut stn_ctx,
    name: *mut c_char,
    name_size: usize,
    no: *mut u64,
) -> c_int {
    const CALL: &str = "restore";
    // SAFETY: as the caller promises, here and at stn_protect; no two of the slices overlap, for that is looked
    // at first.
    unsafe {
        store(no, 0);
        copy_out("", name, name_size);
        call_with_regions(ctx, |c, regions| {
            check_name_buffer(CALL, name, name_size)?;
            if overlap(regions) {
                return Err(Error::Argument { call: CALL, what: "two regions overlap" });
            }
            let mut regions: Vec<RegionMut<'_>> = regions
                .iter()
                .map(|(id, (start, len))| RegionMut {
                    id: *id,
                    bytes: match *len {
                        0 => &mut [],
                        len => std::slice::from_raw_parts_mut(*start, len),
                    },
                })
                .collect();
            let offer = c.restore(&mut regions)?;
            store(no, offer.no.0);
            copy_out(&offer.name, name, name_size);
            Ok(())
        })
    }
}

fn overlap(regions: &Regions) -> bool {
    let mut spans: Vec<(usize, usize)> =
        regions.values().filter(|(_, len)| *len > 0).map(|(p, len)| (*p as usize, *len)).collect();
    spans.sort_unstable();
    spans.windows(2).any(|w| w[0].0 + w[0].1 > w[1].0)
}
