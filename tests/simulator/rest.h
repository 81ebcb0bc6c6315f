// Invariants at rest: nothing moves, and the storage has the bytes of every clean line.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "flashwarp/array.cuh"
#include "hardware.h"
#include "hostile.h"
#include "scheduler.h"
#include "transitions.h"

namespace fw::simulator::rest {

inline void require(bool condition, const std::string& what) {
  if (!condition) throw Failure("at rest: " + what + "\n");
}

// After a controller was given up, nothing else can be expected.
inline void check_timeouts(const Hardware& hardware) {
  require(hardware.may_time_out(), "a wait ran out of time while the host was stopped");
  // Another replica may have answered.
  bool recorded = hardware.replicas() > 1;
  for (uint32_t v = 0; v < hardware.shape().volumes; ++v) {
    const cache::volume& volume = hardware.volume(v);
    recorded = recorded || volume.commands.noted != 0;
    require(volume.failed == 0 || volume.commands.noted != 0, "a mark without an error record");
  }
  require(recorded, "a wait ran out of time and no error record says so");
}

// `held` has the line's bytes as each replica has them.
inline void require_stored(const Hardware& hardware, uint64_t line, const char* held,
                           const std::string& name) {
  const cache::line_cache& c = hardware.line_cache();
  const cache::volume& owner = cache::volume_of(c, line);
  const uint64_t bytes = cache::bytes_of_line(c, owner, line);
  for (uint32_t r = 0; r < hardware.replicas(); ++r) {
    const char* there =
        hardware.stored(uint32_t(&owner - c.volumes), (line - owner.line_begin) << kLineShift, r);
    require(std::memcmp(held, there, bytes) == 0, name + " differs from the storage");
  }
}

inline void check_way(const Hardware& hardware, uint64_t way) {
  const cache::geometry& geometry = hardware.line_cache().geometry;
  const uint64_t word = geometry.tags[way];
  const std::string name = "tags[" + std::to_string(way) + "] = " + describe_tag(word);
  const uint64_t moving = cache::tag::kPinMask | cache::tag::kDirty | cache::tag::kWriting;
  require(cache::tag::state_of(word) != cache::tag::kBusy && (word & moving) == 0, name);
  if (cache::tag::state_of(word) != cache::tag::kValid) return;
  const uint64_t line = cache::tag::line_of(word);
  require(cache::set_of(geometry, line) == way / geometry.ways, name + " is in another line's set");
  require_stored(hardware, line, cache::frame_of(geometry, way), name);
}

// A place in the tier: a line of the right subset, as the storage has it, and in no frame.
inline void check_tier(const Hardware& hardware, uint64_t place) {
  namespace tier = cache::tier;
  const cache::line_cache& c = hardware.line_cache();
  const Shape& shape = hardware.shape();
  const uint64_t word = c.tier.tags[place];
  const uint64_t state = tier::state_of(word);
  const std::string name = "tier[" + std::to_string(place) + "] = " + describe_place(word);
  require(state == tier::kEmpty || state == tier::kHeld, name);
  if (state == tier::kEmpty) return;
  const uint64_t line = tier::line_of(word);
  const uint64_t set = cache::set_of(c.geometry, line);
  const uint64_t subset = line / shape.sets % shape.tier_subsets;
  require(place / shape.tier_ways == set * shape.tier_subsets + subset,
          name + " is in another line's subset");
  for (uint32_t way = 0; way < shape.ways; ++way) {
    const uint64_t other = c.geometry.tags[set * shape.ways + way];
    require(
        cache::tag::state_of(other) == cache::tag::kInvalid || cache::tag::line_of(other) != line,
        name + " is in a frame too");
  }
  for (uint64_t other = 0; other < place; ++other) {
    const uint64_t earlier = c.tier.tags[other];
    require(tier::state_of(earlier) == tier::kEmpty || tier::line_of(earlier) != line,
            name + " is there twice");
  }
  require_stored(hardware, line, tier::frame_of(c.tier, kLineShift, uint32_t(place)), name);
}

inline void check_queue(const Hardware& hardware, uint32_t v, uint32_t number) {
  const nvme::queue_pair& q = hardware.volume(v).queues[number];
  const uint32_t depth = 1u << q.depth_log2;
  const std::string name =
      "volume " + std::to_string(v) + " queue " + std::to_string(number) + ": ";
  const uint64_t completed = hardware.completed(v, number);
  require(completed == q.ticket, name + std::to_string(q.ticket) + " submitted, " +
                                     std::to_string(completed) + " completed");
  require(q.head == q.ticket && q.tail == q.ticket, name + "head, tail and ticket differ");
  require(*q.sq_doorbell == q.ticket % depth, name + "the SQ doorbell is elsewhere");
  require(*q.cq_doorbell == q.ticket % depth, name + "the CQ doorbell is elsewhere");
  require(q.publish_lock == 0 && q.drain_lock == 0, name + "a lock is held");
  for (uint32_t e = 0; e < depth; ++e) {
    const uint32_t turns = q.ticket / depth + (e < q.ticket % depth ? 1 : 0);
    require(q.slots[e] == nvme::slot::word(turns, nvme::slot::kFree),
            name + "slots[" + std::to_string(e) + "] = " + describe_slot(q.slots[e]));
  }
}

inline void check(const Hardware& hardware) {
  const cache::line_cache& c = hardware.line_cache();
  for (uint64_t way = 0; way < c.geometry.set_count * c.geometry.ways; ++way)
    check_way(hardware, way);
  for (uint64_t place = 0; place < hardware.tier_places(); ++place) check_tier(hardware, place);
  for (uint64_t set = 0; set < c.geometry.set_count; ++set) {
    require((c.set_control[set] & cache::kSetLocked) == 0, "a set is locked");
  }
  const bool refused = c.refusals != 0 || *cache::policy_refusals(c.geometry) != 0;
  require(!refused || std::is_same_v<policy, hostile_policy>,
          "a policy asked for a line or a way that it may not have");
  for (uint32_t v = 0; v < hardware.shape().volumes; ++v) {
    const cache::volume& volume = hardware.volume(v);
    if (!hardware.faulty()) require(volume.commands.noted == 0, "an error record without a fault");
    for (uint32_t i = 0; i < volume.queue_count; ++i) check_queue(hardware, v, i);
  }
}

}  // namespace fw::simulator::rest
