// Kernels by which the host maintains a cache and its queues: flush, invalidate, drop, quiesce, and
// single commands.
#pragma once

#include "builds.cuh"
#include "flashwarp/array.cuh"
#include "flashwarp/cache/single_command.cuh"

namespace fw::kernels {

struct maintenance_params {
  cache::line_cache* cache;
  cache::volume* volume;
  uint64_t line_begin;  // flush: global lines of the range
  uint64_t line_end;
  uint64_t lba;        // command: first block
  uint32_t lba_count;  // command: blocks, 0 for commands without a range
  uint32_t opcode;     // command
  uint64_t prp1;       // command: address of its data, if any
  uint32_t cdw10;      // Dataset Management: number of ranges, zero-based
  uint32_t drop;       // invalidate: a drop_mode
};
static_assert(sizeof(maintenance_params) == 64);

// The lines that `fw_invalidate_lines` drops besides clean ones. With kDropAll it never waits.
enum drop_mode : uint32_t { kKeepDirty = 0, kDropDirty = 1, kDropAll = 2 };

}  // namespace fw::kernels

#if FW_BUILDS(flush_lines)
// Writes the dirty lines of a range back to the namespace.
FW_KERNEL_RESIDENT(2) fw_flush_lines(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  const uint64_t ways = p.cache->geometry.set_count * p.cache->geometry.ways;
  const uint64_t stride = uint64_t(fw::warp::count()) * fw::warp::kWarpWidth;
  for (uint64_t first = uint64_t(fw::warp::index()) * fw::warp::kWarpWidth; first < ways;
       first += stride) {
    const uint64_t way = first + fw::warp::lane();
    fw::cache::flush_ways(*p.cache, *p.volume, fw::lanes::all(), way < ways, way, p.line_begin,
                          p.line_end);
  }
}
#endif

#if FW_BUILDS(invalidate_lines)
// Empties every frame that holds a line of the volume.
FW_KERNEL fw_invalidate_lines(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  const uint64_t ways = p.cache->geometry.set_count * p.cache->geometry.ways;
  const uint64_t stride = uint64_t(fw::warp::count()) * fw::warp::kWarpWidth;
  for (uint64_t first = uint64_t(fw::warp::index()) * fw::warp::kWarpWidth; first < ways;
       first += stride) {
    const uint64_t way = first + fw::warp::lane();
    if (p.drop == fw::kernels::kDropAll) {
      if (way < ways) fw::cache::forget_way(*p.cache, *p.volume, way);
      continue;
    }
    fw::cache::invalidate_ways(*p.cache, *p.volume, fw::lanes::all(), way < ways, way,
                               p.drop != fw::kernels::kKeepDirty);
  }
}
#endif

#if FW_BUILDS(refresh_lines)
// Drops lines that were cached before another program was let to write the file; usually none. For
// kernels that do not call `fw::refresh` themselves and are replayed in a graph.
FW_KERNEL fw_refresh_lines(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  fw::cache::refresh(*p.cache, *p.volume, fw::lanes::all());
}
#endif

#if FW_BUILDS(drop_tier)
// Drops the volume's lines from the host tier. fw_invalidate_lines must have ended, because lines
// that are still in frames could enter the tier again.
FW_KERNEL fw_drop_tier(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  fw::cache::line_cache& c = *p.cache;
  const uint64_t places = c.geometry.set_count * c.tier.subsets * c.tier_ways;
  const uint64_t stride = uint64_t(fw::warp::count()) * fw::warp::kWarpWidth;
  for (uint64_t first = uint64_t(fw::warp::index()) * fw::warp::kWarpWidth; first < places;
       first += stride) {
    const uint64_t place = first + fw::warp::lane();
    if (p.drop == fw::kernels::kDropAll) {
      if (place < places) fw::cache::forget_in_tier(c, *p.volume, place);
      continue;
    }
    fw::cache::drop_from_tier(c, *p.volume, fw::lanes::all(), place < places, place);
  }
}
#endif

#if FW_BUILDS(quiesce)
// Waits until no command of the volume is outstanding: one warp for each queue pair.
FW_KERNEL_RESIDENT(2) fw_quiesce(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  fw::cache::line_finisher finisher{*p.cache};
  fw::cache::volume& v = *p.volume;
  for (uint32_t i = fw::warp::index(); i < v.queue_count; i += fw::warp::count()) {
    fw::nvme::queue_pair& q = v.queues[i];
    fw::nvme::deadline limit(q.data);
    // All lanes go on while one of them sees a command, so that none leaves before a collective.
    while (fw::lanes::all().any(fw::atomic::load_relaxed(&q.head) !=
                                fw::atomic::load_relaxed(&q.ticket))) {
      const bool dead = limit.passed() || fw::atomic::load_relaxed(&q.failed) != 0;
      if (fw::lanes::all().any(dead)) {
        if (fw::warp::lane() == 0) {
          fw::cache::record_error(v, fw::nvme::kTimedOut, fw::nvme::kRead, v.line_begin);
        }
        return;
      }
      fw::nvme::help(q, fw::lanes::all(), finisher);
    }
  }
}
#endif

#if FW_BUILDS(submit_command)
// Submits one command (Flush, Write Zeroes, Dataset Management, ...) to each namespace and waits:
// one warp for each namespace. Commands that name blocks need a volume of one namespace.
FW_KERNEL fw_submit_command(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  fw::cache::volume& v = *p.volume;
  fw::nvme::command entry = fw::nvme::block_command(uint8_t(p.opcode), 0, p.lba,
                                                    p.lba_count == 0 ? 1 : p.lba_count, p.prp1, 0);
  if (p.opcode == fw::nvme::kDatasetManagement) {
    entry.cdw10 = p.cdw10;
    entry.cdw11 = fw::nvme::kAttributeDeallocate;
    entry.cdw12 = 0;
  }
  for (uint32_t n = fw::warp::index(); n < fw::cache::namespaces_of(v); n += fw::warp::count()) {
    const uint32_t status = fw::cache::run_command(*p.cache, fw::cache::queue_of_namespace(v, n),
                                                   fw::lanes::all(), entry);
    if (fw::warp::lane() == 0 && status != fw::nvme::kSuccess) {
      fw::cache::record_error(v, status, p.opcode, v.line_begin);
    }
  }
}
#endif
