// What kernels do with open files: reads, writes, appends and flushes, by a thread, the lanes of a
// warp or the threads of a block. Calls are those of POSIX at an offset.
//
// Each call returns how many bytes it moved, or a negative error. A read that begins at or past the
// end of the file returns 0, and one that crosses the end returns the bytes before it. Offsets and
// lengths need no alignment. Bytes move through the array's cache and rings, so a read sees the
// last write to its bytes that finished before it, by whichever thread.
//
// `read_around` is a read that leaves the cache as it is: it finds lines that are in the cache
// there, and reads the bytes of absent ones from the storage, without frames for them (see
// cache/read_absent.cuh). It also sees every write that finished before it. Beside a write to the
// same bytes it may return parts of both. For files that are read once, beside what stays cached.
//
// `write_around` is a write whose lines are in the storage when it returns, but those that were in
// the cache: they are written there, and are dirty. An absent line passes through a frame of its
// set, which is empty afterwards (`pass_lines` in cache/access.cuh). Such lines take turns in one
// frame of a set, however long the file is. A line that is written in part is read first.
//
// A write may go past the end, as far as the file's capacity: the file then ends behind it. Bytes
// of the capacity that nobody has written are zeros. `append` takes its place at the end with one
// atomic operation, so parallel appends do not overlap; a reader that wants their bytes has to be
// ordered behind them, as it has to be behind any write.
//
// Any thread may call the functions for one thread, in divergent code too. All lanes of a warp that
// are active together, or all threads of a block, call those of fw::warp and fw::block with the
// same arguments, and get the same result.
#pragma once

#include "flashwarp/array/async.cuh"
#include "flashwarp/cache/read_absent.cuh"
#include "flashwarp/cache/short_hit.cuh"
#include "flashwarp/cache/single_command.cuh"
#include "flashwarp/file/file_view.cuh"

