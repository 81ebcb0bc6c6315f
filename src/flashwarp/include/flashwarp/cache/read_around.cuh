// Reads of pieces of lines around the cache, of lines that are in no frame.
//
// A warp of a GPU that streams a pipeline's batch does so in kernels/stream.cuh. A thread of the
// CPU device takes a bundle of pieces at a time, so that the loads of many are in flight together.
// It copies them out of frames, and around the cache: if a line is in no frame and its bytes are in
// the page cache, it copies them straight to the caller. A fill would move a whole line, and then
// the same bytes a second time, within one memory: it takes three times as long, and a later hit
// saves a tenth of the copy. Every other miss fills a frame.
#pragma once

#include "flashwarp/cache/access.cuh"

namespace fw::cache {

// A part of one line, and where it goes. `bytes` 0: nothing.
struct piece {
  uint64_t line;    // global
  uint64_t offset;  // in the line
  uint64_t bytes;
  uint64_t buffer;  // address in the caller's buffer
};

// Cells of one line at equal distances, which go to the caller back to back: a part of a column.
// `offset` is the first one's, `bytes` are of all. No cell straddles lines.
struct cells : piece {
  uint64_t count;
  uint64_t width;
  uint64_t stride;
};

// The namespaces of a volume that threads may copy from.
struct host_sources {
  base::host_source of[kNamespacesMax];
  bool any = false;
};

FW_DEVICE host_sources host_sources_of(const volume& v) {
  host_sources found;
  const uint32_t count = v.spread == kOneNamespace ? 1 : v.namespace_count;
  for (uint32_t n = 0; n < count; n++) {
    const nvme::queue_pair& q = v.spread == kOneNamespace ? v.queues[0] : queue_on(v, 0, n);
    found.of[n] = cached_source(q);
    found.any = found.any || found.of[n].copy != nullptr;
  }
  return found;
}

// Which absent lines a launch reads around the cache, if the page cache has their bytes.
enum class around {
  kNone,
  kMost,  // all of a bundle but one, which it fills: lines that are asked for often enter the cache
  kAll,
};

// Fills of so many lines take half a millisecond.
inline constexpr uint64_t kManyPieces = 256;

// What a launch that asks for so many pieces and bytes reads around the cache. The lines of one
// that asks for more bytes than the cache has would evict each other, and the lines of other
// launches, before anybody asks for them again.
FW_DEVICE around around_for(const geometry& g, uint64_t pieces, uint64_t bytes) {
  if (bytes > g.set_count * g.ways * line_bytes(g)) return around::kAll;
  return pieces >= kManyPieces ? around::kMost : around::kNone;
}

// What a thread saw of a set in which a line was absent. Each claim of a frame adds one to its
// generation, modulo 2^15, so the sum of all changes with each claim. It is the same again after
// 2^15 claims; docs/correctness.md says why that deceives nobody.
struct set_look {
  uint64_t first;  // way
  uint64_t generations;
};

// Looks at the set of `line`. Returns true if no frame holds or awaits the line; else `at` says
// whether one holds it.
FW_DEVICE bool look_for_absent(const geometry& g, uint64_t line, set_look& look, place& at) {
  at = {0, 0, false};
  look.generations = 0;
  bool absent = true;
  for (uint32_t k = 0; k < g.ways; k++) {
    // Acquire: pairs with the release that published the fill, after its data.
    const uint64_t word = atomic::load_acquire(&g.tags[look.first + k]);
    look.generations += word & tag::kGenerationMask;
    if (tag::line_of(word) != line || tag::state_of(word) == tag::kInvalid) continue;
    absent = false;
    if (tag::holds(word, line)) at = {look.first + k, word, true};
  }
  return absent;
}

// The second look: whether the line was absent all the time since the first. A store to the line
// needs a frame of the set, and to take one changes its generation. So if no generation has
// changed, nobody has stored to the line, and the namespace had its bytes. A fence_acquire() must
// come between the loads of the bytes and this.
FW_DEVICE bool still_absent(const geometry& g, const set_look& look) {
  uint64_t generations = 0;  // another line's fill may end meanwhile, which is no change of them
  for (uint32_t k = 0; k < g.ways; k++) {
    generations += atomic::load_relaxed(&g.tags[look.first + k]) & tag::kGenerationMask;
  }
  return generations == look.generations;
}

// Copies a piece that begins at `from`, of a frame.
FW_DEVICE void copy_from_frame(const piece& what, const char* from) {
  warp::copy<warp::source::kFrame>(lanes::all(), what.buffer, reinterpret_cast<uint64_t>(from),
                                   what.bytes);
}
// Cells of so many bytes, all of them aligned.
template <uint32_t kBytes>
FW_DEVICE void copy_words(const cells& what, const char* from) {
  char* const to = reinterpret_cast<char*>(what.buffer);
  for (uint64_t i = 0; i < what.count; i++) {
    atomic::raw<kBytes>::store_plain(to + i * kBytes,
                                     atomic::raw<kBytes>::load(from + i * what.stride));
  }
}
FW_DEVICE void copy_from_frame(const cells& what, const char* from) {
  const uint64_t places = reinterpret_cast<uint64_t>(from) | what.stride | what.buffer;
  if (what.width == 4 && places % 4 == 0) return copy_words<4>(what, from);
  if (what.width == 8 && places % 8 == 0) return copy_words<8>(what, from);
  for (uint64_t i = 0; i < what.count; i++) {
    const uint64_t buffer = what.buffer + i * what.width;
    copy_from_frame(piece{0, 0, what.width, buffer}, from + i * what.stride);
  }
}

// Serves pieces from frames, and those of absent lines from the page cache. All waits, fills and
// errors are left to `access`: returns the pieces that it must serve, as bits.
template <typename Policy, typename Piece = piece>
class piece_reader {
 public:
  static constexpr uint32_t kBundle = 32;

