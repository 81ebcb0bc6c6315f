// What all queue pairs of a software controller share.
#pragma once

#include <cstdint>
#include <memory>

#include "nvme/error_log.h"
#include "nvme/model/ssd_model.h"
#include "nvme/software/prp_walk.h"
#include "storage/storage.h"

namespace fw::native {

// Read-only, except for the log and the modelled drive.
struct ControllerContext {
  std::shared_ptr<Storage> storage;
  DmaRegions regions;
  uint64_t page_bytes;
  uint64_t max_transfer_bytes;
  ErrorLog errors;
  std::unique_ptr<ModelledDrive> drive = nullptr;  // null: no drive is modelled
};

}  // namespace fw::native
