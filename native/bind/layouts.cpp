// The structures that Python builds for device code: sizes, and the fields that Python uses.
#include <nanobind/nanobind.h>

#include <type_traits>

#include "flashwarp/batch.cuh"
#include "flashwarp/cache/share_table.cuh"
#include "flashwarp/file/file_view.cuh"
#include "flashwarp/graph.cuh"
#include "flashwarp/kernels/module.cuh"

namespace nb = nanobind;

nb::dict layouts();

namespace {

// The element of a field as the struct module names it; "" for a structure.
template <typename T>
constexpr const char* code_of() {
  using element = std::remove_all_extents_t<T>;
  if (std::is_class_v<element>) return "";
  if (std::is_floating_point_v<element>) return sizeof(element) == 4 ? "f" : "d";
  return sizeof(element) == 8 ? "Q" : sizeof(element) == 4 ? "I" : "B";
}

}  // namespace

// Applies FW_MEMBER to each of up to 64 members.
#define FW_EXPAND(...) FW_EXPAND_16(FW_EXPAND_16(FW_EXPAND_16(FW_EXPAND_16(__VA_ARGS__))))
#define FW_EXPAND_16(...) FW_EXPAND_4(FW_EXPAND_4(FW_EXPAND_4(FW_EXPAND_4(__VA_ARGS__))))
#define FW_EXPAND_4(...) FW_EXPAND_1(FW_EXPAND_1(FW_EXPAND_1(FW_EXPAND_1(__VA_ARGS__))))
#define FW_EXPAND_1(...) __VA_ARGS__
#define FW_EACH(FIRST, ...) FW_MEMBER(FIRST) __VA_OPT__(FW_EACH_AGAIN FW_PAREN(__VA_ARGS__))
#define FW_EACH_AGAIN() FW_EACH
#define FW_PAREN ()

#define FW_MEMBER(NAME)                                                          \
  members.append(nb::make_tuple(#NAME, offsetof(type, NAME), sizeof(type::NAME), \
                                code_of<decltype(type::NAME)>()));
#define FW_STRUCTURE(NAME, TYPE, ...)                     \
  {                                                       \
    using type = TYPE;                                    \
    nb::list members;                                     \
    __VA_OPT__(FW_EXPAND(FW_EACH(__VA_ARGS__)))           \
    result[NAME] = nb::make_tuple(sizeof(type), members); \
  }

// Of each structure its size and its fields: name, offset, size and code. In ascending order, and
// without padding and reserved words.
nb::dict layouts() {
  using namespace fw;
  nb::dict result;
  FW_STRUCTURE("transport", nvme::transport, mapped_base, buffers, buffer_stride, timeout_ns, path,
               leased, heartbeat)
  FW_STRUCTURE("queue_pair", nvme::queue_pair, sq, cq, sq_doorbell, cq_doorbell, slots, detached,
               data, doorbell_kind, plain_reads, plain_writes, cached_reads, parts, part_count,
               ticket, depth_log2, id, failed, drive, publish_lock, tail, drain_lock, head, fetched,
               doorbells, helps)
  FW_STRUCTURE("drive_addressing", nvme::drive_addressing, begin, iova_offset, lists, page_bytes,
               nsid, lba_shift, extents, extent_count)
  FW_STRUCTURE("detached_command", nvme::detached_command, tag)
  FW_STRUCTURE("counters", cache::counters, hits, misses, evictions, write_backs, bytes_read,
               bytes_written, bytes_used, errors, tier_hits, tier_lines, kernel_misses,
               kernel_bytes_read, bypasses)
  FW_STRUCTURE("failure", cache::failure, where, status, opcode, number, limit)
  FW_STRUCTURE("error_record", cache::error_record, commands, indices)
  FW_STRUCTURE("failure_log", cache::failure_log, noted, read, untold)
  FW_STRUCTURE("lease", cache::lease, epoch, swept, next, done)
  FW_STRUCTURE("queue_span", cache::queue_span, first, count)
  FW_STRUCTURE("volume", cache::volume, line_begin, line_count, bytes, queues, events, errors,
               queue_count, spread, lease, stripe_lines, replica_writes, namespace_count, failed,
               path, attached, spans, commands, indices, visitors)
  FW_STRUCTURE("geometry", cache::geometry, tags, frames, set_count, set_reciprocal, ways,
               line_shift)
  FW_STRUCTURE("host_tier", cache::host_tier, tags, frames, subsets)
  FW_STRUCTURE("line_cache", cache::line_cache, geometry, set_control, volumes, page_bytes,
               tier_ways, tier, refusals, volume_end, owner)
  FW_STRUCTURE("miss_list", cache::miss_list, state, head, tail, capacity_log2)
  FW_STRUCTURE("list_use", cache::list_use, list, launch, blocks, bundle)
  FW_STRUCTURE("share_table", cache::share_table, words, copies, locks, overflows, bucket_bits)
  FW_STRUCTURE("array", array<float>, geometry, cache, volume, line_begin, length)
  FW_STRUCTURE("file_state", file_state, size)
  FW_STRUCTURE("file", file, bytes, state, mode, lines_ahead, fixed_size)
  FW_STRUCTURE("row_params", kernels::row_params, geometry, cache, volume, indices, index_count,
               rows, row_bytes, row_count, from_front, from_end, look_ahead, strays, index_bytes,
               segments, bundle, misses)
  FW_STRUCTURE("maintenance_params", kernels::maintenance_params, cache, volume, line_begin,
               line_end, lba, lba_count, opcode, prp1, cdw10, drop)
  FW_STRUCTURE("graph_rows", graph::rows, offsets, first, vertices, entries, chunks, chunk_log2,
               ahead, backwards, in_place)
  FW_STRUCTURE("table_scales", kernels::table_scales, geometry, cache, volume, memory, stride,
               columns, number, row_shift, divides, whole)
  FW_STRUCTURE("lookup_table", kernels::lookup_table, geometry, cache, volume, row_bytes, row_begin,
               row_count, padding, out_column, scales, number, dim, word_bytes, words, lanes,
               straddles)
  FW_STRUCTURE("lookup_params", kernels::lookup_params, table, tables, ids, offsets, weights, out,
               id_count, bags, bag_ids, offset_count, out_stride, run, warp_items, look_ahead,
               table_count, index_bytes, offset_bytes, weight_number, out_number, pooling)
  FW_STRUCTURE("sum_params", kernels::sum_params, ids, order, gradients, sums, count, width)
  FW_STRUCTURE("update_params", kernels::update_params, rows, sums, scale, padding, rule, width,
               rate, epsilon, mean_rate, square_rate, decay)
  FW_STRUCTURE("batch_request", batch::request, ready, buffer, rows, first, kind, place, after)
  FW_STRUCTURE("batch_result", batch::result, done, failed)
  FW_STRUCTURE("batch_regions", batch::regions, requests, results, lists, all_statuses, count,
               rows_max)
  FW_STRUCTURE("batch_slot_state", batch::slot_state, issued, rows, held, next)
  FW_STRUCTURE("batch_direction", batch::direction, shared, states, failures, limit, row_bytes,
               other, taken, meeting, found, log, late, full, looked)
  FW_STRUCTURE("pipeline", pipeline<float>, reads, writes)
  return result;
}
