// Depth-first search over all choices of a run, by running it again and again.
#pragma once

#include <cstdint>
#include <vector>

namespace fw::simulator {

class Explorer {
 public:
  // Before each run. False when every sequence of choices has been taken.
  bool next() {
    if (started_) {
      while (!path_.empty() && path_.back().taken + 1 == path_.back().count) path_.pop_back();
      if (path_.empty()) return false;
      ++path_.back().taken;
    }
    started_ = true;
    depth_ = 0;
    return true;
  }

  uint32_t choose(uint32_t n) {
    if (depth_ == path_.size()) path_.push_back({0, n});
    return path_[depth_++].taken;
  }

 private:
  struct Choice {
    uint32_t taken;
    uint32_t count;
  };
  std::vector<Choice> path_;
  size_t depth_ = 0;
  bool started_ = false;
};

}  // namespace fw::simulator
