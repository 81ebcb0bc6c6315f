// Files read in order by warps, each piece into a buffer of the warp; and the same from memory,
// through arrays, and by raw commands. Words of the data count themselves, so `wrong` counts pieces
// that are others. If `taken` is given, it gets the nanoseconds of each read.
#include "flashwarp/file.cuh"

namespace {

template <typename Read>
FW_DEVICE void read_in_order(char* buffers, uint64_t piece, uint64_t pieces, uint64_t* wrong,
                             uint32_t* taken, Read read) {
  char* own = buffers + fw::warp::index() * piece;
  uint64_t errors = 0;
  for (uint64_t k = fw::warp::index(); k < pieces; k += fw::warp::count()) {
    const uint64_t begin = taken != nullptr ? fw::base::clock_ns() : 0;
    const bool whole = read(own, k * piece);
    fw::warp::sync(fw::warp::kFullMask);
    if (taken != nullptr && fw::warp::lane() == 0) {
      taken[k] = uint32_t(fw::base::clock_ns() - begin);
    }
    // One word of the piece, another one each time.
    const uint64_t at = k * 40 % piece / 8 * 8;
    const uint64_t word = *reinterpret_cast<const volatile uint64_t*>(own + at);
    errors += !whole || word != (k * piece + at) / 8;
    fw::warp::sync(fw::warp::kFullMask);
  }
  if (errors != 0 && fw::warp::lane() == 0) fw::atomic::add(wrong, errors);
}

// Reads one line by a command of its own, past the cache: what the rings alone cost. All lanes of a
// warp call together. The data comes through the ring's buffers.
FW_DEVICE bool read_raw_line(fw::cache::line_cache& c, fw::cache::volume& v, char* to,
                             uint64_t offset, uint64_t bytes) {
  using namespace fw;
  const lanes here = lanes::all();
  const lanes members = here.first();
  const bool leads = members.mine();
  nvme::queue_pair& q = cache::queue_of(v, cache::take_seat(here));
  cache::line_finisher finisher{c};
  const uint32_t ticket = nvme::take_tickets(q, here, members);
  if (!nvme::wait_for_slots(q, here, members, ticket, finisher)) return false;
  const uint64_t address = here.broadcast(leads ? nvme::buffer_of(q, ticket) : 0);
  if (leads) {
    nvme::write_entry(
        q, ticket,
        nvme::block_command(nvme::kRead, uint16_t(nvme::entry_of(q, ticket)),
                            offset >> nvme::kLbaShift, uint32_t(bytes >> nvme::kLbaShift), address,
                            nvme::second_prp(address, bytes, c.page_bytes)),
        0);
  }
  here.sync();
  nvme::publish(q, here);
  const uint32_t status = nvme::wait_for_completions(q, here, members, ticket, finisher);
  const uint32_t got = here.broadcast(status);
  if (got == nvme::kSuccess) {
    warp::copy<warp::source::kStream>(here, reinterpret_cast<uint64_t>(to), address, bytes);
    here.sync();
  }
  if (leads && got != nvme::kTimedOut) nvme::release_slot(q, ticket);
  return got == nvme::kSuccess;
}

}  // namespace

FW_KERNEL read_file(const FW_GRID_CONSTANT fw::file f, char* buffers, uint64_t piece,
                    uint64_t pieces, uint64_t* wrong, uint32_t* taken) {
  read_in_order(buffers, piece, pieces, wrong, taken, [&](char* to, uint64_t offset) {
    return fw::warp::read(f, to, offset, piece) == int64_t(piece);
  });
}

FW_KERNEL read_array(const FW_GRID_CONSTANT fw::array<const unsigned char> a, char* buffers,
                     uint64_t piece, uint64_t pieces, uint64_t* wrong, uint32_t* taken) {
  read_in_order(buffers, piece, pieces, wrong, taken, [&](char* to, uint64_t offset) {
    return fw::warp::read(a, offset, piece, reinterpret_cast<unsigned char*>(to)) == 0;
  });
}

// Pieces are lines, and the array's route is "bounce".
FW_KERNEL read_raw(const FW_GRID_CONSTANT fw::array<const unsigned char> a, char* buffers,
                   uint64_t piece, uint64_t pieces, uint64_t* wrong, uint32_t* taken) {
  read_in_order(buffers, piece, pieces, wrong, taken, [&](char* to, uint64_t offset) {
    return read_raw_line(*a.cache, *a.volume, to, offset, piece);
  });
}

// `address`: of memory that the device reads.
FW_KERNEL read_memory(uint64_t address, char* buffers, uint64_t piece, uint64_t pieces,
                      uint64_t* wrong, uint32_t* taken) {
  read_in_order(buffers, piece, pieces, wrong, taken, [&](char* to, uint64_t offset) {
    fw::warp::copy<fw::warp::source::kStream>(fw::lanes::all(), reinterpret_cast<uint64_t>(to),
                                              address + offset, piece);
    return true;
  });
}

// The same by the loads that a frame needs, between two looks at a word that a cache would change.
FW_KERNEL read_looking(uint64_t address, const uint64_t* words, uint64_t line, char* buffers,
                       uint64_t piece, uint64_t pieces, uint64_t* wrong, uint32_t* taken) {
  read_in_order(buffers, piece, pieces, wrong, taken, [&](char* to, uint64_t offset) {
    bool same = true;
    for (uint64_t at = 0; at < piece; at += line) {
      const uint64_t* word = &words[(offset + at) / line];
      const uint64_t before = fw::atomic::load_relaxed(word);
      fw::warp::sync(fw::warp::kFullMask);
      fw::warp::copy<fw::warp::source::kFrame>(fw::lanes::all(),
                                               reinterpret_cast<uint64_t>(to + at),
                                               address + offset + at, line < piece ? line : piece);
      fw::atomic::fence_acquire();
      fw::warp::sync(fw::warp::kFullMask);
      same = same && fw::atomic::load_relaxed(word) == before;
    }
    return same;
  });
}

// The same the other way: each warp writes its buffer over the pieces.
FW_KERNEL write_file(const FW_GRID_CONSTANT fw::file f, const char* buffers, uint64_t piece,
                     uint64_t pieces, uint64_t* wrong) {
  const char* own = buffers + fw::warp::index() * piece;
  for (uint64_t k = fw::warp::index(); k < pieces; k += fw::warp::count()) {
    const bool whole = fw::warp::write(f, own, k * piece, piece) == int64_t(piece);
    if (!whole && fw::warp::lane() == 0) fw::atomic::add(wrong, uint64_t(1));
  }
}

FW_KERNEL write_file_around(const FW_GRID_CONSTANT fw::file f, const char* buffers, uint64_t piece,
                            uint64_t pieces, uint64_t* wrong) {
  const char* own = buffers + fw::warp::index() * piece;
  for (uint64_t k = fw::warp::index(); k < pieces; k += fw::warp::count()) {
    const bool whole = fw::warp::write_around(f, own, k * piece, piece) == int64_t(piece);
    if (!whole && fw::warp::lane() == 0) fw::atomic::add(wrong, uint64_t(1));
  }
}

FW_KERNEL write_memory(uint64_t address, const char* buffers, uint64_t piece, uint64_t pieces,
                       uint64_t* wrong) {
  const char* own = buffers + fw::warp::index() * piece;
  for (uint64_t k = fw::warp::index(); k < pieces; k += fw::warp::count()) {
    fw::warp::copy<fw::warp::source::kStream>(fw::lanes::all(), address + k * piece,
                                              reinterpret_cast<uint64_t>(own), piece);
  }
}