namespace fw {

namespace detail {

// Whether a read that has hit looks ahead. Not each does: those at the lines that are multiples of
// half the count, or of the power of two below it. So reads in order find about half on its way.
FW_DEVICE bool is_time_to_look(const file& f, const span& s) {
  if (f.lines_ahead == 0) return false;
  uint32_t shift = f.bytes.geometry.line_shift;
  for (uint32_t half = f.lines_ahead >> 1; half > 1; half >>= 1) shift++;
  return s.begin == 0 || (s.end - 1) >> shift != (s.begin - 1) >> shift;
}

// Starts the fills of the lines of a read and of those behind it, as far as the file has them. All
// lanes of `here` call. In place there is nothing to start: the warp itself would copy what others
// copy when they need it, and evict what they still need.
FW_DEVICE void look_ahead(const file& f, lanes here, const span& s) {
  const nvme::queue_pair& q = f.bytes.volume->queues[0];
  const bool plain = q.plain_reads != 0 || q.parts != nullptr;
  if (here.any(plain && nvme::path_of(q) == nvme::kInPlace)) return;
  span wide = s;
  const uint64_t ahead = uint64_t(f.lines_ahead) << f.bytes.geometry.line_shift;
  const uint64_t size = f.size();
  wide.end = s.end >= size ? s.end : ahead < size - s.end ? s.end + ahead : size;
  base::opaque (&fetch_span)(f.bytes.cache, f.bytes.volume, wide, lines::kAll);
}

inline constexpr uint32_t kAllMoved = ~0u;

// Moves the lines of a span as long as all lanes find theirs resident, as `move_shared` does, but
// with what the view itself knows. Returns how many lines of each lane it has moved, or kAllMoved.
// It may have moved some of the next lines, too. All lanes of `here` call together.
template <bool kToFrame>
FW_DEVICE_NOINLINE uint32_t move_resident(const cache::geometry& g, uint64_t line_begin, lanes here,
                                          const span& s) {
  uint32_t moved = 0;
  for (walk at(g, s); here.any(at.more()); at.line += at.stride) {
    const bool wants = at.more();
    cache::place where = {0, 0, false};
    if (wants) where = cache::probe(g, line_begin + at.line);
    if (here.any(wants != where.found)) return moved;
    copy_piece<kToFrame> op = piece_of<kToFrame>(g, s, at.line, wants);
    const lanes served = cache::serve_hits<policy>(g, here, where, op);
    if (here.any(wants && !served.mine())) return moved;
    moved++;
  }
  return kAllMoved;
}

// The same for a span of a file. Returns false if `s` is left.
template <bool kToFrame>
FW_DEVICE bool move_all_resident(const file& f, lanes here, span& s) {
  const uint32_t moved = move_resident<kToFrame>(f.bytes.geometry, f.bytes.line_begin, here, s);
  if (moved == kAllMoved) return true;
  s.first += moved * s.stride;
  return false;
}

// The piece of a read of one line by a full warp, if that takes the shortcut; else of no bytes.
FW_DEVICE cache::piece short_piece(const file& f, lanes here, const span& s) {
  if constexpr (warp::kWarpWidth == 1) return {0, 0, 0, 0};
  const uint32_t shift = f.bytes.geometry.line_shift;
  const uint64_t line = s.begin >> shift;
  const bool one = s.stride == warp::kWarpWidth && (s.end - 1) >> shift == line;
  if (here != lanes::all() || !one || base::is_private(s.buffer)) return {0, 0, 0, 0};
  const cache::piece what = {f.bytes.line_begin + line, s.begin - (line << shift), s.end - s.begin,
                             s.buffer};
  return cache::is_aligned(what) ? what : cache::piece{0, 0, 0, 0};
}

// A function of its own, so that kernels do not keep registers for the words that it holds.
FW_DEVICE_NOINLINE bool copy_short(const cache::geometry& g, uint64_t line, uint64_t offset,
                                   uint64_t bytes, uint64_t buffer) {
  return cache::copy_in_line<policy>(g, {line, offset, bytes, buffer});
}

// Moves a read's bytes if all their lines are resident. Returns false if `s` is left.
FW_DEVICE bool read_resident(const file& f, lanes here, span& s) {
  const cache::piece part = short_piece(f, here, s);
  if (part.bytes == 0) return move_all_resident<false>(f, here, s);
  const bool moved = copy_short(f.bytes.geometry, part.line, part.offset, part.bytes, part.buffer);
  // All lanes see the whole copy.
  here.sync();
  return moved;
}

// Moves bytes by the lanes of `here`, group `rank` of `ranks`. The result is that of this group.
FW_DEVICE int64_t read_file(const file& f, lanes here, void* to, uint64_t offset, int64_t nbytes,
                            uint32_t rank, uint32_t ranks) {
  if (nbytes <= 0) return nbytes;
  span s = dealt(here, f.bytes.span_of(offset, uint64_t(nbytes), to), rank, ranks);
  const bool hit = read_resident(f, here, s);
  if (hit ? is_time_to_look(f, s) : f.lines_ahead != 0) look_ahead(f, here, s);
  if (hit) return nbytes;
  const uint32_t got = base::opaque(&move_shared<false>)(f.bytes.cache, f.bytes.volume, here, s);
  return file_result(got, uint64_t(nbytes));
}

// Reads each lane's lines around the cache. All lanes of `here` call together. Returns the lane's
// first failure.
FW_DEVICE_NOINLINE uint32_t read_lines_around(cache::line_cache* c, cache::volume* v, lanes here,
                                              const span& s) {
  cache::tally count;
  cache::around_count around;
  uint32_t status = nvme::kSuccess;
  for (walk at(c->geometry, s); here.any(at.more()); at.line += at.stride) {
    const bool wants = at.more();
    copy_piece<false> op = piece_of<false>(c->geometry, s, at.line, wants);
    const uint32_t got = cache::access_around<policy>(*c, *v, here, wants, v->line_begin + at.line,
                                                      op, count, around);
    if (wants && status == nvme::kSuccess) status = got;
  }
  around.add_to(*v);
  count.add_kernel_to(*v, here);
  here.sync();
  return status;
}

// As read_file, around the cache.
FW_DEVICE int64_t read_file_around(const file& f, lanes here, void* to, uint64_t offset,
                                   int64_t nbytes, uint32_t rank, uint32_t ranks) {
  if (nbytes <= 0) return nbytes;
  const span s = dealt(here, f.bytes.span_of(offset, uint64_t(nbytes), to), rank, ranks);
  const uint32_t got = base::opaque(&read_lines_around)(f.bytes.cache, f.bytes.volume, here, s);
  return file_result(status_of_all(here, got), uint64_t(nbytes));
}

// As read_file, for a write. The end of the file stays where it is.
template <typename Misses = cache::fetch_misses>
FW_DEVICE int64_t write_file(const file& f, lanes here, const void* from, uint64_t offset,
                             int64_t nbytes, uint32_t rank, uint32_t ranks) {
  if (nbytes <= 0) return nbytes;
  span s = dealt(here, f.bytes.span_of(offset, uint64_t(nbytes), from), rank, ranks);
  if (move_all_resident<true>(f, here, s)) return nbytes;
  const uint32_t got =
      base::opaque(&move_shared<true, Misses>)(f.bytes.cache, f.bytes.volume, here, s);
  return file_result(got, uint64_t(nbytes));
}

// Lets the file end behind a write of `got` bytes, or of none, by the lanes of `here`. `size` was
// looked at before the write: it only grows, and so no write waits for this look.
FW_DEVICE int64_t end_write(const file& f, lanes here, uint64_t size, uint64_t offset,
                            int64_t got) {
  if (got > 0 && here.rank() == 0) extend_to(f, size, offset + uint64_t(got));
  return got;
}

// A write by one thread.
template <typename Misses>
FW_DEVICE int64_t write_own(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  const int64_t n = writable(f, offset, nbytes);
  if (n <= 0) return n;
  const span s = f.bytes.span_of(offset, uint64_t(n), from);
  const uint32_t got = base::opaque(&move_own<true, Misses>)(f.bytes.cache, f.bytes.volume, s);
  if (got == nvme::kSuccess) extend_to(f, f.size(), offset + uint64_t(n));
  return file_result(got, uint64_t(n));
}

// A write by the lanes of a warp.
template <typename Misses>
FW_DEVICE int64_t write_by_warp(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  const lanes here = active_on(f.bytes.volume);
  const int64_t n = writable(f, offset, nbytes);
  const uint64_t size = f.size();
  const int64_t got = write_file<Misses>(f, here, from, offset, n, 0, 1);
  return end_write(f, here, size, offset, got);
}

// The answer of one lane for all: another lane may see another size.
FW_DEVICE int64_t same(lanes here, int64_t n) { return here.broadcast(n); }

// The result of a block whose warps have theirs, behind a barrier.
FW_DEVICE int64_t common(int64_t got) {
  const bool late = block::any(got == kFileTimedOut);
  const bool failed = block::any(got == kFileIo);
  return late ? int64_t(kFileTimedOut) : failed ? int64_t(kFileIo) : got;
}

// A write by the threads of a block.
template <typename Misses>
FW_DEVICE int64_t write_by_block(const file& f, const void* from, uint64_t offset,
                                 uint64_t nbytes) {
  block::sync();
  const int64_t n = writable(f, offset, nbytes);
  const uint64_t size = f.size();
  const int64_t got = common(write_file<Misses>(f, lanes::all(), from, offset, n,
                                                block::warp_rank(), block::warp_count()));
  return end_write(f, lanes::all(), size, offset, got);
}

// Writes the dirty lines of a span back that was dealt to the lanes of `here`, and makes all that
// was written to its namespaces durable.
FW_DEVICE_NOINLINE uint32_t make_durable(cache::line_cache* c, cache::volume* v, lanes here,
                                         const span& s) {
  clean_span(c, v, here, s);
  const uint32_t status = status_of_all(here, wait_clean(c, v, here, s));
  return status != nvme::kSuccess ? status : cache::flush_namespaces(*c, *v, here);
}

// What a flush writes back: [offset, offset + nbytes), as far as the file has it.
FW_DEVICE int64_t syncable(const file& f, uint64_t offset, uint64_t nbytes) {
  if ((f.mode & kFileWrite) == 0) return kFileBadMode;
  if (offset >= f.size()) return 0;
  return int64_t(nbytes < f.size() - offset ? nbytes : f.size() - offset);
}

FW_DEVICE int64_t sync_file(const file& f, lanes here, uint64_t offset, int64_t n) {
  if (n <= 0) return n;
  const span s = dealt(here, f.bytes.span_of(offset, uint64_t(n), nullptr), 0, 1);
  return file_result(base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, here, s),
                     uint64_t(n));
}

}  // namespace detail