  FW_DEVICE piece_reader(const geometry& g, volume& v, around which)
      : geometry_(g), volume_(v), sources_(host_sources_of(v)), around_(which) {}

  // Whether the page cache has a piece, so that no access to it waits.
  FW_DEVICE bool is_in_memory(const piece& what) const {
    if (!sources_.any) return false;
    const base::host_source& from = sources_.of[namespace_of(what.line)];
    return from.has != nullptr && from.has(from.source, offset_of(what), what.bytes);
  }

  // Adds the bypasses to the volume's. No member of `tally`, which kernels of a GPU keep too.
  FW_DEVICE void add_bypasses() {
    if (bypasses_ != 0) atomic::add_relaxed(&shard_of(volume_).bypasses, bypasses_);
    bypasses_ = 0;
  }

  FW_DEVICE uint32_t read(const Piece* pieces, uint32_t count, tally& events) {
    uint32_t rest = count == 32 ? ~0u : (1u << count) - 1;
    uint32_t absent = 0;
    uint32_t resident = 0;
    for (uint32_t i = 0; i < count; i++) {
      looks_[i].first = set_of(geometry_, pieces[i].line) * geometry_.ways;
      base::prefetch(&geometry_.tags[looks_[i].first]);
    }
    for (uint32_t i = 0; i < count; i++) {
      if (pieces[i].bytes == 0) {
        rest &= ~(1u << i);
      } else if (look_for_absent(geometry_, pieces[i].line, looks_[i], at_[i])) {
        absent |= 1u << i;
      } else if (at_[i].found) {
        resident |= 1u << i;
        fetch(frame_of(geometry_, at_[i].way) + pieces[i].offset, pieces[i].bytes);
      }
    }
    if (resident != 0) rest &= ~read_resident(pieces, resident, events);
    if (around_ == around::kMost) absent &= absent - 1;
    if (around_ == around::kNone || !sources_.any) absent = 0;
    if (absent != 0) rest &= ~read_absent(pieces, absent, events);
    return rest;
  }

