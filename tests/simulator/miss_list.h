// A list of misses for launches that defer theirs.
#pragma once

#include "simulator/elements.h"

namespace fw::simulator {

// A list of misses, empty between launches.
class MissList {
 public:
  MissList(Machine& machine, uint32_t capacity_log2) {
    const uint64_t words = sizeof(fw::cache::miss_list) / 8 + (uint64_t(1) << capacity_log2);
    list_ = reinterpret_cast<fw::cache::miss_list*>(
        machine.allocate<uint64_t>(words, "misses", Sharing::kAtomic));
    list_->capacity_log2 = capacity_log2;
    machine.at_rest([this] {
      rest::require(fw::cache::list_state::users(list_->state) == 0, "a list of misses has users");
      rest::require(list_->head == list_->tail, "deferred misses were left behind");
    });
  }
  fw::cache::list_use next_launch() { return {list_, ++launches_, 0, 0}; }
  // Of a launch that leaves its misses to so many blocks.
  fw::cache::list_use next_launch(uint32_t blocks, uint32_t bundle) {
    return {list_, ++launches_, blocks, bundle};
  }

 private:
  fw::cache::miss_list* list_;
  uint64_t launches_ = 0;
};

}  // namespace fw::simulator