// Reads [offset, offset + nbytes) of the file to `to`, by one thread.
FW_DEVICE int64_t read(const file& f, void* to, uint64_t offset, uint64_t nbytes) {
  const int64_t n = detail::readable(f, offset, nbytes);
  if (n <= 0) return n;
  const detail::span s = f.bytes.span_of(offset, uint64_t(n), to);
  if (f.lines_ahead != 0) detail::look_ahead(f, detail::active_on(f.bytes.volume), s);
  const uint32_t got = base::opaque(&detail::move_own<false>)(f.bytes.cache, f.bytes.volume, s);
  return detail::file_result(got, uint64_t(n));
}

// As read, around the cache.
FW_DEVICE int64_t read_around(const file& f, void* to, uint64_t offset, uint64_t nbytes) {
  const int64_t n = detail::readable(f, offset, nbytes);
  if (n <= 0) return n;
  const detail::span s = f.bytes.span_of(offset, uint64_t(n), to);
  const lanes here = detail::active_on(f.bytes.volume);
  const uint32_t got =
      base::opaque(&detail::read_lines_around)(f.bytes.cache, f.bytes.volume, here, s);
  return detail::file_result(got, uint64_t(n));
}

// Writes `from` to [offset, offset + nbytes), by one thread. Durable after a flush.
FW_DEVICE int64_t write(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  return detail::write_own<cache::fetch_misses>(f, from, offset, nbytes);
}

