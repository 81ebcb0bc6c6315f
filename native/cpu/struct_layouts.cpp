#include "cpu/struct_layouts.h"

#include "flashwarp/kernels/module.cuh"

namespace fw::native {

using kernels::maintenance_params;
using kernels::row_params;

#define FW_SIZE(NAME, TYPE) \
  MemberLayout { NAME, "", sizeof(TYPE) }
#define FW_MEMBER(NAME, TYPE, MEMBER) \
  MemberLayout { NAME, #MEMBER, offsetof(TYPE, MEMBER) }

const std::vector<MemberLayout>& structure_layouts() {
  static const std::vector<MemberLayout> layouts = {
      FW_SIZE("transport", nvme::transport),
      FW_MEMBER("transport", nvme::transport, buffers),
      FW_MEMBER("transport", nvme::transport, timeout_ns),
      FW_MEMBER("transport", nvme::transport, path),
      FW_MEMBER("transport", nvme::transport, heartbeat),
      FW_SIZE("queue_pair", nvme::queue_pair),
      FW_MEMBER("queue_pair", nvme::queue_pair, sq),
      FW_MEMBER("queue_pair", nvme::queue_pair, cq),
      FW_MEMBER("queue_pair", nvme::queue_pair, sq_doorbell),
      FW_MEMBER("queue_pair", nvme::queue_pair, cq_doorbell),
      FW_MEMBER("queue_pair", nvme::queue_pair, slots),
      FW_MEMBER("queue_pair", nvme::queue_pair, detached),
      FW_MEMBER("queue_pair", nvme::queue_pair, data),
      FW_MEMBER("queue_pair", nvme::queue_pair, plain_reads),
      FW_MEMBER("queue_pair", nvme::queue_pair, ticket),
      FW_MEMBER("queue_pair", nvme::queue_pair, depth_log2),
      FW_MEMBER("queue_pair", nvme::queue_pair, id),
      FW_MEMBER("queue_pair", nvme::queue_pair, failed),
      FW_MEMBER("queue_pair", nvme::queue_pair, tail),
      FW_MEMBER("queue_pair", nvme::queue_pair, head),
      FW_MEMBER("queue_pair", nvme::queue_pair, doorbells),
      FW_MEMBER("queue_pair", nvme::queue_pair, helps),
      FW_SIZE("detached_command", nvme::detached_command),
      FW_SIZE("counters", cache::counters),
      FW_MEMBER("counters", cache::counters, bytes_read),
      FW_MEMBER("counters", cache::counters, errors),
      FW_MEMBER("counters", cache::counters, tier_lines),
      FW_SIZE("error_record", cache::error_record),
      FW_MEMBER("error_record", cache::error_record, indices),
      FW_SIZE("failure", cache::failure),
      FW_MEMBER("failure", cache::failure, status),
      FW_MEMBER("failure", cache::failure, opcode),
      FW_MEMBER("failure", cache::failure, number),
      FW_SIZE("failure_log", cache::failure_log),
      FW_MEMBER("failure_log", cache::failure_log, read),
      FW_MEMBER("failure_log", cache::failure_log, untold),
      FW_SIZE("volume", cache::volume),
      FW_MEMBER("volume", cache::volume, bytes),
      FW_MEMBER("volume", cache::volume, queues),
      FW_MEMBER("volume", cache::volume, errors),
      FW_MEMBER("volume", cache::volume, path),
      FW_MEMBER("volume", cache::volume, commands),
      FW_MEMBER("volume", cache::volume, indices),
      FW_MEMBER("volume", cache::volume, spread),
      FW_MEMBER("volume", cache::volume, stripe_lines),
      FW_MEMBER("volume", cache::volume, replica_writes),
      FW_MEMBER("volume", cache::volume, namespace_count),
      FW_MEMBER("volume", cache::volume, spans),
      FW_SIZE("line_cache", cache::line_cache),
      FW_MEMBER("line_cache", cache::line_cache, set_control),
      FW_SIZE("geometry", cache::geometry),
      FW_MEMBER("geometry", cache::geometry, frames),
      FW_MEMBER("geometry", cache::geometry, set_reciprocal),
      FW_MEMBER("geometry", cache::geometry, line_shift),
      FW_MEMBER("line_cache", cache::line_cache, volumes),
      FW_MEMBER("line_cache", cache::line_cache, page_bytes),
      FW_MEMBER("line_cache", cache::line_cache, tier_ways),
      FW_MEMBER("line_cache", cache::line_cache, tier),
      FW_SIZE("host_tier", cache::host_tier),
      FW_MEMBER("host_tier", cache::host_tier, frames),
      FW_MEMBER("host_tier", cache::host_tier, subsets),
      FW_SIZE("array", array<float>),
      FW_MEMBER("array", array<float>, cache),
      FW_MEMBER("array", array<float>, length),
      FW_SIZE("row_params", row_params),
      FW_MEMBER("row_params", row_params, rows),
      FW_MEMBER("row_params", row_params, segments),
      FW_MEMBER("row_params", row_params, batch),
      FW_SIZE("maintenance_params", maintenance_params),
      FW_MEMBER("maintenance_params", maintenance_params, opcode),
      FW_MEMBER("maintenance_params", maintenance_params, drop),
  };
  return layouts;
}

}  // namespace fw::native
