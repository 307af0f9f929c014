//! Which mappings a snapshot by faults or by fork must leave alone.

use std::io::Read;

use rustix::io::Errno;

use crate::kernel::page_size;

/// A range of the application's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its first byte.
    pub start: usize,
    /// Its bytes.
    pub len: usize,
}

impl Span {
    /// The address behind its last byte.
    pub fn end(&self) -> usize {
        self.start.saturating_add(self.len)
    }

    /// Its whole pages; empty if there are none.
    pub(crate) fn pages(&self, page: usize) -> Span {
        let start = self.start.checked_next_multiple_of(page).unwrap_or(self.end());
        let end = self.end() / page * page;
        Span { start, len: end.saturating_sub(start) }
    }

    /// All pages that it touches.
    pub(crate) fn touched(&self, page: usize) -> Span {
        let start = self.start / page * page;
        let end = self.end().checked_next_multiple_of(page).unwrap_or(usize::MAX / page * page);
        Span { start, len: if self.len == 0 { 0 } else { end - start } }
    }
}

/// What a region is to be good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A forked child is to read it.
    Fork,
    /// Its pages are to be write-protected.
    Protect,
}

/// Why a region must be copied at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Some of it is not mapped.
    Unmapped,
    /// Others write to it too: a child would see what is written later, a protection not hold them.
    Shared,
    /// MADV_DONTFORK: a child does not have it, and hardware may write to it.
    NotForked,
    /// MADV_WIPEONFORK: a child finds zeros.
    WipedOnFork,
    /// Memory of hugetlbfs.
    HugePages,
    /// Memory of a device.
    Device,
    /// A private mapping of a file; only of concern to `Purpose::Protect`.
    File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    start: usize,
    end: usize,
    file: bool,
    why: Option<Why>,
}

/// Tells which of these regions a snapshot must not be made of, each with the first reason found.
///
/// It reads /proc/self/smaps, for which the kernel looks at every page of the process: once at a
/// checkpoint or, better, when regions are declared.
pub fn unsuitable(regions: &[Span], purpose: Purpose) -> Result<Vec<(usize, Why)>, Errno> {
    Ok(judge(&read("/proc/self/smaps")?, regions, purpose))
}

/// The same without MADV_DONTFORK and MADV_WIPEONFORK, from /proc/self/maps, at a hundredth of the time.
pub fn quickly_unsuitable(regions: &[Span], purpose: Purpose) -> Result<Vec<(usize, Why)>, Errno> {
    Ok(judge(&read("/proc/self/maps")?, regions, purpose))
}

/// What was found of regions, for as long as they and the mappings they are in stay as they were.
///
/// A whole mapping whose advice alone changes meanwhile is not seen: a child then dies of MADV_DONTFORK, after which
/// [`Judged::forget`] is due; of MADV_WIPEONFORK it would find zeros, which the caller must exclude.
#[derive(Debug, Default)]
pub struct Judged {
    regions: Vec<Span>,
    maps: Vec<Mapping>,
    /// The same, with what takes long to find out.
    full: Vec<Mapping>,
}

impl Judged {
    /// As [`unsuitable`], mostly at a hundredth of the time.
    pub fn unsuitable(
        &mut self,
        regions: &[Span],
        purpose: Purpose,
    ) -> Result<Vec<(usize, Why)>, Errno> {
        let page = page_size();
        let mut spans: Vec<(usize, usize)> =
            regions.iter().map(|r| r.touched(page)).map(|r| (r.start, r.end())).collect();
        spans.sort_unstable();
        let mut furthest = 0;
        for (_, end) in &mut spans {
            furthest = furthest.max(*end);
            *end = furthest;
        }
        let of_regions = |m: &Mapping| {
            let before = spans.partition_point(|(start, _)| *start < m.end);
            before > 0 && spans[before - 1].1 > m.start
        };
        let mut maps = read("/proc/self/maps")?;
        maps.retain(of_regions);
        if self.regions != regions || self.maps != maps {
            self.forget();
            self.full = read("/proc/self/smaps")?;
            self.full.retain(of_regions);
            (self.regions, self.maps) = (regions.to_vec(), maps);
        }
        Ok(judge(&self.full, regions, purpose))
    }

