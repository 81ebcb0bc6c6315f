// Files read in order by warps, each piece into a buffer of the warp; and the same from memory, and
// through arrays. Words of the data count themselves, so `wrong` counts pieces that are others.
#include "flashwarp/file.cuh"

namespace {

template <typename Read>
FW_DEVICE void read_in_order(char* buffers, uint64_t piece, uint64_t pieces, uint64_t* wrong,
                             Read read) {
  char* own = buffers + fw::warp::index() * piece;
  uint64_t errors = 0;
  for (uint64_t k = fw::warp::index(); k < pieces; k += fw::warp::count()) {
    const bool whole = read(own, k * piece);
    fw::warp::sync(fw::warp::kFullMask);
    // One word of the piece, another one each time.
    const uint64_t at = k * 40 % piece / 8 * 8;
    const uint64_t word = *reinterpret_cast<const volatile uint64_t*>(own + at);
    errors += !whole || word != (k * piece + at) / 8;
    fw::warp::sync(fw::warp::kFullMask);
  }
  if (errors != 0 && fw::warp::lane() == 0) fw::atomic::add(wrong, errors);
}

}  // namespace

FW_KERNEL read_file(const FW_GRID_CONSTANT fw::file f, char* buffers, uint64_t piece,
                    uint64_t pieces, uint64_t* wrong) {
  read_in_order(buffers, piece, pieces, wrong, [&](char* to, uint64_t offset) {
    return fw::warp::read(f, to, offset, piece) == int64_t(piece);
  });
}

FW_KERNEL read_array(const FW_GRID_CONSTANT fw::array<const unsigned char> a, char* buffers,
                     uint64_t piece, uint64_t pieces, uint64_t* wrong) {
  read_in_order(buffers, piece, pieces, wrong, [&](char* to, uint64_t offset) {
    return fw::warp::read(a, offset, piece, reinterpret_cast<unsigned char*>(to)) == 0;
  });
}

// `address`: of memory that the device reads.
FW_KERNEL read_memory(uint64_t address, char* buffers, uint64_t piece, uint64_t pieces,
                      uint64_t* wrong) {
  read_in_order(buffers, piece, pieces, wrong, [&](char* to, uint64_t offset) {
    fw::warp::copy<fw::warp::source::kStream>(fw::warp::kFullMask, reinterpret_cast<uint64_t>(to),
                                              address + offset, piece);
    return true;
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

FW_KERNEL write_memory(uint64_t address, const char* buffers, uint64_t piece, uint64_t pieces,
                       uint64_t* wrong) {
  const char* own = buffers + fw::warp::index() * piece;
  for (uint64_t k = fw::warp::index(); k < pieces; k += fw::warp::count()) {
    fw::warp::copy<fw::warp::source::kStream>(fw::warp::kFullMask, address + k * piece,
                                              reinterpret_cast<uint64_t>(own), piece);
  }
}
