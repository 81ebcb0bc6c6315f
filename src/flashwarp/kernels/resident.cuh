// The kernels of a client of a shared cache whose kernels do not ask the owner: see
// cache/owner_requests.cuh.
//
// A client has the owner's tags and frames in memory that it cannot write. These kernels copy the
// pieces of rows that are resident, validated as every hit is, and list the others for the client's
// host, which asks the owner for their lines. A hit leaves no mark for the replacement policy,
// because marks are stores. Everything else is the client's own memory.
#pragma once

#include "rows.cuh"

namespace fw::kernels {

// What a launch could not copy. The host sets all words to 0 before.
struct missed_pieces {
  uint64_t count;   // entries of the list
  uint64_t hits;    // pieces that were copied
  uint64_t bytes;   // in them
  uint64_t strays;  // indices out of bounds
  uint64_t stray;   // one of them
  uint64_t reserved;
};
static_assert(sizeof(missed_pieces) == 48);

struct missed_piece {
  uint64_t item;  // the segment, as segment_of counts them
  uint64_t line;  // counted from the array's start
};

struct client_params {
  row_params rows;      // `cache`, `volume`, `strays` and `misses` are not used
  uint64_t line_begin;  // the array's first line number
  missed_pieces* missed;
  missed_piece* list;      // room for all segments
  const char* handed;      // lines that the owner has handed over, back to back
  const uint32_t* places;  // for each listed piece: the place of its line among them
  uint64_t count;          // listed pieces to take from there
};
static_assert(sizeof(client_params) == sizeof(row_params) + 48);

// The pieces that one lane has under way, so that their loads overlap. A warp has enough lanes.
inline constexpr uint32_t kPiecesOfLane = warp::kWarpWidth == 1 ? 16 : 1;

// Appends the lanes' pieces to the list of what is missing. All lanes of a warp call together.
FW_DEVICE_NOINLINE void list_missed(const client_params& c, lanes absent, uint64_t item,
                                    uint64_t line) {
  const lanes here = lanes::all();
  const uint32_t leader = absent.leader();
  uint64_t first = 0;
  if (absent.leads()) {
    // Relaxed: the host reads the list when the launch has ended.
    first = atomic::add_relaxed(&c.missed->count, uint64_t(absent.count()));
  }
  first = here.broadcast(first, leader);
  if (!absent.mine()) return;
  c.list[first + absent.rank()] = {item, line - c.line_begin};
}

// Zeros the row of an index that is out of bounds, and counts it.
FW_DEVICE_NOINLINE void refuse_client_row(const client_params& c, uint64_t item) {
  const row_params& p = c.rows;
  const uint64_t k = item / p.segments;
  if (k * p.segments != item) return;
  for (uint64_t i = 0; i < p.row_bytes; i++) {
    atomic::store_plain(p.rows + k * p.row_bytes + i, char(0));
  }
  atomic::add_relaxed(&c.missed->strays, uint64_t(1));
  atomic::store_relaxed(&c.missed->stray, uint64_t(index_at(p, k)));
}

// Copies the resident pieces of all segments, and lists the others.
FW_DEVICE void gather_resident_pieces(const client_params& c) {
  const row_params& p = c.rows;
  const cache::geometry& g = p.geometry;
  const lanes here = lanes::all();
  const uint32_t bundle = warp::kWarpWidth == 1 ? kPiecesOfLane : bundle_of(p);
  const warp::share mine = warp::share_of(segment_count(p), bundle);
  uint64_t hits = 0;
  uint64_t bytes = 0;
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    segment pieces[kPiecesOfLane];
    cache::place at[kPiecesOfLane];
    lanes found[kPiecesOfLane];
    FW_UNROLL
    for (uint32_t k = 0; k < kPiecesOfLane; k++) {
      const uint64_t item = first + k + warp::lane();
      pieces[k] = {0, 0, 0, 0};
      if (k + warp::lane() < bundle && item < mine.end) {
        pieces[k] = segment_at(p, c.line_begin, item);
        if (pieces[k].line == kNoRow) refuse_client_row(c, item);
      }
      if (pieces[k].bytes != 0) {
        base::prefetch(&g.tags[cache::home_of(g, pieces[k].line).set * g.ways]);
      }
    }
    FW_UNROLL
    for (uint32_t k = 0; k < kPiecesOfLane; k++) {
      at[k] = {0, 0, false};
      if (pieces[k].bytes != 0) at[k] = cache::probe(g, pieces[k].line);
      found[k] = here.ballot(at[k].found);
      if (at[k].found) base::prefetch(cache::frame_of(g, at[k].way) + pieces[k].offset);
    }
    FW_UNROLL
    for (uint32_t k = 0; k < kPiecesOfLane; k++) {
      if (!found[k]) continue;
      copy_segments<false> op = {pieces[k]};
      op.visit(here, found[k], reinterpret_cast<uint64_t>(cache::frame_of(g, at[k].way)));
    }
    // The loads of the frames, by this lane and by other lanes for it, come before the second look
    // at the tags.
    atomic::fence_acquire();
    here.sync();
    FW_UNROLL
    for (uint32_t k = 0; k < kPiecesOfLane; k++) {
      const bool wants = pieces[k].bytes != 0;
      const bool served = at[k].found && cache::still_holds(g, at[k].way, at[k].word);
      if (served) {
        hits++;
        bytes += pieces[k].bytes;
      }
      const lanes absent = here.ballot(wants && !served);
      if (absent) list_missed(c, absent, first + k + warp::lane(), pieces[k].line);
    }
  }
  if (hits != 0) {
    atomic::add_relaxed(&c.missed->hits, hits);
    atomic::add_relaxed(&c.missed->bytes, bytes);
  }
}

// Copies listed pieces out of the lines that the owner has handed over.
FW_DEVICE void take_handed_pieces(const client_params& c) {
  const row_params& p = c.rows;
  const lanes here = lanes::all();
  const warp::share mine = warp::share_of(c.count, warp::kWarpWidth);
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    // On the CPU device a stride is one piece, and the only lane takes it.
    const uint64_t i = first + warp::lane();
    copy_segments<false> op = {{0, 0, 0, 0}};
    uint64_t line = 0;
    if (i < mine.end) {
      op.piece = segment_at(p, c.line_begin, c.list[i].item);
      line =
          reinterpret_cast<uint64_t>(c.handed) + (uint64_t(c.places[i]) << p.geometry.line_shift);
    }
    const lanes members = here.ballot(op.piece.bytes != 0);
    if (members) op.visit(here, members, line);
  }
}

}  // namespace fw::kernels

#if FW_BUILDS(gather_resident)
FW_KERNEL_RESIDENT(2) fw_gather_resident(const FW_GRID_CONSTANT fw::kernels::client_params c) {
  fw::kernels::gather_resident_pieces(c);
}
#endif
#if FW_BUILDS(take_handed)
FW_KERNEL_RESIDENT(2) fw_take_handed(const FW_GRID_CONSTANT fw::kernels::client_params c) {
  fw::kernels::take_handed_pieces(c);
}
#endif
