// Physical Region Page entries of a transfer (NVM Express Base Specification, section 4.1.1).
//
// A transfer inside one memory page (CC.MPS) needs PRP1 only; two pages need PRP2; more need a list
// that PRP2 points to. Buffers never move, so the host writes their lists once, at open.
#pragma once

#include "flashwarp/base/platform.cuh"

namespace fw::nvme {

struct prp_pair {
  uint64_t prp1, prp2;
};

// Entries for `bytes` at `address`. `list` is the address of the buffer's prepared PRP list; it is
// used only when the transfer touches more than two pages.
FW_HOST_DEVICE prp_pair prp_entries(uint64_t address, uint64_t bytes, uint64_t page_bytes,
                                    uint64_t list) {
  const uint64_t first = page_bytes - (address & (page_bytes - 1));
  if (bytes <= first) return {address, 0};
  if (bytes <= first + page_bytes) return {address, address + first};
  return {address, list};
}

}  // namespace fw::nvme