 private:
  // Enough of a piece that the processor fetches the rest by itself.
  static constexpr uint64_t kFetchBytes = 64;
  static constexpr uint64_t kMemoryLine = 64;

  FW_DEVICE static void fetch(const char* from, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes && i < kFetchBytes; i += kMemoryLine) base::prefetch(from + i);
  }

  FW_DEVICE uint64_t offset_of(const piece& what) const {
    return (line_in_namespace(volume_, what.line) << geometry_.line_shift) + what.offset;
  }

  FW_DEVICE uint32_t namespace_of(uint64_t line) const {
    if (volume_.spread == kOneNamespace) return 0;
    if (volume_.spread == kStriped) return striped(volume_, line - volume_.line_begin).on;
    return choose_replica(volume_, 0, line, 0);
  }

  FW_DEVICE uint32_t read_resident(const Piece* pieces, uint32_t members, tally& events) {
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
      const uint32_t i = base::lowest_bit(rest);
      copy_from_frame(pieces[i], frame_of(geometry_, at_[i].way) + pieces[i].offset);
    }
    // The loads of the frames come before the second look at the tags.
    atomic::fence_acquire();
    uint32_t served = 0;
    for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
      const uint32_t i = base::lowest_bit(rest);
      if (!still_holds(geometry_, at_[i].way, at_[i].word)) continue;
      Policy::on_hit(geometry_, at_[i].way, at_[i].word);
      served |= 1u << i;
    }
    events.hits += base::popcount(served);
    return served;
  }

  FW_DEVICE uint32_t read_absent(const Piece* pieces, uint32_t members, tally& events) {
    uint32_t served = 0;
    const uint32_t namespaces = volume_.spread == kOneNamespace ? 1 : volume_.namespace_count;
    for (uint32_t n = 0; n < namespaces; n++) {
      if (sources_.of[n].copy == nullptr) continue;
      uint32_t count = 0;
      uint32_t here = 0;
      for (uint32_t rest = members; rest != 0; rest &= rest - 1) {
        const uint32_t i = base::lowest_bit(rest);
        if (namespaces != 1 && namespace_of(pieces[i].line) != n) continue;
        here |= 1u << i;
        count = add_copy(count, offset_of(pieces[i]), pieces[i]);
        copy_of_[i] = count - 1;
      }
      sources_.of[n].copy(sources_.of[n].source, copies_, count);
      // The loads of the bytes come before the second look at the tags.
      atomic::fence_acquire();
      for (uint32_t rest = here; rest != 0; rest &= rest - 1) {
        const uint32_t i = base::lowest_bit(rest);
        if (!copies_[copy_of_[i]].done || !still_absent(geometry_, looks_[i])) continue;
        served |= 1u << i;
        events.misses++;
        bypasses_++;
        events.bytes_read += pieces[i].bytes;
      }
    }
    return served;
  }

  // Adds a copy, or extends the last one: a row that straddles lines is one copy. Returns how many
  // there are.
  FW_DEVICE uint32_t add_copy(uint32_t count, uint64_t offset, const piece& what) {
    if (count != 0) {
      base::host_copy& last = copies_[count - 1];
      if (last.offset + last.bytes == offset && last.target + last.bytes == what.buffer) {
        last.bytes += what.bytes;
        return count;
      }
    }
    copies_[count] = {offset, what.buffer, what.bytes, false};
    return count + 1;
  }
  FW_DEVICE uint32_t add_copy(uint32_t count, uint64_t offset, const cells& what) {
    copies_[count] = {offset, what.buffer, what.width, false, what.count, what.stride};
    return count + 1;
  }

  const geometry& geometry_;
  volume& volume_;
  const host_sources sources_;
  const around around_;
  uint64_t bypasses_ = 0;  // pieces that came from the page cache
  set_look looks_[kBundle];
  place at_[kBundle];
  base::host_copy copies_[kBundle];
  uint32_t copy_of_[kBundle];
};

}  // namespace fw::cache
