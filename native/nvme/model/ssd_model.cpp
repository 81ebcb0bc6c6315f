// The two stages of a modelled drive; see ssd_model.h.
#include "nvme/model/ssd_model.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/require.h"
#include "flashwarp/base/atomic.cuh"

namespace fw::native {
namespace {

// Ticks of the pipe. On the fastest drive a command takes 50 ns, so whole nanoseconds would be
// wrong by 1 %.
constexpr uint32_t kTickBits = 20;
constexpr double kTicksPerNs = double(1 << kTickBits);
constexpr double kTicksPerSecond = 1e9 * kTicksPerNs;

// The most that a command may take in either stage: half an hour.
constexpr double kStageMaxNs = 1.8e12;
constexpr double kServiceMaxNs = 4e9;  // fits 32 bits
constexpr uint32_t kUnitsMax = 1 << 16;

bool is_positive(double value) { return std::isfinite(value) && value > 0; }

void check_direction(const SsdDirection& direction) {
  require(!direction.ceilings.empty(), "a model needs a ceiling in commands per second");
  for (size_t i = 0; i < direction.ceilings.size(); ++i) {
    const auto& [bytes, per_s] = direction.ceilings[i];
    require(bytes != 0 && is_positive(per_s) && 1e9 / per_s < kStageMaxNs,
            "ceilings are positive block sizes and commands per second");
    require(i == 0 || direction.ceilings[i - 1].first < bytes, "block sizes must ascend");
  }
  require(is_positive(direction.bytes_per_s) && direction.bytes_per_s >= 1e3,
          "bytes_per_s must be 1000 at least");
  require(direction.service_ns.size() >= 2, "at least two quantiles of the service time");
  for (size_t i = 0; i < direction.service_ns.size(); ++i) {
    const float time = direction.service_ns[i];
    require(std::isfinite(time) && time >= 0 && time < kServiceMaxNs,
            "service times are 0 to 4 seconds");
    require(i == 0 || direction.service_ns[i - 1] <= time, "quantiles must ascend");
  }
}

const SsdParameters& checked(const SsdParameters& parameters) {
  check_direction(parameters.read);
  check_direction(parameters.write);
  require(parameters.units >= 1 && parameters.units <= kUnitsMax, "units is 1 to 65536");
  return parameters;
}

// A command's ticks at the ceiling in commands per second.
double ticks_at_ceiling(const SsdDirection& direction, double bytes) {
  const auto& points = direction.ceilings;
  const auto above = std::find_if(points.begin(), points.end(),
                                  [&](const auto& point) { return double(point.first) >= bytes; });
  if (above == points.begin()) return kTicksPerSecond / above->second;
  if (above == points.end()) return kTicksPerSecond / points.back().second;
  const auto below = above - 1;
  const double part = (bytes - below->first) / double(above->first - below->first);
  return kTicksPerSecond * ((1 - part) / below->second + part / above->second);
}

// One to one on 64 bits, and every bit of the result depends on every bit of x (splitmix64).
uint64_t scramble(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

SsdModel::Direction::Direction(const SsdDirection& from)
    : command_ticks(kTicksPerSecond / from.ceilings.back().second),
      block_ticks(kTicksPerSecond * nvme::kLbaBytes / from.bytes_per_s) {
  for (uint32_t blocks = 0; blocks <= kTableBlocks; ++blocks) {
    const double ceiling = ticks_at_ceiling(from, double(blocks) * nvme::kLbaBytes);
    table_ticks[blocks] = uint64_t(std::max(ceiling, blocks * block_ticks));
  }
  for (const float time : from.service_ns) quantiles_ns.push_back(uint32_t(time));
}

uint64_t SsdModel::Direction::pipe_ticks(uint32_t blocks) const {
  if (blocks <= kTableBlocks) return table_ticks[blocks];
  return uint64_t(std::max(command_ticks, blocks * block_ticks));
}

// The service time at a random quantile, linear between the given ones.
uint32_t SsdModel::Direction::service_ns(uint64_t chance) const {
  const auto place = static_cast<unsigned __int128>(chance) * (quantiles_ns.size() - 1);
  const size_t below = size_t(place >> 64);
  const uint64_t part = uint64_t(place) >> 32;
  const uint64_t step = quantiles_ns[below + 1] - quantiles_ns[below];
  return quantiles_ns[below] + uint32_t(step * part >> 32);
}

SsdModel::SsdModel(const SsdParameters& parameters)
    : read_(checked(parameters).read),
      write_(parameters.write),
      seed_(scramble(parameters.seed)),
      units_(parameters.units, 0) {}

int64_t SsdModel::admit(int64_t now_ns, bool is_write, uint32_t blocks) {
  const Direction& direction = is_write ? write_ : read_;
  const int64_t ready_ns = pass_pipe(now_ns, direction.pipe_ticks(blocks));
  return occupy_unit(ready_ns, direction.service_ns(scramble(seed_ ^ number_++)));
}

// Returns when the command leaves the pipe.
int64_t SsdModel::pass_pipe(int64_t now_ns, uint64_t ticks) {
  if (now_ns > pipe_ns_) {
    pipe_ns_ = now_ns;
    pipe_fraction_ = 0;
  }
  const uint64_t sum = pipe_fraction_ + ticks;
  pipe_ns_ += int64_t(sum >> kTickBits);
  pipe_fraction_ = sum & ((1u << kTickBits) - 1);
  return pipe_ns_;
}

// The first unit to be free takes the command. Its new time moves down the heap from the root. The
// child is chosen by arithmetic, because the branch would be unpredictable.
int64_t SsdModel::occupy_unit(int64_t ready_ns, uint32_t service_ns) {
  const int64_t due_ns = std::max(ready_ns, units_[0]) + service_ns;
  const size_t count = units_.size();
  size_t hole = 0;
  for (size_t child = 1; child < count; child = 2 * hole + 1) {
    if (child + 1 < count) child += size_t(units_[child + 1] < units_[child]);
    if (units_[child] >= due_ns) break;
    units_[hole] = units_[child];
    hole = child;
  }
  units_[hole] = due_ns;
  return due_ns;
}

void ModelledDrive::admit(int64_t now_ns, std::span<const Arrival> arrivals, int64_t* due_ns) {
  while (!atomic::try_lock(&lock_)) std::this_thread::yield();
  for (const Arrival& arrival : arrivals) {
    *due_ns++ = model_.admit(now_ns, arrival.is_write, arrival.blocks);
  }
  atomic::unlock(&lock_);
}

}  // namespace fw::native
