#include "checkpoint/window.h"

#include <algorithm>
#include <deque>
#include <tuple>

namespace fw::native {
namespace {

// The largest value among the last entries that were added, as `first` moves on.
class SlidingMaximum {
 public:
  void add(size_t index, int64_t value) {
    while (!entries_.empty() && entries_.back().value <= value) entries_.pop_back();
    entries_.push_back({index, value});
  }
  void drop_before(size_t first) {
    while (!entries_.empty() && entries_.front().index < first) entries_.pop_front();
  }
  void clear() { entries_.clear(); }
  int64_t value() const { return entries_.front().value; }

 private:
  struct Entry {
    size_t index;
    int64_t value;
  };
  std::deque<Entry> entries_;
};

int64_t wait_for(const Fragments& table, size_t index, const WindowRequest& request) {
  if (table.urgency[index] <= request.keep_urgency || table.pinned[index] != 0) return kNever;
  const int64_t ready = table.ready_ns[index];
  if (ready == 0 || ready == kNever) return ready;
  // An estimate that has passed is still no evictable fragment: the wait is short, not none.
  return std::max<int64_t>(ready - request.now_ns, 1);
}

bool better(const Window& one, const Window& other) {
  return std::tuple(one.wait_ns, -one.urgency, one.evicted_bytes) <
         std::tuple(other.wait_ns, -other.urgency, other.evicted_bytes);
}

}  // namespace

// For each end the shortest window that ends there: a shorter window waits for fewer fragments and
// gives up fewer, so no longer one is better.
std::optional<Window> best_window(const Fragments& table, const WindowRequest& request) {
  std::optional<Window> best;
  SlidingMaximum wait, soonest;  // soonest: the negated urgency
  size_t first = 0;
  int64_t nbytes = 0, evicted = 0;
  for (size_t last = 0; last < table.count; last++) {
    const int64_t waits = wait_for(table, last, request);
    if (waits == kNever) {
      wait.clear();
      soonest.clear();
      first = last + 1;
      nbytes = evicted = 0;
      continue;
    }
    const auto evicts = [&](size_t index) {
      return table.urgency[index] == kUrgencyOfGap ? 0 : table.nbytes[index];
    };
    wait.add(last, waits);
    soonest.add(last, -table.urgency[last]);
    nbytes += table.nbytes[last];
    evicted += evicts(last);
    while (nbytes - table.nbytes[first] >= request.nbytes) {
      nbytes -= table.nbytes[first];
      evicted -= evicts(first);
      first++;
    }
    if (nbytes < request.nbytes) continue;
    wait.drop_before(first);
    soonest.drop_before(first);
    const Window window{first, last + 1, wait.value(), -soonest.value(), evicted};
    if (!best || better(window, *best)) best = window;
  }
  return best;
}

}  // namespace fw::native
