// Moves of many bytes between an array and a buffer, line by line, by the lanes that call together.
#pragma once

#include "flashwarp/array/callers.cuh"

namespace fw {

namespace detail {

// Bytes of an array that a lane moves to or from a buffer.
struct span {
  uint64_t begin;       // byte offset in the array
  uint64_t end;         // past the last byte
  uint64_t buffer;      // address of the buffer, in any memory
  uint32_t first = 0;   // the lane's first line, counted from the span's first
  uint32_t stride = 1;  // lines from one of the lane's to its next: more if lanes share the span
};

// The lines of a span that an operation is about.
enum class lines : uint32_t { kAll, kWhole, kPartial };

// A lane's walk over the lines of its span.
struct walk {
  uint64_t line;  // of the array
  uint64_t end;
  uint32_t stride;

  FW_DEVICE walk(const cache::geometry& g, const span& s)
      : line((s.begin >> g.line_shift) + s.first),
        end(s.begin < s.end ? ((s.end - 1) >> g.line_shift) + 1 : 0),
        stride(s.stride) {}
  FW_DEVICE bool more() const { return line < end; }
};

// Copies each lane's piece between its frame and its buffer. All lanes copy together, except for
// buffers on a lane's stack, which only the lane itself can reach.
template <bool kToFrame>
struct copy_piece {
  static constexpr bool kStores = kToFrame;
  uint64_t offset;
  uint64_t bytes;
  uint64_t buffer;

  FW_DEVICE cache::line_part stored() const { return {offset, bytes}; }
  FW_DEVICE void visit(lanes here, lanes members, uint64_t frame) {
    copy<kToFrame ? warp::source::kOwn : warp::source::kFrame>(here, members, frame);
  }

  // `line` is the address of the lane's line, in a frame or in the storage.
  template <warp::source kSource>
  FW_DEVICE void copy(lanes here, lanes members, uint64_t line) {
    const uint64_t inside = line + offset;
    const uint64_t to = kToFrame ? inside : buffer;
    const uint64_t from = kToFrame ? buffer : inside;
    const lanes alone = members & here.ballot(base::is_private(buffer));
    // Each lane has acquired its own line; now all lanes copy all of them.
    here.sync();
    warp::copy_each<kSource>(here, members - alone, to, from, bytes);
    if (alone.mine()) warp::copy<kSource>(lanes::of(warp::lane()), to, from, bytes);
    here.sync();
  }
};

// The piece of a span in one of its lines, or none of it.
template <bool kToFrame>
FW_DEVICE copy_piece<kToFrame> piece_of(const cache::geometry& g, const span& s, uint64_t line,
                                        bool wants) {
  const uint64_t line_start = line << g.line_shift;
  const uint64_t line_end = line_start + cache::line_bytes(g);
  const uint64_t from = s.begin > line_start ? s.begin : line_start;
  const uint64_t to = s.end < line_end ? s.end : line_end;
  return {from - line_start, wants ? to - from : 0, s.buffer + (from - s.begin)};
}

// Lines of a span that the lanes prefetch ahead of the one that they copy, all lanes together.
inline constexpr uint32_t kSpanLinesAhead = 8;

// Whether the lane's line of the span is one of `which`.
FW_DEVICE bool is_meant(const cache::line_cache& c, const cache::volume& v, const span& s,
                        uint64_t line, lines which) {
  if (which == lines::kAll) return true;
  const uint64_t begin = line << c.geometry.line_shift;
  const uint64_t bytes = cache::bytes_of_line(c, v, v.line_begin + line);
  const bool whole = s.begin <= begin && s.end >= begin + bytes;
  return whole == (which == lines::kWhole);
}

// Moves each lane's lines. All lanes of `here`, which is active_on(v), call together. Returns the
// lane's first failure.
template <bool kToFrame, typename Misses = cache::fetch_misses>
FW_DEVICE_NOINLINE uint32_t move_span(cache::line_cache* c, cache::volume* v, lanes here,
                                      const span& s, lines which) {
  const cache::geometry& g = c->geometry;
  const uint32_t lead = kToFrame ? 0 : kSpanLinesAhead / here.count();
  cache::tally count;
  uint32_t status = 0;
  walk at(g, s);
  walk ahead(g, s);
  ahead.line += s.stride;
  uint32_t asked = 1;  // lines copied or prefetched so far
  for (uint32_t k = 0; here.any(at.more()); k++) {
    // Prefetch `lead` lines at first, then one more for each line copied.
    for (; lead != 0 && asked <= k + lead && here.any(ahead.more()); asked++) {
      cache::prefetch<policy>(*c, *v, here, ahead.more(), v->line_begin + ahead.line, count);
      ahead.line += s.stride;
    }
    const bool wants = at.more() && is_meant(*c, *v, s, at.line, which);
    copy_piece<kToFrame> op = piece_of<kToFrame>(g, s, at.line, wants);
    const uint64_t global = v->line_begin + at.line;
    const bool whole = wants && op.bytes == cache::bytes_of_line(*c, *v, global);
    const uint32_t got =
        cache::access<policy>({g, *c, *v, here}, {global, wants, whole}, op, count, Misses());
    if (wants && status == nvme::kSuccess) status = got;
    at.line += s.stride;
  }
  count.add_kernel_to(*v, here);
  here.sync();
  return status;
}

// Moves one thread's span: an element that straddles lines, or whose size is no power of two.
template <bool kToFrame, typename Misses = cache::fetch_misses>
FW_DEVICE_NOINLINE uint32_t move_own(cache::line_cache* c, cache::volume* v, const span& s) {
  return move_span<kToFrame, Misses>(c, v, active_on(v), s, lines::kAll);
}

}  // namespace detail

}  // namespace fw