// As write, around the cache.
FW_DEVICE int64_t write_around(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  return detail::write_own<cache::pass_misses>(f, from, offset, nbytes);
}

// Writes `from` behind the end of the file, by one thread. If `at` is given, it becomes the offset
// of the first byte. If the write fails, the file keeps the place, with undefined bytes.
FW_DEVICE int64_t append(const file& f, const void* from, uint64_t nbytes, uint64_t* at = nullptr) {
  const int64_t begin = detail::take_end(f, nbytes);
  if (begin < 0) return begin;
  if (at != nullptr) *at = uint64_t(begin);
  return fw::write(f, from, uint64_t(begin), nbytes);
}

namespace warp {

FW_DEVICE int64_t read(const file& f, void* to, uint64_t offset, uint64_t nbytes) {
  const lanes here = detail::active_on(f.bytes.volume);
  const int64_t n = detail::same(here, detail::readable(f, offset, nbytes));
  return detail::read_file(f, here, to, offset, n, 0, 1);
}

FW_DEVICE int64_t read_around(const file& f, void* to, uint64_t offset, uint64_t nbytes) {
  const lanes here = detail::active_on(f.bytes.volume);
  const int64_t n = detail::same(here, detail::readable(f, offset, nbytes));
  return detail::read_file_around(f, here, to, offset, n, 0, 1);
}

FW_DEVICE int64_t write(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  return detail::write_by_warp<cache::fetch_misses>(f, from, offset, nbytes);
}

FW_DEVICE int64_t write_around(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  return detail::write_by_warp<cache::pass_misses>(f, from, offset, nbytes);
}

FW_DEVICE int64_t append(const file& f, const void* from, uint64_t nbytes, uint64_t* at = nullptr) {
  const lanes here = detail::active_on(f.bytes.volume);
  int64_t begin = 0;
  if (here.rank() == 0) begin = detail::take_end(f, nbytes);
  begin = detail::same(here, begin);
  if (begin < 0) return begin;
  if (at != nullptr) *at = uint64_t(begin);
  return detail::write_file(f, here, from, uint64_t(begin), int64_t(nbytes), 0, 1);
}

// Returns when the bytes that were written to [offset, offset + nbytes) are durable, with their
// number. The size that writes and appends have given the file is durable after the host's flush.
FW_DEVICE int64_t flush(const file& f, uint64_t offset, uint64_t nbytes) {
  const lanes here = detail::active_on(f.bytes.volume);
  return detail::sync_file(f, here, offset,
                           detail::same(here, detail::syncable(f, offset, nbytes)));
}

}  // namespace warp

// As the functions of fw::warp, by all threads of a block, with barriers before and after.
namespace block {

FW_DEVICE int64_t read(const file& f, void* to, uint64_t offset, uint64_t nbytes) {
  const int64_t n = int64_t(broadcast(uint64_t(detail::readable(f, offset, nbytes))));
  return detail::common(
      detail::read_file(f, lanes::all(), to, offset, n, warp_rank(), warp_count()));
}

FW_DEVICE int64_t read_around(const file& f, void* to, uint64_t offset, uint64_t nbytes) {
  const int64_t n = int64_t(broadcast(uint64_t(detail::readable(f, offset, nbytes))));
  return detail::common(
      detail::read_file_around(f, lanes::all(), to, offset, n, warp_rank(), warp_count()));
}

FW_DEVICE int64_t write(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  return detail::write_by_block<cache::fetch_misses>(f, from, offset, nbytes);
}

FW_DEVICE int64_t write_around(const file& f, const void* from, uint64_t offset, uint64_t nbytes) {
  return detail::write_by_block<cache::pass_misses>(f, from, offset, nbytes);
}

FW_DEVICE int64_t append(const file& f, const void* from, uint64_t nbytes, uint64_t* at = nullptr) {
  int64_t begin = 0;
  if (warp_rank() == 0 && warp::lane() == 0) begin = detail::take_end(f, nbytes);
  begin = int64_t(broadcast(uint64_t(begin)));
  if (begin < 0) return begin;
  if (at != nullptr) *at = uint64_t(begin);
  return block::write(f, from, uint64_t(begin), nbytes);
}

FW_DEVICE int64_t flush(const file& f, uint64_t offset, uint64_t nbytes) {
  const int64_t n = int64_t(broadcast(uint64_t(detail::syncable(f, offset, nbytes))));
  int64_t got = n;
  if (warp_rank() == 0) got = detail::sync_file(f, lanes::all(), offset, n);
  return detail::common(got);
}

}  // namespace block

}  // namespace fw
