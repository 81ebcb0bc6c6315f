// Sizes and member offsets of the structures that Python mirrors, for the test that compares them.
#include <nanobind/nanobind.h>

#include "flashwarp/batch.cuh"
#include "flashwarp/kernels/module.cuh"

namespace nb = nanobind;

nb::dict layouts();

// Applies FW_MEMBER to each of up to 64 members.
#define FW_EXPAND(...) FW_EXPAND_16(FW_EXPAND_16(FW_EXPAND_16(FW_EXPAND_16(__VA_ARGS__))))
#define FW_EXPAND_16(...) FW_EXPAND_4(FW_EXPAND_4(FW_EXPAND_4(FW_EXPAND_4(__VA_ARGS__))))
#define FW_EXPAND_4(...) FW_EXPAND_1(FW_EXPAND_1(FW_EXPAND_1(FW_EXPAND_1(__VA_ARGS__))))
#define FW_EXPAND_1(...) __VA_ARGS__
#define FW_EACH(FIRST, ...) FW_MEMBER(FIRST) __VA_OPT__(FW_EACH_AGAIN FW_PAREN(__VA_ARGS__))
#define FW_EACH_AGAIN() FW_EACH
#define FW_PAREN ()

// Under (name, "") the size, under (name, member) the offset.
#define FW_MEMBER(NAME) result[nb::make_tuple(structure, #NAME)] = offsetof(type, NAME);
#define FW_STRUCTURE(NAME, TYPE, ...)                     \
  {                                                       \
    using type = TYPE;                                    \
    constexpr const char* structure = NAME;               \
    result[nb::make_tuple(structure, "")] = sizeof(type); \
    __VA_OPT__(FW_EXPAND(FW_EACH(__VA_ARGS__)))           \
  }

nb::dict layouts() {
  using namespace fw;
  nb::dict result;
  FW_STRUCTURE("transport", nvme::transport, buffers, timeout_ns, path, heartbeat)
  FW_STRUCTURE("queue_pair", nvme::queue_pair, sq, cq, sq_doorbell, cq_doorbell, slots, detached,
               data, plain_reads, parts, ticket, depth_log2, id, failed, drive, tail, head,
               doorbells, helps)
  FW_STRUCTURE("drive_addressing", nvme::drive_addressing, iova_offset, lists, page_bytes, nsid,
               lba_shift, extents, extent_count)
  FW_STRUCTURE("detached_command", nvme::detached_command)
  FW_STRUCTURE("counters", cache::counters, bytes_read, errors, tier_lines)
  FW_STRUCTURE("error_record", cache::error_record, indices)
  FW_STRUCTURE("failure", cache::failure, status, opcode, number)
  FW_STRUCTURE("failure_log", cache::failure_log, read, untold)
  FW_STRUCTURE("lease", cache::lease, epoch, swept, next, done)
  FW_STRUCTURE("volume", cache::volume, bytes, queues, errors, path, commands, indices, spread,
               lease, stripe_lines, replica_writes, namespace_count, spans)
  FW_STRUCTURE("line_cache", cache::line_cache, set_control, volumes, page_bytes, tier_ways, tier)
  FW_STRUCTURE("geometry", cache::geometry, frames, set_reciprocal, line_shift)
  FW_STRUCTURE("host_tier", cache::host_tier, frames, subsets)
  FW_STRUCTURE("array", array<float>, cache, length)
  FW_STRUCTURE("row_params", kernels::row_params, rows, from_front, segments, batch, misses)
  FW_STRUCTURE("table_scales", kernels::table_scales, volume, stride, columns, number)
  FW_STRUCTURE("lookup_table", kernels::lookup_table, volume, row_count, scales, number, straddles)
  FW_STRUCTURE("lookup_params", kernels::lookup_params, tables, ids, out, bags, run, table_count,
               pooling)
  FW_STRUCTURE("list_use", cache::list_use, list, launch, blocks, batch)
  FW_STRUCTURE("miss_list", cache::miss_list, state, head, tail, capacity_log2)
  FW_STRUCTURE("batch_request", batch::request, ready, buffer, rows, first, kind, place)
  FW_STRUCTURE("batch_result", batch::result, done, failed)
  FW_STRUCTURE("batch_regions", batch::regions, requests, results, lists, all_statuses, count,
               rows_max)
  FW_STRUCTURE("batch_slot_state", batch::slot_state, issued, rows, held, next)
  FW_STRUCTURE("batch_direction", batch::direction, shared, states, failures, limit, row_bytes,
               taken, meeting, found, log, late, full, looked)
  FW_STRUCTURE("pipeline", pipeline<float>, reads, writes)
  FW_STRUCTURE("missed_pieces", kernels::missed_pieces, hits, bytes, strays, stray)
  FW_STRUCTURE("client_params", kernels::client_params, line_begin, epoch, epoch_opened, missed,
               list, handed, places, count)
  FW_STRUCTURE("maintenance_params", kernels::maintenance_params, opcode, drop)
  FW_STRUCTURE("sum_params", kernels::sum_params, sums, count, width)
  FW_STRUCTURE("update_params", kernels::update_params, sums, padding, rule, width, epsilon)
  return result;
}