    /// The next look is a full one.
    pub fn forget(&mut self) {
        *self = Judged::default();
    }
}

/// Gathers memory in huge pages, as far as the system grants them (MADV_COLLAPSE: Linux 6.1). What is in it stays; it is
/// copied once for that. What is not there, or was not touched yet, may become huge pages later, or stays as it is.
pub fn gather_huge_pages(memory: Span) {
    let whole = memory.pages(page_size());
    advise(whole, libc::MADV_HUGEPAGE);
    advise(whole, libc::MADV_COLLAPSE);
}

/// The same page by page as long as `go_on` says so, of what is there now; and nothing where the system's setting is that
/// nobody gets huge pages, which MADV_COLLAPSE does not heed. One that cannot be had now does not keep the others back.
pub fn gather_huge_pages_while(memory: Span, go_on: impl Fn() -> bool) {
    const SYSTEM: &str = "/sys/kernel/mm/transparent_hugepage";
    let setting = |name: &str| std::fs::read_to_string(format!("{SYSTEM}/{name}"));
    if setting("enabled").is_ok_and(|s| s.contains("[never]")) {
        return;
    }
    let size = setting("hpage_pmd_size").ok().and_then(|s| s.trim().parse().ok());
    let size: usize = size.filter(|s: &usize| s.is_power_of_two()).unwrap_or(2 << 20);
    let whole = memory.pages(page_size());
    let end = whole.start.saturating_add(whole.len);
    let mut at = whole.start;
    while at < end && go_on() {
        let next = (at + 1).checked_next_multiple_of(size).map_or(end, |next| next.min(end));
        if next - at == size {
            advise(Span { start: at, len: size }, libc::MADV_COLLAPSE);
        }
        at = next;
    }
}

fn advise(memory: Span, advice: libc::c_int) {
    let at = std::ptr::without_provenance_mut(memory.start);
    // SAFETY: neither advice about huge pages changes what is in any memory, or what is mapped, wherever this is.
    let _where_granted = unsafe { libc::madvise(at, memory.len, advice) };
}

/// From now on large buffers of this process go back to the system when they are freed. By itself glibc keeps what is as
/// large as any that was freed before, in each thread's heap.
pub fn give_large_buffers_back() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it sets a number of the allocator's.
        let _kept_otherwise = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 512 << 10) };
    }
}

fn judge(maps: &[Mapping], regions: &[Span], purpose: Purpose) -> Vec<(usize, Why)> {
    let page = page_size();
    let each = regions.iter().map(|r| hindrance(maps, r.touched(page), purpose));
    each.enumerate().filter_map(|(i, why)| Some((i, why?))).collect()
}

fn read(file: &str) -> Result<Vec<Mapping>, Errno> {
    let mut text = Vec::new();
    std::fs::File::open(file)
        .and_then(|mut f| f.read_to_end(&mut text))
        .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    Ok(parse(&text))
}

fn hindrance(maps: &[Mapping], region: Span, purpose: Purpose) -> Option<Why> {
    let mut at = region.start;
    let first = maps.partition_point(|m| m.end <= at);
    for m in maps.get(first..).unwrap_or_default() {
        if at >= region.end() {
            break;
        }
        if m.start > at {
            return Some(Why::Unmapped);
        }
        if m.why.is_some() {
            return m.why;
        }
        if m.file && purpose == Purpose::Protect {
            return Some(Why::File);
        }
        at = m.end;
    }
    (at < region.end()).then_some(Why::Unmapped)
}

fn parse(text: &[u8]) -> Vec<Mapping> {
    let mut maps: Vec<Mapping> = Vec::new();
    for line in text.split(|b| *b == b'\n') {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            if let Some(last) = maps.last_mut() {
                last.why = last.why.or(flags.split(|b| *b == b' ').find_map(flag));
            }
        } else if let Some(m) = header(line) {
            maps.push(m);
        }
    }
    maps
}

fn flag(flag: &[u8]) -> Option<Why> {
    match flag {
        b"sh" => Some(Why::Shared),
        b"dc" => Some(Why::NotForked),
        b"wf" => Some(Why::WipedOnFork),
        b"ht" => Some(Why::HugePages),
        b"io" | b"pf" => Some(Why::Device),
        _ => None,
    }
}

/// `start-end perms offset device inode path`
fn header(line: &[u8]) -> Option<Mapping> {
    let mut words = line.split(|b| *b == b' ').filter(|w| !w.is_empty());
    let (start, end) = std::str::from_utf8(words.next()?).ok()?.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let why = words.next()?.contains(&b's').then_some(Why::Shared);
    let file = words.nth(2)? != b"0";
    Some(Mapping { start, end, file, why })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"\
00400000-00500000 rw-p 00000000 00:00 0                                  [heap]
Size:               1024 kB
VmFlags: rd wr mr mw me ac sd
00500000-00600000 rw-s 00000000 00:01 77                                 /dev/shm/a-b c
VmFlags: rd wr sh mr mw me ms sd
00700000-00800000 rw-p 00000000 08:01 99                                 /bin/x
VmFlags: rd wr mr mw me ac sd
00800000-00900000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me dc ac sd
";

    fn why(start: usize, len: usize, purpose: Purpose) -> Option<Why> {
        hindrance(&parse(TEXT), Span { start, len }.touched(4096), purpose)
    }

    #[test]
    fn each_mapping_is_judged_by_its_flags() {
        assert_eq!(why(0x40_0000, 0x10_0000, Purpose::Protect), None);
        assert_eq!(why(0x40_0000, 0x10_0001, Purpose::Protect), Some(Why::Shared));
        assert_eq!(why(0x5f_ffff, 1, Purpose::Fork), Some(Why::Shared));
        assert_eq!(why(0x60_0000, 1, Purpose::Fork), Some(Why::Unmapped));
        assert_eq!(why(0x70_0000, 8, Purpose::Fork), None);
        assert_eq!(why(0x70_0000, 8, Purpose::Protect), Some(Why::File));
        assert_eq!(why(0x7f_ffff, 2, Purpose::Fork), Some(Why::NotForked));
        assert_eq!(why(0x90_0000, 1, Purpose::Fork), Some(Why::Unmapped));
        assert_eq!(why(0x3f_ffff, 2, Purpose::Fork), Some(Why::Unmapped));
        assert_eq!(why(0x60_0000, 0, Purpose::Fork), None);
    }

    #[test]
    fn the_first_line_of_a_mapping_tells_most() {
        let lines = TEXT.split(|b| *b == b'\n').filter(|l| !l.starts_with(b"VmFlags"));
        let maps = parse(&lines.collect::<Vec<_>>().join(&b'\n'));
        let why = |start| hindrance(&maps, Span { start, len: 4096 }, Purpose::Protect);
        let expected = [None, Some(Why::Shared), Some(Why::Unmapped), Some(Why::File), None];
        let starts = [0x40_0000, 0x50_0000, 0x60_0000, 0x70_0000, 0x80_0000];
        assert_eq!(starts.map(why), expected);
    }

    #[test]
    fn whole_and_touched_pages() {
        let s = Span { start: 4097, len: 8192 };
        assert_eq!(s.pages(4096), Span { start: 8192, len: 4096 });
        assert_eq!(s.touched(4096), Span { start: 4096, len: 12288 });
        assert_eq!(Span { start: 1, len: 4000 }.pages(4096).len, 0);
    }
}
